"""Which saved states go and when: the store's retention, applied to this server's kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from .errors import CkptError
from .operations import in_thread
from .store import KernelRecord
from .store.retention import Removal
from .store.upkeep import Look

if TYPE_CHECKING:
    from .keeper import Keeper

T = TypeVar("T")

_NOT_LOOKED_AT: Final = "What was saved cannot be looked at"
_NO_SPACE_BACK: Final = "No disk space was given back"
_NOT_REMOVED: Final = "Old states were not removed"
#: Why a state that was to go is left alone: another server applies the same rules, somebody
#: restores it, or it cannot be read any more.
_LEFT: Final = frozenset({"unknown_state", "busy", "state_damaged", "not_restorable"})
#: How many things that cannot be read are named in the log.
_TOLD: Final = 5


class _Needed(NamedTuple):
    """Kernels whose newest state stays, and states that stay in any case."""

    living: set[str]
    busy: set[str]


class Tidying:
    """Applies the rules of `c.GpuCkpt` to what is saved; one a keeper."""

    def __init__(self, keeper: Keeper, stop: threading.Event) -> None:
        self._keeper = keeper
        self._stop = stop

    async def begin(self) -> None:
        """Tidy up what servers left that are gone; called once, when this one starts.

        Never raises for a store, or something in it, that cannot be read: that is told.
        """
        keeper = self._keeper
        await self._attempt("Working files of other servers were not removed", keeper.spool.clean)
        look = await self._attempt(_NOT_LOOKED_AT, keeper.store.look)
        # At once: what else is done with the look may take minutes.
        await self.apply(look)
        if look is not None:
            records = look.kernels
            await self._attempt(_NOT_LOOKED_AT, lambda: keeper.leases.forget_stateless(records))
            self._tell_of_unreadable(look)
        # It may take minutes on a slow store: a server that stops does not wait for its end.
        await self._attempt(_NO_SPACE_BACK, lambda: keeper.store.gc(stop=self._stop))

    async def _attempt(self, consequence: str, tidy: Callable[[], T]) -> T | None:
        """Do it in a thread; ``None`` where that failed, which is told."""
        try:
            return await in_thread(tidy)
        except CkptError as error:
            self._keeper.troubles.tell(consequence, error, again=False)
            return None

    def _tell_of_unreadable(self, look: Look) -> None:
        """Warn once of all that cannot be read."""
        bad = [*(state.message for state in look.damaged)]
        bad += [error.message for error in look.unreadable]
        if bad:
            said = list(dict.fromkeys(bad))  # of a missing key all states say the same
            self._keeper.log.warning(
                "%s in the state store cannot be read, and nothing is done to it: %s "
                "'jupyter gpu-ckpt doctor' says what can be done about each.",
                "One thing" if len(bad) == 1 else f"{len(bad)} things",
                " ".join(said[:_TOLD]) + (" ..." if len(said) > _TOLD else ""),
            )

    async def apply(self, look: Look | None = None) -> None:
        """Remove states that no rule keeps; called after each save and when the server starts.

        Never raises for a store that does not answer: the next save comes back to it.

        Parameters
        ----------
        look
            What is in the store, where that was just looked at.
        """
        keeper = self._keeper
        in_use = self.in_use()

        def plan() -> list[Removal]:
            found = look or keeper.store.look()
            needed = self._needed(in_use, found)._asdict()
            return keeper.store.retain(keeper.retention(), **needed, look=found, dry_run=True)

        try:
            removals = await in_thread(plan)
            for removal in removals:
                await self._remove(removal)
            if removals:
                await in_thread(lambda: keeper.store.gc(stop=self._stop))
        except CkptError as error:
            keeper.troubles.tell(_NOT_REMOVED, error)
        else:
            keeper.troubles.over(_NOT_REMOVED)

    async def _remove(self, removal: Removal) -> None:
        """Remove a state, unless somebody came to need it since that was planned."""
        state_id = removal.state_id
        try:
            if await in_thread(self._is_kept, removal) or state_id in self.in_use():
                return
            await self._keeper.delete_state(state_id)
        except CkptError as error:
            if error.reason not in _LEFT:
                raise
        else:
            self._keeper.log.info("State %s was removed (%s)", state_id, removal.why)

    def _is_kept(self, removal: Removal) -> bool:
        """Whether a state that was to go is kept, as it looks now; for a worker thread.

        Where many states go, or the store is slow, what was planned by is minutes old.
        """
        store = self._keeper.store
        record = store.state(removal.state_id)
        if record.pinned or (removal.why == "rules" and record.meta.label):
            return True
        kernel_id = record.meta.kernel_id
        living, elsewhere = self._living(filter(None, [self._known(kernel_id)]))
        if kernel_id in elsewhere:
            return True
        best = store.best(kernel_id) if kernel_id in living else None
        return best is not None and best[0].id == record.id

    def _known(self, kernel_id: str) -> KernelRecord | None:
        try:
            return self._keeper.store.kernel(kernel_id)
        except CkptError as error:
            if error.reason != "state_damaged":  # as a look passes over it
                raise
            return None

    async def forget_kernel(self, kernel_id: str) -> None:
        """Remove what is left of a kernel that does not run, unless it has states."""
        keeper = self._keeper

        def forget() -> None:
            if not keeper.store.has_states(kernel_id):
                keeper.store.delete_kernel(kernel_id)
                log = keeper.launching.log_folder() / f"{kernel_id}.log"
                for path in (log, log.with_name(log.name + ".supervisor")):
                    path.unlink(missing_ok=True)

        await in_thread(forget)

    def check_room(self, kernel_id: str, size: int, in_use: set[str]) -> None:
        """Refuse a save that the quota has no room for, before its kernel is frozen.

        Parameters
        ----------
        kernel_id
            The kernel.
        size
            Bytes that the whole state may have. Of a kernel that has states, a tenth is taken to
            have changed, and what it has grown.
        in_use
            From :meth:`in_use`. This method is for a worker thread.

        Raises
        ------
        CkptError
            ``over_quota``.
        """
        keeper = self._keeper
        policy = keeper.retention()
        if policy.quota is None:
            return
        states = keeper.store.states(kernel_id)
        if states:
            size = max(size - states[0].size, size // 10)
        look = keeper.store.look()
        keeper.store.room(policy, size, **self._needed(in_use, look)._asdict(), look=look)

    def in_use(self) -> set[str]:
        """States that operations work on, or that this server's kernels would come back from."""
        keeper = self._keeper
        running = {op.state_id for op in keeper.operations() if op.status == "running"}
        return {state for state in running | {k.policy.latest for k in keeper.tracker} if state}

    def _needed(self, in_use: set[str], look: Look) -> _Needed:
        living, elsewhere = self._living(look.kernels)
        # Its server knows which of them it would come back from.
        return _Needed(living, in_use | look.states_of(elsewhere))

    def _living(self, records: Iterable[KernelRecord]) -> tuple[set[str], set[str]]:
        """Kernels that run, or are lost; and those of them that another server runs."""
        keeper, records = self._keeper, list(records)
        here = {kernel.kernel_id for kernel in list(keeper.tracker)}
        lost = {one.kernel_id for one in records if keeper.leases.is_lost(one)}
        held = {one.kernel_id for one in records if one.lease is not None}
        elsewhere = held - (here | lost)
        return here | lost | elsewhere, elsewhere
