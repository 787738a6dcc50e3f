"""Saves before an end that no user asked for: the server stops, or its culler ends a kernel."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from jupyter_core.utils import ensure_async

from .capture.gpu_use import uses_driver
from .operations import in_thread, now
from .store import ServerStop
from .work import Work

if TYPE_CHECKING:
    from .keeper import Keeper
    from .policies import Policies

#: How often in a row a kernel is spared because it could not be saved.
_SPARED: Final = 3

#: Seconds that cancelled saves have to be undone.
_UNDOING: Final = 5.0

#: The kernel that the culler is looking at, in its own task.
_culling: ContextVar[str | None] = ContextVar("culling", default=None)


class Endings:
    """Part of :class:`~jupyter_gpu_ckpt.policies.Policies`."""

    def __init__(self, keeper: Keeper, policies: Policies) -> None:
        self._keeper = keeper
        self._policies = policies

    # -- the server stops ----------------------------------------------------------------

    async def before_shutdown(self, latest: float = math.inf) -> None:
        """Save all kernels that have something unsaved, within the deadline.

        Those of which there is a state then are offered by the next server.

        Parameters
        ----------
        latest
            When the server ends in any case, in monotonic seconds.
        """
        deadline = min(latest, time.monotonic() + self._policies.settings.shutdown_deadline)
        left = deadline - time.monotonic()
        await self._policies.notebooks.see(self._policies.works(), left / 4)
        works = self.kernels()
        if math.isfinite(latest):  # it was foretold
            works += [work for work in self.kernels(foretold=True) if work not in works]
        unsaved = [work for work in works if work.unsaved_since is not None]
        stop: ServerStop | None = None
        if unsaved and await self._keeper.ability.error() is None:
            log, began = self._keeper.log, time.monotonic()
            log.info("Saving %d kernels before the server stops", len(unsaved))
            message = "The server stopped before the kernel could be saved."
            failed = await self.save_all(unsaved, deadline, "shutdown", message)
            took, saved = time.monotonic() - began, len(unsaved) - len(failed)
            log.info("Saved %d of %d kernels in %.1f s", saved, len(unsaved), took)
            stop = ServerStop(at=now(), seconds=took, kernels=len(unsaved), saved=saved)
        for work in works:
            if work.kernel.policy.has_state:
                self._keeper.leases.offer_after_end(work.kernel.kernel_id, "shutdown", stop)

    def kernels(self, *, foretold: bool = False) -> list[Work]:
        """The kernels that are saved before the server ends, if there is something to save.

        Before one that is `foretold`, or else before a shutdown.
        """
        return [
            w
            for w in self._policies.works()
            # A hibernated one is in its state, whole.
            if w.policy.enabled
            and (w.policy.before_preemption if foretold else w.policy.before_shutdown)
            and not w.kernel.is_hibernated
        ]

    def unsaved(self) -> list[Work]:
        """Those to be saved before an end that is foretold, by all they have said."""
        works = self.kernels(foretold=True)
        return [work for work in works if work.unsaved_since is not None]

    async def save_all(
        self, works: list[Work], deadline: float, reason: str, message: str
    ) -> dict[str, str]:
        """Save kernels in parallel, most valuable first, and say which were not saved.

        Parameters
        ----------
        works
            The kernels.
        deadline
            When it must be over, in monotonic seconds: saves under way are then undone.
        reason
            That of the states.
        message
            What to say of a kernel for which there was no time.

        Returns
        -------
        dict
            By kernel id, why those that were not saved were not.
        """
        gpu = await in_thread(lambda: [_uses_gpu(work) for work in works])
        now = time.monotonic()
        order = sorted(zip(gpu, works, strict=True), key=lambda pair: _value(pair[0], pair[1], now))
        turns = asyncio.Semaphore(self._policies.settings.shutdown_parallel)
        failed = {work.kernel.kernel_id: message for _, work in order}

        async def save(work: Work) -> None:
            kernel_id = work.kernel.kernel_id
            async with turns:
                # One that is known not to fit must not take the time of those that do.
                if time.monotonic() + work.seconds >= deadline:
                    return
                if (why := await self._save(work, reason)) is None:
                    del failed[kernel_id]
                else:
                    failed[kernel_id] = why

        tasks = [asyncio.create_task(save(work)) for _, work in order]
        try:
            await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()))
        finally:
            late = [task for task in tasks if task.cancel()]
        paths = await self._keeper.sessions.paths()
        for kernel_id, why in failed.items():
            run = self._keeper.running(kernel_id)
            if run is not None:
                run.cancel()
            path = paths.get(kernel_id)
            self._keeper.log.warning(
                "Not saved before the server stops: kernel %s (%s): %s", kernel_id, path, why
            )
            if why == message:  # else its operation has told
                self._keeper.announce.autosave_failed(kernel_id, path, reason, message)
        await asyncio.gather(*late, return_exceptions=True)
        return failed

    async def _save(self, work: Work, reason: str) -> str | None:
        """Save one kernel, or let the operation end that runs on it; why not all of it is saved."""
        kernel_id = work.kernel.kernel_id
        run = self._keeper.running(kernel_id)
        if run is not None:
            await run.ended()
            if work.unsaved_since is None:
                return None
        if await self._policies.save(work, reason):
            return None
        for operation in self._keeper.operations():
            if operation.kernel_id == kernel_id and operation.cause == reason and operation.error:
                return operation.error.message
        error = await self._keeper.ability.error()
        return error.message if error is not None else "The kernel cannot be saved."

    # -- the culler ----------------------------------------------------------------------

    def watch_culler(self) -> None:
        """Have the server's culler wait for a save of what it is about to end."""
        manager: Any = self._keeper.kernel_manager
        if not hasattr(manager, "cull_kernel_if_idle"):
            return  # kernels that run elsewhere
        cull: Callable[[str], Awaitable[None]] = manager.cull_kernel_if_idle
        shut_down: Callable[..., Any] = manager.shutdown_kernel

        async def cull_kernel_if_idle(kernel_id: str) -> None:
            if self._keeper.hibernation.is_asleep(kernel_id):
                return  # it costs nothing
            token = _culling.set(kernel_id)
            try:
                await cull(kernel_id)
            finally:
                _culling.reset(token)

        def shutdown_kernel(kernel_id: str, *args: Any, **kwargs: Any) -> Any:
            if _culling.get() != kernel_id:
                return shut_down(kernel_id, *args, **kwargs)
            return save_first(kernel_id, *args, **kwargs)

        async def save_first(kernel_id: str, *args: Any, **kwargs: Any) -> None:
            if await self._before_cull(kernel_id):
                await ensure_async(shut_down(kernel_id, *args, **kwargs))

        manager.cull_kernel_if_idle = cull_kernel_if_idle
        manager.shutdown_kernel = shutdown_kernel

    async def _before_cull(self, kernel_id: str) -> bool:
        """Save a kernel that is about to be culled; false when it must not be ended now."""
        work = self._policies.work_of(kernel_id)
        if work is None:
            return True
        last_activity = getattr(work.kernel.km, "last_activity", None)
        await self._policies.notebooks.see([work])
        if getattr(work.kernel.km, "last_activity", None) != last_activity:
            return False  # its user came back
        if not (work.policy.enabled and work.policy.before_cull):
            return True
        run = self._keeper.running(kernel_id)
        if run is not None:
            return False  # the culler comes again
        if self._hibernates(work):
            saved = await self._policies.save(work, "cull", hibernate=True)
            if saved or getattr(work.kernel.km, "last_activity", None) != last_activity:
                return False  # it sleeps, or its user came back
        else:
            saved = work.unsaved_since is None or await self._policies.save(work, "cull")
        if not saved:
            if await self._keeper.ability.error() is not None:
                return True  # nothing can be saved on this node: it culls as ever
            work.cull_failures += 1
            if work.cull_failures <= _SPARED:
                self._keeper.log.warning(
                    "Kernel %s is not culled, because it could not be saved first", kernel_id
                )
                return False
        if getattr(work.kernel.km, "last_activity", None) != last_activity:
            return False  # its user came back
        if work.kernel.policy.has_state:
            self._keeper.leases.offer_after_end(kernel_id, "cull")
        return True

    def _hibernates(self, work: Work) -> bool:
        """Whether a kernel is to sleep instead of being ended: one that has something to keep."""
        return (
            self._policies.settings.cull_action == "hibernate"
            and self._keeper.hibernation.can_wake
            and not work.is_running
            # One that was spared often enough is only saved, whatever keeps it from sleeping.
            and work.cull_failures < _SPARED
            and (work.unsaved_since is not None or work.kernel.policy.has_state)
        )


def _value(uses_gpu: bool, work: Work, now: float) -> tuple[bool, float, float]:
    """What is saved first sorts first: on a GPU, much work unsaved, quick to save."""
    return (not uses_gpu, -(now - (work.unsaved_since or now)), work.seconds)


def _uses_gpu(work: Work) -> bool:
    pid = work.kernel.pid
    return pid is not None and uses_driver(pid)
