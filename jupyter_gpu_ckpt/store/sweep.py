"""Garbage collection: packs that no state needs and no writer counts on.

No process waits for another's lock, so the order of the looks is what makes it safe:

1. which packs are there, and which of them no manifest needs;
2. who is present (writers, readers), and what they count on; the dead are taken away, so that
   they cannot commit any more;
3. which manifests came since (1), also those that went again: their notes in ``deleted/``.

A state is only ever built on states whose manifests were there when its writer was present
already. So whoever could need a pack that (1) found unneeded was present at (2), or
has come and gone by (3); and what nobody needs then, nobody will ever need again.

An upload to a remote tier is another matter: the state that it was built on may be long gone there,
and it comes with packs that the node still has. So between (1) and (2) a collection announces
what it may remove, and an upload looks for announcements after its presence and its manifest were
written: either the collection sees the upload, or the upload sees the announcement. It then waits
until that is gone and sends what is missing by then. An announcement is void an hour later, before
which its collection has stopped removing; it stays behind where a removal failed, as that may
still come to pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple, Protocol

from ..errors import CkptError
from .clocks import uptime
from .records import NEWEST_STATE, GcResult
from .seal import manifest_format, manifest_packs

# Notes of deleted states must outlive every collection that began before them.
_NOTE_SECONDS: Final = 3600.0
_LONGEST_LOOK: Final = 1800.0
#: Well before an announcement is void.
_LONGEST_REMOVAL: Final = 2700.0


class PackSeen(NamedTuple):
    """A pack's file: its size in bytes, and when it was written, in Unix seconds."""

    id: str
    size: int
    modified: float


class Present(NamedTuple):
    """Somebody at work: `packs` is what he counts on, ``None`` when that cannot be known."""

    id: str
    state_id: str | None
    alive: bool
    packs: frozenset[str] | None


class StoreFiles(Protocol):
    """What a collection looks at and removes, in a folder or on an object store."""

    def now(self) -> float:
        """Unix time by the store's own clock."""

    def packs(self) -> Iterable[PackSeen]:
        """All packs."""

    def manifests(self) -> Iterable[tuple[str, str]]:
        """Ids of all states, each with what changes when its manifest does."""

    def manifest(self, state_id: str) -> bytes | None:
        """A manifest's file; ``None`` if it is gone."""

    def deleted(self) -> Iterable[tuple[str, float]]:
        """Ids of deleted states of which there is a note, and when they were deleted."""

    def deleted_manifest(self, state_id: str) -> bytes | None:
        """The manifest in such a note; ``None`` if it is gone."""

    def present(self) -> Iterable[Present]:
        """Writers and readers."""

    def take_away(self, presence_id: str, *, dry_run: bool) -> int:
        """End a dead writer's presence, after which it cannot commit; returns bytes freed."""

    def announced(self, pack_ids: list[str]) -> AbstractContextManager[None]:
        """Let uploads see meanwhile that these packs may be removed."""

    def remove_pack(self, pack_id: str) -> None:
        """Remove a pack."""

    def remove_note(self, state_id: str) -> None:
        """Remove the note of a deleted state."""


def sweep(
    files: StoreFiles,
    *,
    grace_seconds: float,
    dry_run: bool,
    stop: threading.Event | None = None,
) -> GcResult:
    """Remove garbage older than the grace period.

    Parameters
    ----------
    files
        The store, or one tier of it.
    grace_seconds
        Spare packs that are younger than this, in seconds.
    dry_run
        Only count.
    stop
        Once set, no more is removed. The result is what was removed until then.

    Raises
    ------
    CkptError
        ``store_unavailable``: a state of a newer format, whose needs cannot be known, or the
        looks took so long that they prove nothing.
    OSError
        A file cannot be read or removed.
    """
    began = uptime()
    now = files.now()
    notes = dict(files.deleted())
    packs = [pack for pack in files.packs() if pack.modified <= now - grace_seconds]
    needs = _Needs(files)
    needed = needs.look()
    garbage = [pack for pack in packs if not _is_needed(pack.id, needed)]
    freed = removed = 0
    quiet = dry_run or not garbage
    with nullcontext() if quiet else files.announced([pack.id for pack in garbage]):
        for presence in files.present():
            if not presence.alive:
                freed += files.take_away(presence.id, dry_run=dry_run)
            elif presence.packs is None:
                garbage = []
            else:
                needed |= presence.packs
                if presence.state_id is not None:
                    needed.add(presence.state_id)
        needed |= needs.look()
        for state_id, _ in files.deleted():
            if state_id not in notes:
                needed |= needs.of_note(state_id)
        if uptime() - began > _LONGEST_LOOK:
            raise CkptError(
                "store_unavailable",
                "The state store answers too slowly to be tidied up; nothing was removed.",
                hint="Try again when it is less busy.",
            )
        for pack in garbage:
            late = uptime() - began > _LONGEST_REMOVAL
            if late or (stop is not None and stop.is_set()):
                return GcResult(removed, freed)
            if not _is_needed(pack.id, needed):
                if not dry_run:
                    files.remove_pack(pack.id)
                removed, freed = removed + 1, freed + pack.size
    if not dry_run:
        for state_id, when in notes.items():
            if when < now - _NOTE_SECONDS:
                files.remove_note(state_id)
    return GcResult(removed, freed)


class _Needs:
    """What states need: ids of packs, and ids of states for all packs of their own."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._seen: dict[tuple[str, str], frozenset[str]] = {}

    def look(self) -> set[str]:
        """Needs of all states that are there now; reads only manifests that it has not read."""
        needed: set[str] = set()
        for seen in self._files.manifests():
            if seen not in self._seen:
                data = self._files.manifest(seen[0])
                if data is None:
                    continue  # deleted just now; its note tells
                self._seen[seen] = _needs(seen[0], data)
            needed |= self._seen[seen]
        return needed

    def of_note(self, state_id: str) -> frozenset[str]:
        """Needs of a state that is deleted already."""
        data = self._files.deleted_manifest(state_id)
        return frozenset() if data is None else _needs(state_id, data)


def _needs(state_id: str, data: bytes) -> frozenset[str]:
    newer = manifest_format(data)
    if newer is not None and newer > NEWEST_STATE:
        raise CkptError(
            "store_unavailable",
            f"The saved state {state_id} was written by a newer version (format {newer}), "
            "so what it needs is unknown and nothing was removed.",
            hint="Upgrade jupyter-gpu-ckpt.",
        )
    # Also a manifest that is damaged beyond reading keeps what its own save stored.
    return frozenset({state_id, *manifest_packs(data)})


def _is_needed(pack_id: str, needed: set[str]) -> bool:
    return pack_id in needed or pack_id.rpartition("-")[0] in needed
