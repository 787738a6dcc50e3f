"""What keeps a store tidy: real costs, retention, quota, garbage collection."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime, timezone

from ..errors import CkptError
from .catalog import Catalog
from .kernel_store import READING
from .layout import translated
from .local_files import LocalFiles, pack_files
from .marks import read_marks
from .owner import OwnerStore
from .records import GcResult
from .retention import Held, Policy, Removal, check_room, costs, plan
from .seal import manifest_packs
from .sweep import sweep


class Upkeep(Catalog):
    """The part of :class:`~.state_store.StateStore` that looks after what is there."""

    def costs(self) -> dict[str, int]:
        """What deleting each state alone would free, in bytes, by the states' ids."""
        owner = self._open()
        if owner is None:
            return {}
        with translated(READING):
            return costs(self._held(owner), self._pack_sizes(owner))

    def retain(
        self,
        policy: Policy,
        *,
        living: Collection[str] = (),
        busy: Collection[str] = (),
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
            states, sizes = self._held(owner), self._pack_sizes(owner)
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
                states, sizes = self._held(owner), self._pack_sizes(owner)
        check_room(states, sizes, policy, estimate, living=living, busy=busy)

    def _held(self, owner: OwnerStore) -> list[Held]:
        """What retention knows of all states; one that cannot be read counts as pinned."""
        found = []
        for path in owner.manifests():
            try:
                body = self._load(owner, path)
            except FileNotFoundError:
                continue  # deleted meanwhile
            except CkptError:
                with suppress(FileNotFoundError):
                    packs = manifest_packs(path.read_bytes())
                    kernel_id = path.parent.parent.name
                    created = datetime.strptime(path.stem[:16], "%Y%m%dT%H%M%SZ")
                    age = created.replace(tzinfo=timezone.utc).timestamp()
                    held = Held(
                        path.stem, kernel_id, age, frozenset(packs), pinned=True, intact=False
                    )
                    found.append(held)
                continue
            marks = read_marks(owner, path)
            found.append(
                Held(
                    body.id,
                    body.meta.kernel_id,
                    datetime.fromisoformat(body.created.replace("Z", "+00:00")).timestamp(),
                    frozenset(body.packs),
                    pinned=marks.pinned,
                    labelled=bool(marks.label_of(body.meta.label)),
                    automatic=body.meta.reason != "user",
                    intact=marks.damage is None,
                )
            )
        return found

    def _pack_sizes(self, owner: OwnerStore) -> dict[str, int]:
        """Bytes of each pack, wherever it is."""
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
            return sweep(files, grace_seconds=grace_seconds, dry_run=dry_run, stop=stop)
