"""The store as the keeper sees it: states, kernel records, garbage collection."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from ..errors import CkptError
from .chunks import Chunks
from .collect import collect, manifests, manifests_of
from .layout import (
    check_kernel_id,
    check_state_id,
    create_file,
    move_into,
    owner_folder,
    sync_dir,
    translated,
    unknown_state,
)
from .manifest import Body, Damaged, TooNew, damaged, decode_manifest, too_new
from .owner import OwnerStore, open_owner
from .pool import Progress, worker_count
from .reader import StateReader
from .records import GcResult, KernelRecord, StateRecord
from .writer import StateWriter

_READING = "read from the state store"
_WRITING = "write to the state store"


class StateStore:
    """One owner's states in a local (or mounted) folder.

    Synchronous and thread-safe; the keeper calls it from worker threads. Several
    processes may use the same store at once.

    Parameters
    ----------
    root
        Folder of the store; made on the first write, mode 0700.
    owner
        Whose states; other owners' are invisible.
    compression_level
        zstd level.
    workers
        Threads for hashing, compressing, reading and writing; ``None`` for as many as
        fit the machine. Memory is bounded by about 4 MiB a thread.

    Raises
    ------
    CkptError
        Every method raises ``store_unavailable`` for a store that cannot be read or
        written, is open to other users, or has a newer format.
    """

    def __init__(
        self, root: Path, owner: str, *, compression_level: int = 1, workers: int | None = None
    ) -> None:
        self.root = Path(root)
        self._name = owner_folder(owner)
        self._level = compression_level
        self._workers = worker_count(workers)

    def _open(self) -> OwnerStore | None:
        with translated(_READING):
            return open_owner(self.root, self._name, create=False)

    def _create(self) -> OwnerStore:
        with translated(_WRITING):
            owner = open_owner(self.root, self._name, create=True)
        assert owner is not None
        return owner

    # -- states ---------------------------------------------------------------

    def begin(self, kernel_id: str) -> StateWriter:
        """Start a new state of a kernel; the keeper calls it when it saves.

        Raises
        ------
        CkptError
            ``unknown_kernel`` for an id that cannot be one, ``no_space``.
        """
        check_kernel_id(kernel_id)
        owner = self._create()
        now = datetime.now(timezone.utc)
        state_id = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        with translated(_WRITING):
            return StateWriter(owner, kernel_id, state_id, level=self._level, workers=self._workers)

    def states(self, kernel_id: str | None = None, path: str | None = None) -> list[StateRecord]:
        """List intact states, newest first, of one kernel or notebook path if given.

        A notebook's are those saved under its path, and those of the kernel that has it now: it
        may have been renamed since.

        Only manifests are read: hundreds take milliseconds. See :meth:`damaged` for others.
        """
        has_it = set()
        if path is not None:
            has_it = {kernel.kernel_id for kernel in self.kernels() if kernel.path == path}
        records = [
            body.record()
            for _, body in self._bodies(kernel_id)
            if isinstance(body, Body)
            and (path is None or body.meta.path == path or body.meta.kernel_id in has_it)
        ]
        return sorted(records, key=lambda record: (record.created, record.id), reverse=True)

    def damaged(self) -> list[tuple[str, str]]:
        """List states that cannot be read: (state id, why), newest first."""
        bad = [
            (state, body.message) for state, body in self._bodies() if not isinstance(body, Body)
        ]
        return sorted(bad, reverse=True)

    def state(self, state_id: str) -> StateRecord:
        """Look up one state.

        Raises
        ------
        CkptError
            ``unknown_state``, ``state_damaged``, ``not_restorable`` (newer format).
        """
        return self._body(state_id)[1].record()

    def delete(self, state_id: str) -> None:
        """Remove a state, damaged or not; its space comes back with the next collection.

        Raises
        ------
        CkptError
            ``unknown_state``.
        """
        _, path = self._find(state_id)
        with translated(_WRITING):
            try:
                path.unlink()
            except FileNotFoundError:
                raise unknown_state() from None
            _sync_and_tidy(path.parent, path.parent.parent)

    def open(self, state_id: str) -> StateReader:
        """Open a state to read it back; the keeper calls it before a restore.

        Raises
        ------
        CkptError
            ``unknown_state``, ``state_damaged``, ``not_restorable`` (newer format).
        """
        owner, body = self._body(state_id)
        return StateReader(Chunks(owner), body, level=self._level, workers=self._workers)

    def materialise(
        self,
        state_id: str,
        dest: Path,
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Rebuild a state's image directory, whole; see :meth:`StateReader.extract`."""
        with self.open(state_id) as reader:
            reader.extract(Path(dest), progress=progress, cancel=cancel)

    def gc(
        self,
        *,
        grace_seconds: float = 3600,
        dry_run: bool = False,
        stop: threading.Event | None = None,
    ) -> GcResult:
        """Remove what no state needs; safe beside running saves, here and elsewhere.

        Parameters
        ----------
        grace_seconds
            Spare what is younger.
        dry_run
            Only count.
        stop
            Ends it early when set; what was removed until then is the result.
        """
        owner = self._open()
        if owner is None:
            return GcResult(0, 0)
        owner = self._create()
        with translated("tidy up the state store"):
            return collect(owner, grace_seconds=grace_seconds, dry_run=dry_run, stop=stop)

    def usage(self) -> int:
        """Bytes this owner's store takes on disk."""
        owner = self._open()
        if owner is None:
            return 0
        with translated(_READING):
            return _disk_usage(os.fspath(owner.folder))

    def _bodies(self, kernel_id: str | None = None) -> list[tuple[str, Body | CkptError]]:
        if kernel_id is not None:
            check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return []
        with translated(_READING):
            if kernel_id is None:
                paths = list(manifests(owner))
            else:
                paths = list(manifests_of(owner.states_of(kernel_id)))
            found: list[tuple[str, Body | CkptError]] = []
            for path in paths:
                try:
                    found.append((path.stem, _load(owner, path)))
                except FileNotFoundError:
                    continue  # deleted meanwhile
                except CkptError as error:
                    found.append((path.stem, error))
        return found

    def _find(self, state_id: str) -> tuple[OwnerStore, Path]:
        check_state_id(state_id)
        owner = self._open()
        if owner is not None:
            with translated(_READING):
                for kernel in owner.kernel_folders():
                    path = kernel / "states" / f"{state_id}.json"
                    if path.is_file():
                        return owner, path
        raise unknown_state()

    def _body(self, state_id: str) -> tuple[OwnerStore, Body]:
        owner, path = self._find(state_id)
        with translated(_READING):
            try:
                return owner, _load(owner, path)
            except FileNotFoundError:
                raise unknown_state() from None

    # -- kernel records -------------------------------------------------------

    def put_kernel(self, record: KernelRecord) -> None:
        """Write a kernel's record, whole or not at all; the keeper renews leases with it.

        Raises
        ------
        CkptError
            ``unknown_kernel`` for an id that cannot be one, ``no_space``.
        """
        check_kernel_id(record.kernel_id)
        owner = self._create()
        temporary = owner.writers / f".kernel-{secrets.token_hex(8)}"
        with translated(_WRITING):
            try:
                create_file(temporary, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
                move_into(temporary, owner.kernels / record.kernel_id / "kernel.json")
            finally:
                temporary.unlink(missing_ok=True)

    def kernel(self, kernel_id: str) -> KernelRecord | None:
        """Look up a kernel's record; ``None`` if there is none.

        Raises
        ------
        CkptError
            ``state_damaged``: the record is there and unreadable.
        """
        check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return None
        with translated(_READING):
            return _load_kernel(owner.kernels / kernel_id / "kernel.json")

    def kernels(self) -> list[KernelRecord]:
        """List all readable kernel records, in order of their ids."""
        owner = self._open()
        if owner is None:
            return []
        records: list[KernelRecord] = []
        with translated(_READING):
            for folder in owner.kernel_folders():
                try:
                    record = _load_kernel(folder / "kernel.json")
                except CkptError:
                    continue
                if record is not None:
                    records.append(record)
        return records

    def delete_kernel(self, kernel_id: str) -> None:
        """Remove a kernel's record, if there; its states stay."""
        check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return
        folder = owner.kernels / kernel_id
        with translated(_WRITING):
            try:
                (folder / "kernel.json").unlink()
            except FileNotFoundError:
                return
            _sync_and_tidy(folder)


def _load(owner: OwnerStore, path: Path) -> Body:
    state_id = path.stem
    data = path.read_bytes()
    try:
        body = decode_manifest(data, owner.manifest_key)
    except Damaged as error:
        raise damaged(state_id, str(error)) from error
    except TooNew as error:
        raise too_new(state_id, str(error)) from error
    if body.id != state_id or body.meta.kernel_id != path.parent.parent.name:
        raise damaged(state_id, "its manifest belongs to another state")
    return body


def _load_kernel(path: Path) -> KernelRecord | None:
    try:
        record = msgspec.json.decode(path.read_bytes(), type=KernelRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CkptError(
            "state_damaged",
            f"The record of kernel {path.parent.name} is damaged.",
            details=os.fspath(path),
        ) from error
    if record.kernel_id != path.parent.name:
        raise CkptError("state_damaged", f"The record of kernel {path.parent.name} is another's.")
    return record


def _sync_and_tidy(*folders: Path) -> None:
    """Make a removal durable, and remove the folders that it left empty."""
    for folder in folders:
        try:
            sync_dir(folder)
            folder.rmdir()
        except FileNotFoundError:
            continue  # another process tidied up first
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                return
            raise


def _disk_usage(folder: str) -> int:
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                except FileNotFoundError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    total += _disk_usage(entry.path)
    except FileNotFoundError:
        return total
    return total
