"""Paths that are not in the API: an error in its own words, not a page of the server."""

from __future__ import annotations

from typing import Any

from jupyter_server.auth import authorized
from tornado import web

from ..errors import CkptError
from .base import API, GpuCkptHandler


class UnknownPathHandler(GpuCkptHandler):
    """Whatever no other handler serves."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Say that there is nothing here."""
        raise CkptError(
            "unknown_path",
            "This path is not in the API.",
            hint="See the REST API's openapi.yaml.",
        )

    post = put = patch = delete = get


#: To be served after all others.
routes: list[tuple[str, Any]] = [(rf"{API}(?:/.*)?", UnknownPathHandler)]
