"""Notices that the server is about to end: given through the API, and what came of any."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from jupyter_server.auth import authorized
from tornado import web

from ..foretold import REQUEST
from ..notices import Notice
from .base import API, GpuCkptHandler


class EndingBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What ``POST /endings`` takes."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=604800)]
    why: Annotated[str, msgspec.Meta(max_length=200)] | None = None


class EndingsHandler(GpuCkptHandler):
    """``/endings``"""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List the ends that were foretold, newest first."""
        self.answer(self.keeper.policies.foretold.all())

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """Say that the server is about to end."""
        body = self.body(EndingBody)
        why = (body.why or "").strip() or "The server is about to be stopped."
        notice = Notice(body.seconds, why)
        self.answer(self.keeper.policies.foretold.tell(notice, REQUEST), 202)


routes: list[tuple[str, Any]] = [(rf"{API}/endings/?", EndingsHandler)]
