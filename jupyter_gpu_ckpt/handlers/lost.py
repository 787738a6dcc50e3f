"""Lost kernels: list, restore, dismiss."""

from __future__ import annotations

from typing import Any

import msgspec
from jupyter_server.auth import authorized
from tornado import web

from .base import API, EmptyBody, GpuCkptHandler
from .states import GpuMap


class LostBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What ``POST /lost/{kernel_id}/restore`` takes."""

    gpu_map: GpuMap = {}


class LostHandler(GpuCkptHandler):
    """``/lost``"""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List kernels that ended without an orderly shutdown and can come back."""
        self.answer(await self.keeper.lost.offered())


class LostRestoreHandler(GpuCkptHandler):
    """``/lost/{kernel_id}/restore``"""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        """Start to restore a lost kernel from its newest state."""
        kernel_id = self.checked_id("kernel", kernel_id)
        gpu_map = self.body(LostBody).gpu_map
        self.accepted(await self.keeper.lost.restore(kernel_id, gpu_map))


class LostDismissHandler(GpuCkptHandler):
    """``/lost/{kernel_id}/dismiss``"""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        """Stop offering a lost kernel; its states stay."""
        kernel_id = self.checked_id("kernel", kernel_id)
        self.body(EmptyBody)
        await self.keeper.lost.dismiss(kernel_id)
        self.no_content()


routes: list[tuple[str, Any]] = [
    (rf"{API}/lost/?", LostHandler),
    (rf"{API}/lost/(?P<kernel_id>[^/]+)/restore", LostRestoreHandler),
    (rf"{API}/lost/(?P<kernel_id>[^/]+)/dismiss", LostDismissHandler),
]
