"""The store as the keeper sees it: states, kernel records, garbage collection."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path

from ..errors import CkptError
from ..progress import Progress
from .damage import Damaged, TooNew
from .incremental import Parent
from .index import load_index
from .kernel_store import WRITING
from .keys import KeyRing
from .layout import check_kernel_id, translated
from .manifest import Body
from .marks import read_marks
from .owner import OwnerStore
from .packs import LocalPacks, PackSource
from .pool import worker_count
from .presence import Presence, reading
from .reader import StateReader
from .records import StateRecord, VerifyResult
from .upkeep import Upkeep
from .writer import StateWriter

# So many states are tried as parents of a new one.
_PARENTS = 3


class StateStore(Upkeep):
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

    def _shared_packs(self, owner: OwnerStore) -> PackSource:
        """The packs that a new state may share; for stores with another tier."""
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
            likely = self._likely_parents(owner, kernel_id, parent)
            newest = max((body.created for body in likely), default=None)
            suspect = self._suspects(owner, likely)
            for body in likely[:_PARENTS]:
                if body.key_id != key_id:
                    continue
                # Pinned first: from here on no collector takes what it is made of.
                presence = Presence(owner.writers, state_id, pins={body.id: body.packs})
                try:
                    known = self._parent(owner, body, suspect)
                    if known is not None:
                        return self._writer(owner, kernel_id, state_id, presence, known, newest)
                except BaseException:
                    presence.end()
                    raise
                presence.end()
            presence = Presence(owner.writers, state_id, pins={})
            return self._writer(owner, kernel_id, state_id, presence, None, newest)

    def _likely_parents(self, owner: OwnerStore, kernel_id: str, parent: str | None) -> list[Body]:
        found = [one.body for one in self._seen(owner, kernel_id) if isinstance(one.body, Body)]
        found.sort(key=lambda body: (body.created, body.id), reverse=True)
        if parent is not None:
            with suppress(CkptError):
                found.insert(0, self._body(parent)[1])
        return found

    def _suspects(self, owner: OwnerStore, bodies: Iterable[Body]) -> set[str]:
        """Packs not to be counted on: found damaged here, or all of a state that is noted as such.

        Which of its packs it is, the note does not say; storing anew costs space, but no state.
        """
        found = set(self._suspect)
        for body in bodies:
            if read_marks(owner, owner.manifest(body.meta.kernel_id, body.id)).damage is not None:
                found.update(body.packs)
        return found

    def _parent(self, owner: OwnerStore, body: Body, suspect: set[str]) -> Parent | None:
        """Get ready to compare with a state; ``None`` if it is gone or cannot be read."""
        if not owner.manifest(body.meta.kernel_id, body.id).exists():
            return None
        source = self._packs(owner)
        try:
            index = load_index(source, owner.sealing, owner.name_key, body)
        except (Damaged, TooNew):
            return None
        finally:
            source.close()
        packs = self._shared_packs(owner)
        return Parent(body.id, index, owner, packs, memory=self._memory // 8, suspect=suspect)

    def _writer(
        self,
        owner: OwnerStore,
        kernel_id: str,
        state_id: str,
        presence: Presence,
        parent: Parent | None,
        newest: str | None,
    ) -> StateWriter:
        return StateWriter(
            owner,
            kernel_id,
            presence,
            parent,
            state_id=state_id,
            level=self._level,
            workers=self._workers,
            after=newest,
            on_commit=self._committed,
        )

    def _committed(self, record: StateRecord) -> None:
        """What is to be done with a new state; for stores with another tier."""

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
