"""What can be done with saved states beside restoring them: look inside, check, pin, label."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from . import describe, models
from .errors import CkptError
from .operations import in_thread
from .store import StateRecord
from .verifying import Verify

if TYPE_CHECKING:
    from .keeper import Keeper


def passed_over(state_id: str, error: CkptError) -> str:
    """What to tell of a damaged state when an older one was restored in its stead."""
    return (
        f"The newer state {state_id} is damaged or gone, so an older one was restored. "
        f"{error.message}"
    )


class SavedStates:
    """The states of the keeper's store; part of the keeper.

    Parameters
    ----------
    keeper
        Store, operations and the rest.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to tell of uploads; called on the event loop when the server is up."""
        self._loop = asyncio.get_running_loop()

    def uploaded(self, state_id: str) -> None:
        """A state is in the remote store now; may be called from any thread."""

        async def tell() -> None:
            with contextlib.suppress(CkptError):  # deleted meanwhile
                self._keeper.announce.state_durable(
                    await in_thread(self._keeper.store.state, state_id)
                )

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                self._loop.call_soon_threadsafe(lambda: self._keeper.in_background(tell()))

    async def one(self, state_id: str) -> models.State:
        """One state with ``modes``, ``restorable`` and ``differences``; ``unknown_state``."""
        keeper = self._keeper
        record = await in_thread(keeper.store.state, state_id)
        kernel = keeper.tracker.get(record.meta.kernel_id)
        try:
            pid = kernel.pid if kernel else None
            found, _, choices = await keeper.ability.differences(record, pid)
        except CkptError as error:
            choices = {}
            found = [models.Difference("node", error.message, blocking=True)]
        else:
            if (why := await self._why_no_rollback(record.meta.kernel_id)) is not None:
                # The process numbers and ports that are taken are that kernel's own.
                others = [difference for difference in found if difference.mode != "rollback"]
                first = models.Difference("kernel", why.message, blocking=True, mode="rollback")
                found = [first, *others]
        if record.damage is not None:
            found.insert(0, models.Difference("damage", record.damage, blocking=True))
        return describe.state(record, found, choices=choices)

    async def _why_no_rollback(self, kernel_id: str) -> CkptError | None:
        """Why no state can take the place of this kernel, whatever the node can do."""
        keeper = self._keeper
        try:
            if kernel_id in keeper.kernel_manager:
                keeper.roster.savable(kernel_id)
            else:
                return await in_thread(keeper.leases.elsewhere, kernel_id)
        except CkptError as error:
            return error
        return None

    async def all(
        self, kernel_id: str | None = None, path: str | None = None
    ) -> list[models.State]:
        """States, newest first; ``restorable`` is not checked, but for damaged ones."""
        store = self._keeper.store
        listing = await in_thread(store.listing, kernel_id, path)
        costs = listing.costs
        found = [describe.state(record, cost=costs.get(record.id)) for record in listing.states]
        if path is None:
            # Which notebook they are of is among what cannot be read.
            found += map(describe.unreadable, listing.damaged)
        return sorted(found, key=lambda state: (state.created, state.id), reverse=True)

    async def contents(self, state_id: str) -> models.Contents:
        """What is inside a state; ``unknown_state``, ``state_damaged``."""
        record = await in_thread(self._keeper.store.state, state_id)
        try:
            return msgspec.convert(record.meta.contents, models.Contents)
        except msgspec.ValidationError:
            raise CkptError(
                "state_damaged",
                "The state does not say what is in it.",
                hint="It can be restored all the same, as far as is known.",
            ) from None

    async def mark(
        self,
        state_id: str,
        *,
        pinned: bool | msgspec.UnsetType = msgspec.UNSET,
        label: str | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> models.State:
        """Pin a state or change its label; ``unknown_state``, ``store_unavailable``."""
        if isinstance(label, str):
            label = label.strip() or None
        record = await in_thread(
            lambda: self._keeper.store.mark(state_id, pinned=pinned, label=label)
        )
        return describe.state(record)

    async def verify(self, state_id: str) -> models.Operation:
        """Start to check a state, unless that is going on; ``unknown_state``, ``state_damaged``."""
        record = await in_thread(self._keeper.store.state, state_id)
        run = self._keeper.verifying(state_id)
        if run is None:
            run = self._keeper.begin(
                "verify",
                record.meta.kernel_id,
                Verify(self._keeper, record).run,
                path=record.meta.path,
                state_id=state_id,
            )
        return run.model

    async def found_damaged(self, record: StateRecord, error: CkptError) -> CkptError:
        """Note that a state could not be read back; the error, with what to restore instead."""
        try:
            await in_thread(lambda: self._keeper.store.mark(record.id, damage=error.message))
            others = await in_thread(self._keeper.store.states, record.meta.kernel_id)
        except CkptError:
            return error
        for other in others:
            if other.created < record.created and other.damage is None:
                hint = f"Restore an older state of this kernel instead: {other.id}."
                return CkptError(error.reason, error.message, hint=hint, details=error.details)
        return error
