"""What this node can capture, and why not."""

from __future__ import annotations

from typing import Any

from jupyter_server.auth import authorized
from tornado import web

from .base import API, GpuCkptHandler


class DoctorHandler(GpuCkptHandler):
    """``/doctor``"""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Examine this node."""
        self.answer(await self.keeper.doctor())


routes: list[tuple[str, Any]] = [(rf"{API}/doctor", DoctorHandler)]
