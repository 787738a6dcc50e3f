"""Lost kernels: found at the start and later, offered, and restored."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from jupyter_core.utils import ensure_async

from . import describe, models
from .errors import CkptError
from .operations import Run, in_thread
from .recovery import LostRecord
from .roster import unknown_kernel
from .saved import passed_over
from .store import KernelRecord
from .tracking import TrackedKernel

if TYPE_CHECKING:
    from .keeper import Keeper

_NOT_LOOKED_FOR: Final = "Lost kernels cannot be looked for"


class LostKernels:
    """Kernels that ended without their user's wish and have states; part of the keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        #: Those that were told of, or that this server tried to restore by itself.
        self._seen: set[str] = set()
        #: Those that it could not restore.
        self._left: set[str] = set()
        self._turns = asyncio.Semaphore(keeper.restore_parallel)

    async def heartbeat(self) -> None:
        """Renew the leases, and tell of kernels that turn out to be lost; runs until cancelled."""
        keeper = self._keeper
        while True:
            try:
                await keeper.leases.renew_all()
                if keeper.restore_on_start != "never":
                    await self._look()
                    keeper.troubles.over(_NOT_LOOKED_FOR)
            except CkptError as error:
                keeper.troubles.tell(_NOT_LOOKED_FOR, error)
            except Exception:
                # Whatever it is, the next beat must come.
                keeper.log.exception("Leases could not be renewed")
            await asyncio.sleep(keeper.lease_interval)

    async def _look(self) -> None:
        for lost in await self._found():
            kernel_id = lost.record.kernel_id
            if kernel_id in self._seen or lost.record.offer == "cull":
                continue  # what was culled comes back when somebody wants it
            self._seen.add(kernel_id)
            if self._keeper.restore_on_start == "always" and not self._waits(lost.record):
                self._keeper.in_background(self._bring_back(lost))
            else:
                self._tell(lost)

    async def _bring_back(self, lost: LostRecord) -> None:
        """Restore a kernel without being asked; most recently used ones have come first."""
        keeper, kernel_id = self._keeper, lost.record.kernel_id
        try:
            async with self._turns:
                tried: str | None = ""
                while True:
                    run = keeper.running(kernel_id) or await self._begin(kernel_id)
                    if (await run.ended()).status == "done":
                        self._seen.discard(kernel_id)
                        return
                    error, tried, before = run.model.error, run.model.state_id, tried
                    # A damaged state is noted as such, so that the next try is of an older one.
                    if error is None or error.reason != "state_damaged" or tried == before:
                        break
        except CkptError as error:
            keeper.log.warning("Kernel %s was not restored: %s", kernel_id, error.message)
        self._left.add(kernel_id)
        self._tell(lost)

    def _tell(self, lost: LostRecord) -> None:
        described = describe.lost_kernel(lost)
        self._keeper.announce.lost(described.kernel_id, described.path, lost.state.id)

    async def offered(self) -> list[models.LostKernel]:
        """Kernels that ended without their user's wish and have states, newest first.

        Without those that come back, or stay away, by themselves (``restore_on_start``).
        """
        return [describe.lost_kernel(lost) for lost in await self._found() if self._asks(lost)]

    def _asks(self, lost: LostRecord) -> bool:
        """Whether it is for the user to say if the kernel is restored."""
        record, mode = lost.record, self._keeper.restore_on_start
        if mode == "always":
            return self._waits(record) or record.kernel_id in self._left
        return mode == "prompt"

    def _waits(self, record: KernelRecord) -> bool:
        """Whether it comes back only when somebody wants it.

        What was not used takes no memory until then, and another server of the same user may be
        about to bring its own back.
        """
        asleep = record.hibernated or record.offer == "cull"
        return asleep or not self._keeper.leases.was_here(record)

    async def _found(self) -> list[LostRecord]:
        return [
            lost
            for lost in await in_thread(self._keeper.leases.lost)
            if lost.record.kernel_id not in self._keeper.kernel_manager
        ]

    async def restore(
        self, kernel_id: str, gpu_map: Mapping[str, str] | None = None
    ) -> models.Operation:
        """Start bringing a lost kernel back from its newest state that is not known as damaged.

        ``gpu_map``: which GPU (UUID) of this node stands for one of the save, where not any.
        ``unknown_kernel``, ``busy``.
        """
        self._keeper.check_free(kernel_id)
        # From now on: what a page sends next is for the kernel that comes back.
        replacements = self._keeper.hibernation.replacements
        replacement = replacements.enter(kernel_id)
        try:
            return (await self._begin(kernel_id, gpu_map)).model
        finally:
            replacements.leave(replacement, "It could not be begun.")

    async def _begin(self, kernel_id: str, gpu_map: Mapping[str, str] | None = None) -> Run:
        keeper = self._keeper
        for lost in await self._found():
            if lost.record.kernel_id == kernel_id:
                await keeper.ability.probe()
                path = lost.record.path or lost.state.meta.path
                notes = [
                    passed_over(state_id, CkptError("state_damaged", damage))
                    for state_id, damage in lost.damaged.items()
                ]
                return keeper.revive(
                    lost.state, kernel_id, path, "lost", notes=notes, gpu_map=gpu_map
                )
        raise unknown_kernel()

    async def dismiss(self, kernel_id: str) -> None:
        """Do not ask about this lost kernel again; its states stay. ``unknown_kernel``."""
        self._keeper.check_free(kernel_id)
        await self._keeper.leases.dismiss(kernel_id)

    def fence(self, kernel: TrackedKernel, hostname: str) -> None:
        """End a kernel that another server runs by now, and tell its pages; leases call it."""
        keeper, kernel_id = self._keeper, kernel.kernel_id
        where = hostname or "another node"

        async def end() -> None:
            path = (await keeper.sessions.paths()).get(kernel_id)
            keeper.announce.fenced(kernel_id, path, where)
            await ensure_async(keeper.kernel_manager.shutdown_kernel(kernel_id, now=True))

        keeper.log.warning("Kernel %s runs on %s now: ended here", kernel_id, where)
        keeper.in_background(end())
