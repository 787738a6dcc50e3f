"""What keeps a store tidy: real costs, retention, quota, garbage collection."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import CkptError
from ..moments import read_moment
from .catalog import Catalog, Seen, damaged_among
from .kernel_store import READING
from .layout import begun, check_kernel_id, is_of_one_file, translated
from .local_files import LocalFiles, pack_files
from .owner import OwnerStore
from .records import DamagedState, GcResult, KernelRecord, StateRecord
from .retention import Held, Policy, Removal, check_room, costs, plan, used
from .seal import manifest_packs
from .sweep import sweep


class Listing(NamedTuple):
    """States, newest first, those that cannot be read, and what deleting each alone would free.

    The costs are in bytes, by ids, and of all states of the owner; `used` is what these take
    together, which is less than the sum of their sizes and more than that of the costs.
    """

    states: list[StateRecord]
    damaged: list[DamagedState]
    costs: dict[str, int]
    used: int = 0


class Look(NamedTuple):
    """What is in a store at some moment, for one reading of all manifests and records."""

    kernels: list[KernelRecord]
    unreadable: list[CkptError]
    seen: list[Seen]

    @property
    def damaged(self) -> list[DamagedState]:
        """States that cannot be read, newest first."""
        return damaged_among(self.seen)

    def states_of(self, kernel_ids: Collection[str]) -> set[str]:
        """Ids of all states of these kernels."""
        return {one.id for one in self.seen if one.kernel_id in kernel_ids}


class Upkeep(Catalog):
    """The part of :class:`~.state_store.StateStore` that looks after what is there."""

    def listing(self, kernel_id: str | None = None, path: str | None = None) -> Listing:
        """All that a list of states says, for one reading of the manifests.

        Parameters
        ----------
        kernel_id, path
            As for :meth:`states`.
        """
        if kernel_id is not None:
            check_kernel_id(kernel_id)
        owner = self._open()
        if owner is None:
            return Listing([], [], {})
        # All of them: what a state costs depends on the others.
        seen = self._seen(owner)
        with translated(READING):
            held = self._held(seen)
            sizes = self._pack_sizes(owner, held)
        return Listing(
            self._states(seen, kernel_id, path),
            damaged_among(seen, kernel_id),
            costs(held, sizes),
            used(held, sizes),
        )

    def look(self) -> Look:
        """All that :meth:`kernels`, :meth:`states` and what is said of the unreadable rest tell."""
        owner = self._open()
        if owner is None:
            return Look([], [], [])
        records = self._kernels()
        return Look(
            [one for one in records if isinstance(one, KernelRecord)],
            [one for one in records if isinstance(one, CkptError)],
            self._seen(owner),
        )

    def costs(self) -> dict[str, int]:
        """What deleting each state alone would free, in bytes, by the states' ids."""
        return self.listing().costs

    def retain(
        self,
        policy: Policy,
        *,
        living: Collection[str] = (),
        busy: Collection[str] = (),
        look: Look | None = None,
        dry_run: bool = False,
    ) -> list[Removal]:
        """Remove the states that no rule keeps; their space comes back with a collection.

        Parameters
        ----------
        policy
            What is kept.
        living
            Kernels that run anywhere, or are lost and may be brought back: their newest intact
            state is never removed.
        busy
            Ids of states that are in use right now.
        look
            What is there, from :meth:`look`, where that was just asked for.
        dry_run
            Only say which.

        Returns
        -------
        list of Removal
            What went (or would go), why, and what comes back.
        """
        owner = self._open()
        if owner is None:
            return []
        with translated(READING):
            states = self._held(self._seen(owner) if look is None else look.seen)
            sizes = self._pack_sizes(owner, states)
        removals = plan(states, sizes, policy, now=time.time(), living=living, busy=busy)
        if dry_run:
            return removals
        for removal in removals:
            # Another server may apply the same rules.
            try:
                self.delete(removal.state_id)
            except CkptError as error:
                if error.reason != "unknown_state":
                    raise
        return removals

    def room(
        self,
        policy: Policy,
        estimate: int,
        *,
        living: Collection[str] = (),
        busy: Collection[str] = (),
        look: Look | None = None,
    ) -> None:
        """Refuse a save that the quota has no room for; see :func:`~.retention.check_room`.

        Raises
        ------
        CkptError
            ``over_quota``.
        """
        states: list[Held] = []
        sizes: dict[str, int] = {}
        owner = None if policy.quota is None else self._open()
        if owner is not None:
            with translated(READING):
                states = self._held(self._seen(owner) if look is None else look.seen)
                sizes = self._pack_sizes(owner, states)
        check_room(states, sizes, policy, estimate, living=living, busy=busy)

    def _held(self, seen: Iterable[Seen]) -> list[Held]:
        """What retention knows of states; one that cannot be read counts as pinned."""
        found = []
        for path, body, marks in seen:
            if isinstance(body, CkptError):
                with suppress(FileNotFoundError):
                    kernel_id, age = path.parent.parent.name, begun(path.stem).timestamp()
                    packs = _packs_of(path)
                    held = Held(path.stem, kernel_id, age, packs, pinned=True, intact=False)
                    found.append(held)
                continue
            found.append(
                Held(
                    body.id,
                    body.meta.kernel_id,
                    read_moment(body.created).timestamp(),
                    frozenset(body.packs),
                    pinned=marks.pinned,
                    labelled=bool(marks.label_of(body.meta.label)),
                    automatic=body.meta.reason != "user",
                    intact=marks.damage is None,
                )
            )
        return found

    def _pack_sizes(self, owner: OwnerStore, states: Iterable[Held]) -> dict[str, int]:
        """Bytes of each pack that these states need, wherever it is, and perhaps of others."""
        return {
            os.path.basename(path).removesuffix(".pack"): found.st_size
            for path, found in pack_files(owner.packs)
        }

    # -- garbage ---------------------------------------------------------------------------------

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
            here = sweep(files, grace_seconds=grace_seconds, dry_run=dry_run, stop=stop)
        there = self._gc_elsewhere(grace_seconds, dry_run, stop)
        # The same packs, as far as both tiers have them.
        return GcResult(max(here.packs, there.packs), max(here.bytes, there.bytes))

    def _gc_elsewhere(
        self, grace_seconds: float, dry_run: bool, stop: threading.Event | None
    ) -> GcResult:
        """What else is to be tidied up; for stores with another tier."""
        return GcResult(0, 0)


def _packs_of(manifest: Path) -> frozenset[str]:
    """The packs that a state needs of which no more can be read, as far as that is known."""
    try:
        return frozenset(manifest_packs(manifest.read_bytes()))
    except FileNotFoundError:
        raise
    except OSError as error:
        if not is_of_one_file(error):
            raise
        return frozenset()
