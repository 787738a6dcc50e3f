"""When kernels are saved automatically: what counts, and what the user chooses."""

from __future__ import annotations

from typing import Any

from jupyter_server.auth import authorized
from tornado import web

from ..models import AutoSaveChoice
from .base import API, GpuCkptHandler


class AutoSaveHandler(GpuCkptHandler):
    """``/autosave``"""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Describe what counts for kernels of which nothing else is said."""
        self.answer(self.keeper.policies.user())

    @web.authenticated
    @authorized
    async def put(self) -> None:
        """Set the user's choice for all kernels."""
        self.answer(await self.keeper.policies.choose(self.body(AutoSaveChoice)))


class KernelAutoSaveHandler(GpuCkptHandler):
    """``/kernels/{kernel_id}/autosave``"""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        """Describe what counts for one kernel."""
        kernel_id = self.checked_id("kernel", kernel_id)
        self.answer(await self.keeper.policies.see_kernel(kernel_id))

    @web.authenticated
    @authorized
    async def put(self, kernel_id: str) -> None:
        """Set the choice for one kernel."""
        kernel_id = self.checked_id("kernel", kernel_id)
        choice = self.body(AutoSaveChoice)
        self.answer(await self.keeper.policies.choose_for(kernel_id, choice))


routes: list[tuple[str, Any]] = [
    (rf"{API}/autosave/?", AutoSaveHandler),
    (rf"{API}/kernels/(?P<kernel_id>[^/]+)/autosave", KernelAutoSaveHandler),
]
