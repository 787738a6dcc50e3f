"""Kernels that live on although their GPU is lost: their users are told at once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .keeper import Keeper


class LostGpus:
    """Marks such kernels and announces them; part of the keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Called once, on the event loop, when the server is up."""
        self._loop = asyncio.get_running_loop()

    def heard(self, kernel_id: str) -> None:
        """A GPU of a kernel is lost; from any thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
                loop.call_soon_threadsafe(self._tell, kernel_id)

    def _tell(self, kernel_id: str) -> None:
        kernel = self._keeper.tracker.get(kernel_id)
        if kernel is None or kernel.pid is None or kernel.gpu_lost is not None:
            return
        # Another process may have taken the place of the one that used the GPU.
        reason = self._keeper.ability.faults.reason(kernel_id)
        if reason is None or reason.lost is None:
            return
        state_id = kernel.policy.latest
        # Short: pages show the beginning of what is long.
        todo = "Restore its last saved state." if state_id is not None else "Restart it."
        kernel.gpu_lost = message = f"{reason.words}. {todo}"

        async def announce() -> None:
            path = (await self._keeper.sessions.paths()).get(kernel_id)
            self._keeper.announce.gpu_lost(kernel_id, path, state_id, message)

        self._keeper.in_background(announce())
