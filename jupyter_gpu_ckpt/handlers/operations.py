"""Long operations: follow, cancel."""

from __future__ import annotations

from typing import Any

from jupyter_server.auth import authorized
from tornado import web

from .base import API, GpuCkptHandler


class OperationsHandler(GpuCkptHandler):
    """``/operations``"""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List the operations under way and those that ended lately."""
        self.answer(self.keeper.operations())


class OperationHandler(GpuCkptHandler):
    """``/operations/{operation_id}``"""

    @web.authenticated
    @authorized
    async def get(self, operation_id: str) -> None:
        """Describe one operation."""
        self.answer(self.keeper.operation(self.checked_id("op", operation_id)))

    @web.authenticated
    @authorized
    async def delete(self, operation_id: str) -> None:
        """Cancel an operation; it ends a moment later, so the answer is 202."""
        self.accepted(await self.keeper.cancel(self.checked_id("op", operation_id)))


routes: list[tuple[str, Any]] = [
    (rf"{API}/operations/?", OperationsHandler),
    (rf"{API}/operations/(?P<operation_id>[^/]+)", OperationHandler),
]
