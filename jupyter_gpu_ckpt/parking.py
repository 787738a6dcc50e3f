"""Parking: a kernel's GPU memory goes to host memory while its process stays, and comes back.

What pages send to a parked kernel is kept (:mod:`.doorman`) and delivered in order once it has its
GPU again. Those that want the same GPU get it in the order in which they asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from .capture.gpu_use import is_among, pids_on, uses_driver
from .doorman import HeldMessage, each, left_out, too_much
from .errors import CkptError
from .history import ask_kernel_info
from .models import Operation, OperationResult
from .operations import Run, in_thread, now
from .parked import Parked
from .parked_kernel import ParkedKernel
from .room import Room
from .tracking import TrackedKernel

if TYPE_CHECKING:
    from .keeper import Keeper

#: Seconds that an idle kernel has to answer before it is parked.
_ANSWER: Final = 5.0
#: Seconds for which room on a GPU is waited for at a time; others may be parked then.
_SLICE: Final = 1.0
#: Seconds between two looks whether those before have their GPU.
_LOOK: Final = 0.1


class Parking:
    """Parks kernels and gives them their GPUs back; part of the keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._entries: dict[str, ParkedKernel] = {}
        #: Those that want their GPU back, in the order in which they came.
        self._queue: list[ParkedKernel] = []

    def _entry(self, kernel_id: str) -> ParkedKernel | None:
        entry = self._entries.get(kernel_id)
        if entry is not None and not entry.is_current and not len(entry.held):
            del self._entries[kernel_id]  # restored, or died: another process is not parked
            return None
        return entry

    # -- parking -------------------------------------------------------------------------

    async def park(self, kernel_id: str, cause: str = "user") -> Operation:
        """Start to free a kernel's GPUs.

        Raises CkptError ``unknown_kernel``, ``bad_request`` (parked already), ``busy``,
        ``not_savable`` (it uses no GPU, is hibernated, or could not be woken), ``cannot_capture``.
        """
        keeper = self._keeper
        kernel = keeper.roster.savable(kernel_id)
        keeper.hibernation.check_awake(kernel_id)
        self._check_unparked(kernel_id)
        if not keeper.hibernation.can_wake:
            raise CkptError(
                "not_savable",
                "Kernels of this server cannot be parked: their messages do not pass through it.",
                hint="Save the kernel and shut it down to free its GPU.",
            )
        _check_idle(kernel)
        keeper.ability.native()
        pid = kernel.pid
        if pid is None or not await in_thread(uses_driver, pid):
            raise CkptError("not_savable", "The kernel uses no GPU: there is nothing to park.")
        path = (await keeper.sessions.paths()).get(kernel_id)
        keeper.check_free(kernel_id)
        self._check_unparked(kernel_id)

        async def work(run: Run) -> OperationResult:
            return await self._park(run, kernel)

        return keeper.begin("park", kernel_id, work, path=path, cause=cause).model

    def _check_unparked(self, kernel_id: str) -> None:
        entry = self._entry(kernel_id)
        if entry is not None and entry.is_parked:
            raise CkptError("bad_request", "The kernel is parked already.")

    async def _park(self, run: Run, kernel: TrackedKernel) -> OperationResult:
        keeper, kernel_id = self._keeper, kernel.kernel_id
        run.phase("checking")
        # What was sent before is done when this is answered.
        if await ask_kernel_info(kernel.km, kernel.km.connect_shell(), _ANSWER) is None:
            raise CkptError(
                "busy", "The kernel does not answer, so it runs on.", hint="Try again later."
            )
        run.check_cancelled()
        _check_idle(kernel)
        pid = kernel.pid
        if pid is None:
            raise CkptError("cancelled", "The kernel has ended.")
        # What is sent from now on is kept.
        self._entries[kernel_id] = entry = ParkedKernel(kernel)
        try:
            run.phase("moving", 0.1)
            use = await keeper.ability.native().move_gpu(
                "park",
                pid,
                timeout=keeper.save_timeout,
                gpu_timeout=keeper.gpu_timeout,
                on_gpu=lambda waits: _tell_wait(run, waits),
                cancel=run.cancel_event,
            )
            if use is None or not use.processes:
                raise CkptError("not_savable", "The kernel uses no GPU: there is nothing to park.")
            if not entry.is_current or self._entries.get(kernel_id) is not entry:
                raise CkptError("cancelled", "The kernel was restarted or shut down meanwhile.")
        except BaseException:
            self._release(entry)
            raise
        entry.released(use)
        kernel.parked = Parked(now(), entry.memory)
        self._room_may_be_there()
        return OperationResult("", kernel_id, time.monotonic() - run.began, entry.memory)

    # -- unparking -----------------------------------------------------------------------

    async def unpark(self, kernel_id: str, cause: str = "user") -> Operation:
        """Start to give a kernel its GPUs back, or say what does.

        Raises CkptError ``unknown_kernel``, ``bad_request`` (it is not parked), ``busy``.
        """
        self._keeper.roster.check_known(kernel_id)
        entry = self._entry(kernel_id)
        if entry is None or not entry.is_parked:
            raise CkptError("bad_request", "The kernel is not parked.")
        running = self._keeper.running(kernel_id)
        if running is not None and running.model.kind == "unpark":
            return running.model
        return (await self._begin(entry, cause)).model

    async def _begin(self, entry: ParkedKernel, cause: str) -> Run:
        kernel_id = entry.kernel.kernel_id
        path = (await self._keeper.sessions.paths()).get(kernel_id)

        async def work(run: Run) -> OperationResult:
            try:
                return await self._unpark(run, entry)
            except BaseException as error:
                self._failed(entry, error, run)
                raise

        return self._keeper.begin("unpark", kernel_id, work, path=path, cause=cause)

    async def _unpark(self, run: Run, entry: ParkedKernel) -> OperationResult:
        give_up = time.monotonic() + self._keeper.unpark_timeout
        entry.room = Room()
        async with self._turn(run, entry, give_up):
            run.phase("moving", 0.1)
            while not await self._moved_back(run, entry, last=time.monotonic() >= give_up):
                run.check_cancelled()
                if self._tell(entry, "Waiting for room on the GPU.", 1):
                    run.phase("waiting")
                if self._keeper.park_others:
                    await self._make_room(entry)
                await entry.room.wait(run.cancel_event, give_up - time.monotonic())
                run.check_cancelled()
            seconds = time.monotonic() - run.began
        lost = self._release(entry)
        return OperationResult("", entry.kernel.kernel_id, seconds, entry.memory, warnings=lost)

    async def _moved_back(self, run: Run, entry: ParkedKernel, *, last: bool) -> bool:
        """Try it; false where there is no room and it is not the last time."""
        keeper, pid = self._keeper, entry.kernel.pid
        if pid is None or not entry.is_current:
            raise CkptError("cancelled", "The kernel has ended.")
        try:
            await keeper.ability.native().move_gpu(
                "unpark",
                pid,
                timeout=keeper.restore_timeout,
                gpu_timeout=_SLICE,
                needs=entry.needs,
            )
        except CkptError as error:
            if error.reason != "no_space" or last:
                raise
            return False
        return True

    @contextlib.asynccontextmanager
    async def _turn(self, run: Run, entry: ParkedKernel, give_up: float) -> AsyncIterator[None]:
        """Wait until nobody who came before wants the same GPU."""
        self._queue.append(entry)
        try:
            while before := self._before(entry):
                run.check_cancelled()
                if time.monotonic() >= give_up:
                    raise CkptError(
                        "timeout",
                        "The kernel's turn on the GPU did not come in time. It stays parked.",
                        hint="Park or end other kernels that use the GPU.",
                    )
                others = "one other kernel" if before == 1 else f"{before} other kernels"
                self._tell(entry, f"Waiting for the GPU after {others}.", before + 1)
                await asyncio.sleep(_LOOK)
            yield
        finally:
            self._queue.remove(entry)

    def _before(self, entry: ParkedKernel) -> int:
        earlier = self._queue[: self._queue.index(entry)]
        return sum(1 for other in earlier if other.gpus & entry.gpus)

    def _tell(self, entry: ParkedKernel, why: str, position: int) -> bool:
        news = entry.wait(why, position)
        if news:
            each(entry.held, lambda message: _tell_again(message, why), self._keeper.log)
        return news

    # -- room ----------------------------------------------------------------------------

    async def _make_room(self, entry: ParkedKernel) -> None:
        """Park one idle kernel that has memory on the same GPU, the least recently used one."""
        keeper = self._keeper
        others = [kernel for kernel in keeper.tracker if self._may_park(kernel)]
        others.sort(key=lambda kernel: kernel.km.last_activity)
        pids = await in_thread(pids_on, entry.gpus) if others else None
        for kernel in others:
            if not await in_thread(is_among, kernel.pid, pids):
                continue
            with contextlib.suppress(CkptError):  # used meanwhile
                operation = await self.park(kernel.kernel_id, "room")
                run = keeper.running(kernel.kernel_id)
                if run is not None and run.model is operation:
                    await run.ended()
                if operation.status == "done":
                    return

    def _room_may_be_there(self) -> None:
        for entry in self._queue:
            entry.room.may_be_there()

    def _may_park(self, kernel: TrackedKernel) -> bool:
        kernel_id = kernel.kernel_id
        return (
            self._entry(kernel_id) is None
            and not kernel.is_hibernated
            and kernel.pid is not None
            and kernel.watch is not None
            and kernel.watch.now.execution_state == "idle"
            and self._keeper.running(kernel_id) is None
        )

    # -- what is sent meanwhile ----------------------------------------------------------

    def holds(self, kernel_id: str, message: HeldMessage) -> bool:
        """Keep what is sent to a parked kernel, and have it unparked where that needs it."""
        entry = self._entry(kernel_id)
        if entry is None or (not len(entry.held) and not message.needs_kernel()):
            return False
        if not entry.held.add(message):
            message.refuse(too_much("get its GPU"))
            return True
        if message.execute_id is not None:
            message.tell_starting()
            if (parked := entry.kernel.parked) is not None and parked.waiting is not None:
                message.tell(parked.waiting)
        if not entry.is_needed:
            entry.is_needed = True
            self._keeper.in_background(self._unpark_for_use(entry))
        return True

    async def _unpark_for_use(self, entry: ParkedKernel) -> None:
        keeper, kernel_id = self._keeper, entry.kernel.kernel_id
        try:
            while self._entries.get(kernel_id) is entry and entry.is_current and len(entry.held):
                running = keeper.running(kernel_id)
                if running is None:
                    running = await self._begin(entry, "execute")
                elif running.model.kind == "park":
                    running.cancel()
                await running.ended()
        except CkptError as error:
            self._failed(entry, error)
        finally:
            entry.is_needed = False
            if not entry.is_current:
                self._release(entry)  # another process has taken its place

    def _failed(self, entry: ParkedKernel, error: BaseException, run: Run | None = None) -> None:
        entry.wait(None)
        why = "The server is stopping."
        if isinstance(error, CkptError):
            if error.reason == "cancelled" and run is not None and entry.given_up is run:
                return  # cells that came since want it anew
            why = error.message
        told = CkptError(
            "restore_failed",
            f"The parked kernel did not get its GPU back: {why}",
            hint="Run the cell again to try once more.",
        )
        held = entry.held.take()
        each(held, lambda message: message.refuse(told, "KernelNotUnparked"), self._keeper.log)

    def _release(self, entry: ParkedKernel) -> list[str]:
        """It is not parked any more: what was kept is delivered, and said what was not kept."""
        kernel_id = entry.kernel.kernel_id
        lost: list[str] = []
        if self._entries.get(kernel_id) is entry:
            del self._entries[kernel_id]
            lost = left_out([entry.held], kernel_id, self._keeper.log)
        waited = entry.kernel.parked is not None and entry.kernel.parked.waiting is not None
        if entry.is_current:
            entry.kernel.parked = None
        held = entry.held.take()
        if waited:
            each(held, lambda message: message.tell(None), self._keeper.log)
        each(held, HeldMessage.deliver, self._keeper.log)
        return lost

    # -- ends ----------------------------------------------------------------------------

    def taken(self, kernel_id: str) -> list[HeldMessage]:
        """Cells that are kept for a kernel; they are kept no longer, nor is its GPU waited for."""
        entry = self._entries.get(kernel_id)
        if entry is None:
            return []
        cells = entry.held.take(only_cells=True)
        running = self._keeper.running(kernel_id)
        wanted = running is None or running.model.cause != "execute" or len(entry.held)
        if cells and running is not None and not wanted:
            entry.given_up = running
            running.cancel()  # the cells were all that wanted it
        return cells

    def ended(self, kernel_id: str) -> list[HeldMessage]:
        """What was kept for a kernel that is about to end."""
        self._room_may_be_there()
        entry = self._entries.pop(kernel_id, None)
        return entry.held.take() if entry is not None else []


def _tell_wait(run: Run, waits: bool) -> None:
    # Of one that is cancelled kernel-capture says whether it was undone in time.
    if not run.cancel_flag.is_set():
        run.phase("gpu" if waits else "moving")


def _tell_again(message: HeldMessage, why: str) -> None:
    message.tell(None)
    message.tell(why)


def _check_idle(kernel: TrackedKernel) -> None:
    if kernel.watch is None or kernel.watch.now.execution_state != "idle":
        raise CkptError("busy", "The kernel is running a cell.", hint="Park it when it is idle.")
