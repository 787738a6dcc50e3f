"""Collecting what no state needs any more."""

from __future__ import annotations

from typing import Any

import msgspec
from jupyter_server.auth import authorized
from tornado import web

from .base import API, GpuCkptHandler


class GcBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What ``POST /gc`` takes."""

    dry_run: bool = False


class GcHandler(GpuCkptHandler):
    """``/gc``"""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """Remove unused data from the store, or only say how much there is."""
        self.answer(await self.keeper.gc(dry_run=self.body(GcBody).dry_run))


routes: list[tuple[str, Any]] = [(rf"{API}/gc", GcHandler)]
