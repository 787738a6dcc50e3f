"""Running kernels, and saving one."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from jupyter_server.auth import authorized
from tornado import web

from .base import API, GpuCkptHandler


class SaveBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What ``POST /kernels/{id}/save`` takes."""

    label: Annotated[str, msgspec.Meta(max_length=200)] | None = None


class KernelsHandler(GpuCkptHandler):
    """``/kernels``"""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List the running kernels."""
        self.answer(await self.keeper.kernels())


class KernelHandler(GpuCkptHandler):
    """``/kernels/{kernel_id}``"""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        """Describe one running kernel."""
        self.answer(await self.keeper.kernel(self.checked_id("kernel", kernel_id)))


class SaveHandler(GpuCkptHandler):
    """``/kernels/{kernel_id}/save``"""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        """Start to save a kernel."""
        kernel_id = self.checked_id("kernel", kernel_id)
        label = (self.body(SaveBody).label or "").strip() or None
        self.accepted(await self.keeper.save(kernel_id, label=label))


class HibernateHandler(GpuCkptHandler):
    """``/kernels/{kernel_id}/hibernate``"""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        """Start to save a kernel and end its process."""
        kernel_id = self.checked_id("kernel", kernel_id)
        self.accepted(await self.keeper.hibernation.hibernate(kernel_id))


class WakeHandler(GpuCkptHandler):
    """``/kernels/{kernel_id}/wake``"""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        """Start to wake a hibernated kernel."""
        self.accepted(await self.keeper.hibernation.wake(self.checked_id("kernel", kernel_id)))


class ParkHandler(GpuCkptHandler):
    """``/kernels/{kernel_id}/park``"""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        """Start to move a kernel's GPU memory to host memory."""
        kernel_id = self.checked_id("kernel", kernel_id)
        self.accepted(await self.keeper.hibernation.parking.park(kernel_id))


class UnparkHandler(GpuCkptHandler):
    """``/kernels/{kernel_id}/unpark``"""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        """Start to give a parked kernel its GPU back."""
        kernel_id = self.checked_id("kernel", kernel_id)
        self.accepted(await self.keeper.hibernation.parking.unpark(kernel_id))


routes: list[tuple[str, Any]] = [
    (rf"{API}/kernels/?", KernelsHandler),
    (rf"{API}/kernels/(?P<kernel_id>[^/]+)", KernelHandler),
    (rf"{API}/kernels/(?P<kernel_id>[^/]+)/save", SaveHandler),
    (rf"{API}/kernels/(?P<kernel_id>[^/]+)/hibernate", HibernateHandler),
    (rf"{API}/kernels/(?P<kernel_id>[^/]+)/wake", WakeHandler),
    (rf"{API}/kernels/(?P<kernel_id>[^/]+)/park", ParkHandler),
    (rf"{API}/kernels/(?P<kernel_id>[^/]+)/unpark", UnparkHandler),
]
