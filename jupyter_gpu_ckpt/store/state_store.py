"""The store as the keeper sees it: states, kernel records, garbage collection."""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path

from ..errors import CkptError
from .damage import Damaged, TooNew, damaged, too_new
from .incremental import Parent
from .index import load_index
from .kernel_store import READING, WRITING, KernelStore
from .keys import KeyRing
from .layout import (
    check_kernel_id,
    check_state_id,
    translated,
    unknown_state,
)
from .local_files import LocalFiles, delete_state
from .manifest import Body, decode_manifest
from .owner import OwnerStore, manifests_of
from .packs import LocalPacks, PackSource
from .pool import Progress, worker_count
from .presence import Presence, reading
from .reader import StateReader
from .records import GcResult, StateRecord, VerifyResult
from .sweep import sweep
from .writer import StateWriter

# So many states are tried as parents of a new one.
_PARENTS = 3


class StateStore(KernelStore):
    """One owner's states in a local (or mounted) folder.

    Synchronous and thread-safe; the keeper calls it from worker threads. Several
    processes may use the same store at once.

    Parameters
    ----------
    root
        Folder of the store; made on the first write, mode 0700.
    owner
        Whose states; other owners' are invisible.
    sealing
        The owner's keys; ``None`` for no encryption.
    compression_level
        zstd level.
    workers
        Threads for hashing, compressing, reading and writing; ``None`` for as many as
        fit the machine.
    memory_limit
        Bytes that the buffers of one save or one restore take at most.

    Raises
    ------
    CkptError
        Every method raises ``store_unavailable`` for a store that cannot be read or
        written, is open to other users, or has another format.
    """

    def __init__(
        self,
        root: Path,
        owner: str,
        *,
        sealing: KeyRing | None = None,
        compression_level: int = 1,
        workers: int | None = None,
        memory_limit: int = 256 << 20,
    ) -> None:
        super().__init__(root, owner, sealing)
        self._level = compression_level
        self._workers = worker_count(workers, memory_limit)
        self._memory = memory_limit
        # Packs that were found damaged: nothing in them is counted on by a new state.
        self._suspect: set[str] = set()

    def _packs(self, owner: OwnerStore) -> PackSource:
        return LocalPacks(owner.packs)

    # -- states ---------------------------------------------------------------

    def begin(self, kernel_id: str, *, parent: str | None = None) -> StateWriter:
        """Start a new state of a kernel; the keeper calls it when it saves.

        Parameters
        ----------
        kernel_id
            The kernel.
        parent
            Id of the state that the new one is most like; ``None`` for the newest intact one
            of the kernel. Where it cannot be read an older one is taken, or none.

        Raises
        ------
        CkptError
            ``unknown_kernel`` for an id that cannot be one, ``no_space``, ``key_missing``.
        """
        check_kernel_id(kernel_id)
        owner = self._create()
        # Without its key nothing can be saved, which should not cost the kernel a freeze.
        key_id = owner.sealing.key_id
        now = datetime.now(timezone.utc)
        state_id = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        with translated(WRITING):
            for body in self._likely_parents(kernel_id, parent):
                if body.key_id != key_id:
                    continue
                # Pinned first: from here on no collector takes what it is made of.
                presence = Presence(owner.writers, state_id, pins={body.id: body.packs})
                try:
                    known = self._parent(owner, body)
                    if known is not None:
                        return self._writer(owner, kernel_id, state_id, presence, known)
                except BaseException:
                    presence.end()
                    raise
                presence.end()
            presence = Presence(owner.writers, state_id, pins={})
            return self._writer(owner, kernel_id, state_id, presence, None)

    def _likely_parents(self, kernel_id: str, parent: str | None) -> list[Body]:
        found = [body for _, body in self._bodies(kernel_id) if isinstance(body, Body)]
        found.sort(key=lambda body: (body.created, body.id), reverse=True)
        if parent is not None:
            with suppress(CkptError):
                found.insert(0, self._body(parent)[1])
        return found[:_PARENTS]

    def _parent(self, owner: OwnerStore, body: Body) -> Parent | None:
        """Get ready to compare with a state; ``None`` if it is gone or cannot be read."""
        if not owner.manifest(body.meta.kernel_id, body.id).exists():
            return None
        source = self._packs(owner)
        try:
            index = load_index(source, owner.sealing, owner.name_key, body)
        except (Damaged, TooNew):
            return None
        return Parent(
            body.id, index, owner, source, memory=self._memory // 8, suspect=self._suspect
        )

    def _writer(
        self,
        owner: OwnerStore,
        kernel_id: str,
        state_id: str,
        presence: Presence,
        parent: Parent | None,
    ) -> StateWriter:
        return StateWriter(
            owner,
            kernel_id,
            presence,
            parent,
            state_id=state_id,
            level=self._level,
            workers=self._workers,
            on_commit=self._committed,
        )

    def _committed(self, record: StateRecord) -> None:
        """What is to be done with a new state; for stores with another tier."""

    def _record(self, body: Body) -> StateRecord:
        return body.record()

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
            self._record(body)
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
        return self._record(self._body(state_id)[1])

    def delete(self, state_id: str) -> None:
        """Remove a state, damaged or not; its space comes back with the next collection.

        Raises
        ------
        CkptError
            ``unknown_state``.
        """
        owner, path = self._find(state_id)
        with translated(WRITING):
            try:
                delete_state(owner, path)
            except FileNotFoundError:
                raise unknown_state() from None

    def open(self, state_id: str) -> StateReader:
        """Open a state to read it back; the keeper calls it before a restore.

        Raises
        ------
        CkptError
            ``unknown_state``, ``state_damaged``, ``not_restorable`` (newer format),
            ``key_missing``, ``wrong_key``.
        """
        owner, body = self._body(state_id)
        with ExitStack() as stack:
            # Whoever deletes the state: what it is made of stays until it is closed.
            stack.enter_context(reading(owner.writers, state_id, body.packs))
            owner, body = self._body(state_id)
            source = self._packs(owner)
            stack.callback(source.close)
            reader = StateReader(
                owner,
                body,
                source,
                level=self._level,
                workers=self._workers,
                memory=self._memory // 2,
                on_damage=self._suspect.add,
            )
            reader.at_close(stack.pop_all())
            return reader

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

    def verify(
        self,
        state_id: str,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> VerifyResult:
        """Read all of a state; says which ranges of which files are lost.

        Parameters
        ----------
        state_id
            Which state.
        progress
            Called with (bytes done, bytes in all) from a worker thread, at most every 0.1 s.
        cancel
            Set it to stop.

        Raises
        ------
        CkptError
            ``unknown_state``; ``state_damaged`` when not even the list of what it holds can
            be read; ``key_missing``, ``wrong_key``; ``cancelled``.
        """
        with self.open(state_id) as reader:
            return reader.check(progress=progress, cancel=cancel)

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
            files = LocalFiles(owner)
            return sweep(files, grace_seconds=grace_seconds, dry_run=dry_run, stop=stop)

    def usage(self) -> int:
        """Bytes this owner's store takes on disk."""
        owner = self._open()
        if owner is None:
            return 0
        with translated(READING):
            return _disk_usage(os.fspath(owner.folder))

    def _bodies(self, kernel_id: str | None = None) -> list[tuple[str, Body | CkptError]]:
        if kernel_id is not None:
            check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return []
        with translated(READING):
            if kernel_id is None:
                paths = list(owner.manifests())
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
            with translated(READING):
                for kernel in owner.kernel_folders():
                    path = kernel / "states" / f"{state_id}.json"
                    if path.is_file():
                        return owner, path
        raise unknown_state()

    def _body(self, state_id: str) -> tuple[OwnerStore, Body]:
        owner, path = self._find(state_id)
        with translated(READING):
            try:
                return owner, _load(owner, path)
            except FileNotFoundError:
                raise unknown_state() from None


def _load(owner: OwnerStore, path: Path) -> Body:
    state_id = path.stem
    data = path.read_bytes()
    try:
        body = decode_manifest(data, owner.sealing, path.parent.parent.name, state_id)
    except Damaged as error:
        raise damaged(state_id, str(error)) from error
    except TooNew as error:
        raise too_new(state_id, str(error)) from error
    return body


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
