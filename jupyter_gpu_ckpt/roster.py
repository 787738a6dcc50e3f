"""The kernels of the server as clients see them, and whether each can be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import describe
from .ability import Ability
from .errors import CkptError
from .models import Kernel
from .operations import Run, in_thread
from .provisioner import GpuCkptProvisioner
from .store import StateRecord, StateStore
from .tracking import TrackedKernel, Tracker

#: Gives the operation that runs on a kernel now, if any.
Running = Callable[[str], "Run | None"]


class Roster:
    """Looks kernels up; part of the keeper.

    Parameters
    ----------
    kernel_manager
        The server's own.
    tracker
        Those that run below a supervisor.
    store
        For their newest states.
    ability
        What the node can do.
    """

    def __init__(
        self, kernel_manager: Any, tracker: Tracker, store: StateStore, ability: Ability
    ) -> None:
        self._kernel_manager = kernel_manager
        self._tracker = tracker
        self._store = store
        self._ability = ability

    async def all(self, paths: dict[str, str], running: Running) -> list[Kernel]:
        """Every kernel of the server; ``paths`` are their notebooks'."""
        newest, store_error = await self._newest()
        error = await self._ability.error() or store_error
        return [
            self._describe(kernel_id, paths, newest.get(kernel_id), error, running)
            for kernel_id in self._kernel_manager.list_kernel_ids()
        ]

    async def one(self, kernel_id: str, paths: dict[str, str], running: Running) -> Kernel:
        """One kernel; ``unknown_kernel``."""
        newest, store_error = await self._newest(kernel_id)
        error = await self._ability.error() or store_error
        self.check_known(kernel_id)
        return self._describe(kernel_id, paths, newest.get(kernel_id), error, running)

    def check_known(self, kernel_id: str) -> None:
        """Raise ``unknown_kernel`` unless the server has this kernel."""
        if kernel_id not in self._kernel_manager:
            raise unknown_kernel()

    def savable(self, kernel_id: str) -> TrackedKernel:
        """The kernel, if it was started so that it can be saved.

        Raises CkptError ``unknown_kernel`` or ``not_savable``.
        """
        self.check_known(kernel_id)
        error = self._why_not(kernel_id)
        if error is not None:
            raise error
        kernel = self._tracker.get(kernel_id)
        if kernel is None:
            raise CkptError("not_savable", "The kernel is still starting.", hint="Try again.")
        return kernel

    def sockets(self, kernel_id: str) -> dict[int, int]:
        """How many sockets of this server each port of the kernel serves; for restores."""
        km = self._kernel_manager.get_kernel(kernel_id)
        # A page has one for each channel, also while its messages are kept for when it is back.
        pages = int(self._kernel_manager._kernel_connections.get(kernel_id, 0))
        pages += kernel_id in self._kernel_manager._kernel_buffers
        kernel = self._tracker.get(kernel_id)
        watch = kernel.watch if kernel is not None else None
        subscribers = pages + (getattr(km, "_activity_stream", None) is not None)
        subscribers += watch is not None and watch.has_own_socket
        return {
            km.iopub_port: subscribers,
            km.shell_port: pages,
            km.stdin_port: pages,
            km.control_port: pages,
        }

    async def is_pristine(self, kernel_id: str) -> bool:
        """Whether nobody would miss this kernel: it ran nothing and has no state."""
        kernel = self._tracker.get(kernel_id)
        if kernel is None or kernel.watch is None or kernel.watch.now.execution_count is not None:
            return False
        return not await in_thread(self._store.states, kernel_id)

    async def _newest(
        self, kernel_id: str | None = None
    ) -> tuple[dict[str, StateRecord], CkptError | None]:
        """Each kernel's newest state, or why the store cannot be read: a reason not to save."""
        newest: dict[str, StateRecord] = {}
        try:
            for record in await in_thread(self._store.states, kernel_id):
                newest.setdefault(record.meta.kernel_id, record)
        except CkptError as error:
            return {}, error
        return newest, None

    def _describe(
        self,
        kernel_id: str,
        paths: dict[str, str],
        newest: StateRecord | None,
        node_error: CkptError | None,
        running: Running,
    ) -> Kernel:
        km = self._kernel_manager.get_kernel(kernel_id)
        run = running(kernel_id)
        error = self._why_not(kernel_id) or node_error
        operation = run.model if run else None
        tracked = self._tracker.get(kernel_id)
        hibernated = tracked is not None and tracked.is_hibernated
        if tracked is not None and hibernated:
            error = tracked.wake_error or describe.asleep()
        return describe.kernel(
            kernel_id,
            km,
            paths.get(kernel_id),
            newest,
            error,
            operation,
            tracked.restored_from if tracked is not None else None,
            hibernated=hibernated,
            parked=tracked.parked if tracked is not None else None,
            can_park=tracked is not None and self._ability.can_park,
            gpu_lost=tracked.gpu_lost if tracked is not None else None,
        )

    def _why_not(self, kernel_id: str) -> CkptError | None:
        """Why this kernel of the server cannot be saved, whatever the node can do."""
        km = self._kernel_manager.get_kernel(kernel_id)
        if not getattr(km, "owns_kernel", True):
            return CkptError(
                "not_savable",
                "The kernel was started before this server, or by another program.",
                hint="Only kernels that this server starts can be saved: start one here.",
            )
        provisioner = getattr(km, "provisioner", None)
        if isinstance(provisioner, GpuCkptProvisioner):
            return provisioner.savability
        return CkptError(
            "not_savable",
            "The kernel was not started so that it can be saved.",
            hint="Its kernelspec or the server's configuration names another kernel provisioner.",
        )


def unknown_kernel() -> CkptError:
    """What to raise for a kernel id nobody knows."""
    return CkptError(
        "unknown_kernel",
        "There is no such kernel.",
        hint="It may have ended: list the kernels anew.",
    )
