"""Saved states: list, look at, delete, restore."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from jupyter_server.auth import authorized
from tornado import web

from ..errors import CkptError
from ..models import RestoreMode
from .base import API, EmptyBody, GpuCkptHandler

GpuId = Annotated[str, msgspec.Meta(pattern="^GPU-[0-9a-fA-F-]{1,64}$")]
#: Which GPU of this node stands for which of the save.
GpuMap = Annotated[dict[GpuId, GpuId], msgspec.Meta(max_length=64)]


class RestoreBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What ``POST /states/{id}/restore`` takes."""

    mode: RestoreMode = "rollback"
    path: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    take_over: bool = False
    gpu_map: GpuMap = {}


class MarkBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What ``PATCH /states/{id}`` takes; what is not given stays as it is."""

    pinned: bool | msgspec.UnsetType = msgspec.UNSET
    label: Annotated[str, msgspec.Meta(max_length=200)] | msgspec.UnsetType | None = msgspec.UNSET


class StatesHandler(GpuCkptHandler):
    """``/states``"""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List states, newest first: all, a kernel's, or a notebook's."""
        kernel_id = self.get_query_argument("kernel", None)
        if kernel_id is not None:
            kernel_id = self.checked_id("kernel", kernel_id)
        path = _api_path(self.get_query_argument("path", None))
        self.answer(await self.keeper.saved.all(kernel_id, path))


class StateHandler(GpuCkptHandler):
    """``/states/{state_id}``"""

    @web.authenticated
    @authorized
    async def get(self, state_id: str) -> None:
        """Describe one state, and whether it can be restored here."""
        self.answer(await self.keeper.saved.one(self.checked_id("state", state_id)))

    @web.authenticated
    @authorized
    async def patch(self, state_id: str) -> None:
        """Pin a state, or change its label."""
        state_id = self.checked_id("state", state_id)
        body = self.body(MarkBody)
        self.answer(await self.keeper.saved.mark(state_id, pinned=body.pinned, label=body.label))

    @web.authenticated
    @authorized
    async def delete(self, state_id: str) -> None:
        """Delete one state for good."""
        await self.keeper.delete_state(self.checked_id("state", state_id))
        self.no_content()


class ContentsHandler(GpuCkptHandler):
    """``/states/{state_id}/contents``"""

    @web.authenticated
    @authorized
    async def get(self, state_id: str) -> None:
        """Say what is inside a state."""
        self.answer(await self.keeper.saved.contents(self.checked_id("state", state_id)))


class VerifyHandler(GpuCkptHandler):
    """``/states/{state_id}/verify``"""

    @web.authenticated
    @authorized
    async def post(self, state_id: str) -> None:
        """Start to check whether all of a state can be read back."""
        state_id = self.checked_id("state", state_id)
        self.body(EmptyBody)
        self.accepted(await self.keeper.saved.verify(state_id))


class RestoreHandler(GpuCkptHandler):
    """``/states/{state_id}/restore``"""

    @web.authenticated
    @authorized
    async def post(self, state_id: str) -> None:
        """Start to restore a state."""
        state_id = self.checked_id("state", state_id)
        body = self.body(RestoreBody)
        path = _api_path(body.path)
        self.accepted(
            await self.keeper.restore(
                state_id,
                mode=body.mode,
                path=path,
                take_over=body.take_over,
                gpu_map=body.gpu_map,
            )
        )


def _api_path(path: str | None) -> str | None:
    """Return a notebook's path as the contents API writes it: no leading slash, no ``..``."""
    if path is None:
        return None
    path = path.strip("/")
    if not path or "\0" in path or ".." in path.split("/"):
        raise CkptError(
            "bad_request",
            "This is not a notebook's path.",
            hint="Give it relative to the server's root folder.",
        )
    return path


routes: list[tuple[str, Any]] = [
    (rf"{API}/states/?", StatesHandler),
    (rf"{API}/states/(?P<state_id>[^/]+)", StateHandler),
    (rf"{API}/states/(?P<state_id>[^/]+)/contents", ContentsHandler),
    (rf"{API}/states/(?P<state_id>[^/]+)/verify", VerifyHandler),
    (rf"{API}/states/(?P<state_id>[^/]+)/restore", RestoreHandler),
]
