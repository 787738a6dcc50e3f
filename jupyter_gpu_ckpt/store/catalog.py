"""Which states there are: their manifests and marks, listed, looked up, deleted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from ..errors import CkptError
from .damage import Damaged, TooNew, damaged, too_new
from .kernel_store import READING, WRITING, KernelStore
from .keys import KeyRing
from .layout import (
    check_kernel_id,
    check_state_id,
    is_of_one_file,
    translated,
    unknown_state,
)
from .local_files import delete_state
from .manifest import Body, decode_manifest
from .marks import Marks, changed, encode_marks, put_marks, read_marks
from .owner import OwnerStore, manifests_of
from .records import DamagedState, StateRecord


class Seen(NamedTuple):
    """A state as it was found: what its manifest says, or why that cannot be read."""

    path: Path
    body: Body | CkptError
    marks: Marks

    @property
    def id(self) -> str:
        """The state's id."""
        return self.path.stem

    @property
    def kernel_id(self) -> str:
        """Whose it is."""
        return self.path.parent.parent.name


class Catalog(KernelStore):
    """The part of a store that knows its states; see :class:`~.state_store.StateStore`."""

    def __init__(self, root: Path, owner: str, ring: KeyRing | None) -> None:
        super().__init__(root, owner, ring)
        self._marking = threading.Lock()

    def states(self, kernel_id: str | None = None, path: str | None = None) -> list[StateRecord]:
        """List intact states, newest first, of one kernel or notebook path if given.

        A notebook's are those saved under its path, and those of the kernel that has it now: it
        may have been renamed since.

        Only manifests are read: hundreds take milliseconds. See :meth:`damaged` for others.
        """
        if kernel_id is not None:
            check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return []
        return self._states(self._seen(owner, kernel_id), kernel_id, path)

    def best(self, kernel_id: str) -> tuple[StateRecord, dict[str, str]] | None:
        """The newest state that is not known to be damaged, and what is wrong with newer ones.

        Where all are damaged, the newest that can be read: perhaps only its packs were out of
        reach. ``None`` where there is none.
        """
        owner = self._open()
        seen = [] if owner is None else self._seen(owner, check_kernel_id(kernel_id))
        states = self._states(seen, kernel_id, None)
        if not states:
            return None
        at = next((at for at, state in enumerate(states) if state.damage is None), 0)
        best = states[at]
        newer = {state.id: state.damage for state in states[:at] if state.damage is not None}
        for bad in damaged_among(seen):
            # When it was made is only known to the second; what follows in the id is chance.
            if bad.state_id.partition("-")[0] >= best.id.partition("-")[0]:
                newer[bad.state_id] = bad.message
        return best, dict(sorted(newer.items(), reverse=True))

    def damaged(self, kernel_id: str | None = None) -> list[DamagedState]:
        """List states that cannot be read, newest first."""
        owner = self._open()
        return [] if owner is None else damaged_among(self._seen(owner, kernel_id), kernel_id)

    def _states(
        self, seen: Iterable[Seen], kernel_id: str | None, path: str | None
    ) -> list[StateRecord]:
        has_it = set()
        if path is not None:
            has_it = {kernel.kernel_id for kernel in self.kernels() if kernel.path == path}
        records = [
            self._record(one.body, one.marks)
            for one in seen
            if isinstance(one.body, Body)
            and kernel_id in (None, one.kernel_id)
            and (path is None or one.body.meta.path == path or one.kernel_id in has_it)
        ]
        return sorted(records, key=lambda record: (record.created, record.id), reverse=True)

    def has_states(self, kernel_id: str) -> bool:
        """Whether there is any state of a kernel, also one that cannot be read now."""
        check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return False
        with translated(READING):
            return any(True for _ in manifests_of(owner.states_of(kernel_id)))

    def state(self, state_id: str) -> StateRecord:
        """Look up one state.

        Raises
        ------
        CkptError
            ``unknown_state``, ``state_damaged``, ``not_restorable`` (newer format).
        """
        owner, body = self._body(state_id)
        marks = read_marks(owner, owner.manifest(body.meta.kernel_id, body.id))
        return self._record(body, marks)

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

    def mark(
        self,
        state_id: str,
        *,
        pinned: bool | UnsetType = UNSET,
        label: str | UnsetType | None = UNSET,
        verified: str | UnsetType | None = UNSET,
        damage: str | UnsetType | None = UNSET,
    ) -> StateRecord:
        """Note something on a state; what is not given stays.

        Parameters
        ----------
        state_id
            Which state.
        pinned
            Whether retention spares it, whatever its rules.
        label
            Its label; ``None`` for none.
        verified, damage
            When it was last found intact (ISO 8601); what was found lost.

        Returns
        -------
        StateRecord
            The state with its new marks.

        Raises
        ------
        CkptError
            ``unknown_state``, ``no_space``, ``key_missing``.
        """
        owner, path = self._find(state_id)
        with self._marking, translated(WRITING):
            try:
                marks = changed(
                    read_marks(owner, path),
                    pinned=pinned,
                    label=label,
                    verified=verified,
                    damage=damage,
                )
                self._put_marks(owner, path, encode_marks(owner.sealing, path, marks))
            except FileNotFoundError:
                raise unknown_state() from None
        return self.state(state_id)

    def _put_marks(self, owner: OwnerStore, manifest: Path, data: bytes) -> None:
        put_marks(owner, manifest, data)

    def usage(self) -> int:
        """Bytes this owner's store takes on disk."""
        owner = self._open()
        if owner is None:
            return 0
        with translated(READING):
            return _disk_usage(os.fspath(owner.folder))

    def _record(self, body: Body, marks: Marks) -> StateRecord:
        """What is told of a state, with what was noted on it since it was saved."""
        record = body.record()
        record.pinned, record.verified, record.damage = marks.pinned, marks.verified, marks.damage
        record.meta.label = marks.label_of(record.meta.label)
        return record

    def _seen(self, owner: OwnerStore, kernel_id: str | None = None) -> list[Seen]:
        """Read all manifests and marks, or those of a kernel, once."""
        with translated(READING):
            if kernel_id is None:
                paths = list(owner.manifests())
            else:
                paths = list(manifests_of(owner.states_of(kernel_id)))
            found: list[Seen] = []
            for path in paths:
                body: Body | CkptError
                try:
                    body = self._load(owner, path)
                except FileNotFoundError:
                    continue  # deleted meanwhile
                except CkptError as error:
                    body = error
                found.append(Seen(path, body, read_marks(owner, path)))
        return found

    def _find(self, state_id: str) -> tuple[OwnerStore, Path]:
        check_state_id(state_id)
        owner = self._open()
        if owner is not None:
            closed: OSError | None = None
            with translated(READING):
                for kernel in owner.kernel_folders():
                    path = kernel / "states" / f"{state_id}.json"
                    try:
                        path.lstat()
                    except (FileNotFoundError, NotADirectoryError):
                        continue
                    except OSError as error:
                        if not is_of_one_file(error):
                            raise
                        closed = error  # it may be in this one, if in no other
                        continue
                    return owner, path
                if closed is not None:
                    raise closed
        raise unknown_state()

    def _body(self, state_id: str) -> tuple[OwnerStore, Body]:
        owner, path = self._find(state_id)
        with translated(READING):
            try:
                return owner, self._load(owner, path)
            except FileNotFoundError:
                raise unknown_state() from None

    def _load(self, owner: OwnerStore, path: Path) -> Body:
        state_id = path.stem
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            if not is_of_one_file(error):
                raise
            raise damaged(state_id, f"its manifest cannot be read ({error.strerror})") from error
        try:
            body = decode_manifest(data, owner.sealing, path.parent.parent.name, state_id)
        except Damaged as error:
            raise damaged(state_id, str(error)) from error
        except TooNew as error:
            raise too_new(state_id, str(error)) from error
        return body


def damaged_among(seen: Iterable[Seen], kernel_id: str | None = None) -> list[DamagedState]:
    """Those that cannot be read, newest first."""
    bad = [
        DamagedState(
            one.id,
            one.kernel_id,
            one.body.message,
            # A key that is missing may come back, a state of a later version be read by it.
            None if one.body.reason == "state_damaged" else one.body.hint,
        )
        for one in seen
        if isinstance(one.body, CkptError) and kernel_id in (None, one.kernel_id)
    ]
    return sorted(bad, reverse=True)


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
