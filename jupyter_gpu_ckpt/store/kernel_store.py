"""What is known of kernels, whether their servers live or not: their records, and leases."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ..errors import CkptError
from . import failures as failed
from .clocks import has_one_clock
from .kernel_files import RECORDS
from .keys import KeyRing
from .layout import (
    check_kernel_id,
    is_kernel_id,
    is_of_one_file,
    owner_folder,
    put_file,
    translated,
)
from .local_files import tidy
from .owner import OwnerStore, open_owner
from .presence import store_now
from .records import KernelRecord
from .seal import Sealing

#: Seconds to wait for somebody else's claim, which takes milliseconds.
_CLAIM_TIMEOUT: Final = 5.0

READING = "read from the state store"
WRITING = "write to the state store"


class Heartbeat(NamedTuple):
    """When a kernel's lease was renewed last.

    ``age`` is in seconds; ``one_clock``: by a clock that all nodes share. ``mark`` is another one
    after each renewal. For the last ``unread`` seconds nobody could look.
    """

    age: float
    mark: str
    one_clock: bool
    unread: float = 0.0


class KernelStore:
    """The part of a store that is about kernels; see :class:`~.state_store.StateStore`."""

    def __init__(self, root: Path, owner: str, ring: KeyRing | None) -> None:
        self.root = Path(root)
        self._name = owner_folder(owner)
        self._ring = ring
        self._one_clock: bool | None = None

    def _open(self) -> OwnerStore | None:
        with translated(READING):
            return open_owner(self.root, self._name, create=False, ring=self._ring)

    def _create(self) -> OwnerStore:
        with translated(WRITING):
            owner = open_owner(self.root, self._name, create=True, ring=self._ring)
        assert owner is not None
        return owner

    def start(self) -> None:
        """Begin what goes on in the background; the keeper calls it when the server is up."""

    def flush(self, timeout: float, stop: threading.Event | None = None) -> list[str]:
        """Wait until no state is on this node only, `timeout` seconds at most, or for `stop`.

        Returns the ids of states of which that is not so.
        """
        return []

    def stop(self, timeout: float) -> list[str]:
        """End it within `timeout` seconds; returns the ids of states that only this node has."""
        return []

    def warnings(self) -> list[CkptError]:
        """What lists cannot say: that states may be missing in them, or are not durable yet."""
        return []

    @contextlib.contextmanager
    def claiming(self, kernel_id: str, stop: threading.Event | None = None) -> Iterator[bool]:
        """For the block, no other process that shares the store is in such a block.

        It looks whose a kernel is, and takes it. Where the file system has no locks, or the one
        who holds it does not let go, the block is run all the same: a claim must not hang.

        Parameters
        ----------
        kernel_id
            The kernel.
        stop
            Set it to stop waiting for others.

        Yields
        ------
        bool
            False where processes on other nodes could not be asked.

        Raises
        ------
        CkptError
            ``not_restorable``: others do not come to an end; ``cancelled``.
        """
        check_kernel_id(kernel_id)
        owner = self._create()
        with translated(WRITING):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(owner.writers / ".claims", flags, 0o600)
        try:
            deadline = time.monotonic() + _CLAIM_TIMEOUT
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
                except OSError:
                    break
            yield True
        finally:
            os.close(fd)

    def put_kernel(self, record: KernelRecord) -> None:
        """Write a kernel's record, whole or not at all; the keeper renews leases with it.

        Raises
        ------
        CkptError
            ``unknown_kernel`` for an id that cannot be one, ``no_space``.
        """
        check_kernel_id(record.kernel_id)
        owner = self._create()
        data = RECORDS.encode(record, owner.sealing)
        with translated(WRITING):
            put_file(owner.writers, owner.kernels / record.kernel_id / "kernel.json", data)

    def renew_kernel(self, record: KernelRecord) -> None:
        """Make the record of a kernel young again that says the same but for its lease's time.

        Costs a tenth of :meth:`put_kernel`, and never takes the place of another's record.

        Raises
        ------
        CkptError
            As :meth:`put_kernel`.
        """
        check_kernel_id(record.kernel_id)
        path = self._create().kernels / record.kernel_id / "kernel.json"
        with translated(WRITING):
            try:
                os.utime(path)
            except FileNotFoundError:
                self.put_kernel(record)

    def kernel(self, kernel_id: str) -> KernelRecord | None:
        """Look up a kernel's record; ``None`` if there is none.

        Raises
        ------
        CkptError
            ``state_damaged``: the record is there and unreadable; ``store_unavailable``.
        """
        check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return None
        with translated(READING):
            return _load_kernel(owner.kernels / kernel_id / "kernel.json", owner.sealing)

    def kernels(self) -> list[KernelRecord]:
        """List all kernel records, in order of their ids; without :meth:`unreadable_kernels`."""
        return [found for found in self._kernels() if isinstance(found, KernelRecord)]

    def unreadable_kernels(self) -> list[CkptError]:
        """What is wrong with each record that cannot be read: such kernels are not offered."""
        return [found for found in self._kernels() if isinstance(found, CkptError)]

    def _kernels(self) -> list[KernelRecord | CkptError]:
        owner = self._open()
        if owner is None:
            return []
        found: list[KernelRecord | CkptError] = []
        with translated(READING):
            for folder in owner.kernel_folders():
                if not is_kernel_id(folder.name):
                    continue  # no server has made it
                try:
                    record = _load_kernel(folder / "kernel.json", owner.sealing)
                except CkptError as error:
                    found.append(error)
                else:
                    found += [] if record is None else [record]
        return found

    def heartbeat(self, kernel_id: str) -> Heartbeat | None:
        """When a kernel's record was written last; ``None`` if there is none."""
        check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return None
        with translated(READING):
            try:
                written = (owner.kernels / kernel_id / "kernel.json").stat()
            except FileNotFoundError:
                return None
            if self._one_clock is None:
                self._one_clock = has_one_clock(owner.kernels)
            age = store_now(owner.writers) - written.st_mtime
            return Heartbeat(age, str(written.st_mtime_ns), self._one_clock)

    def delete_kernel(self, kernel_id: str) -> None:
        """Remove a kernel's record, if there; its states stay."""
        check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return
        folder = owner.kernels / kernel_id
        with translated(WRITING):
            try:
                (folder / "kernel.json").unlink()
            except FileNotFoundError:
                return
            tidy(folder)

    # -- saves that failed -----------------------------------------------------------------

    def note_failure(self, failure: failed.SaveFailure) -> None:
        """Note that a kernel's last save failed, until :meth:`clear_failure`.

        Raises
        ------
        CkptError
            ``unknown_kernel`` for an id that cannot be one, ``no_space``.
        """
        check_kernel_id(failure.kernel_id)
        owner = self._create()
        path = owner.kernels / failure.kernel_id / failed.NAME
        with translated(WRITING):
            before = failed.read(path, owner.sealing)
            if before is None:
                failed.make_room(owner.kernel_folders(), self.clear_failure)
            data = failed.encode(failure, before, owner.sealing)
            put_file(owner.writers, path, data)
        self._send_failure(failure.kernel_id, data)

    def clear_failure(self, kernel_id: str) -> None:
        """A kernel was saved, or nobody wants to know any more why it could not be."""
        check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return
        with translated(WRITING):
            try:
                (owner.kernels / kernel_id / failed.NAME).unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            tidy(owner.kernels / kernel_id)
        self._send_failure(kernel_id, None)

    def failures(self) -> list[failed.SaveFailure]:
        """Kernels whose last save failed, newest failure first."""
        owner = self._open()
        if owner is None:
            return []
        with translated(READING):
            files = [folder / failed.NAME for folder in owner.kernel_folders()]
            found = [failed.read(path, owner.sealing) for path in files]
        return sorted((one for one in found if one), key=lambda one: one.at, reverse=True)

    def _send_failure(self, kernel_id: str, data: bytes | None) -> None:
        """What else is to be done with a failure's file; for stores with another tier."""


def _load_kernel(path: Path, sealing: Sealing) -> KernelRecord | None:
    try:
        record = RECORDS.decode(path.read_bytes(), sealing)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if not is_of_one_file(error):
            raise
        raise _unreadable(path, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(path, "is damaged, or of another version") from error
    if record.kernel_id != path.parent.name:
        raise _unreadable(path, "is another's")
    return record


def _unreadable(path: Path, why: str) -> CkptError:
    kernel_id = path.parent.name
    return CkptError(
        "state_damaged",
        f"The record of kernel {kernel_id} {why}.",
        hint="So the kernel is not offered when it is lost. Its states can be restored all the "
        f"same: jupyter gpu-ckpt states --kernel {kernel_id}",
        details=os.fspath(path),
    )
