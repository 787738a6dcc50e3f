"""Saves that nobody asks for: which kernel is saved when, and what comes of it.

Driven by what kernels do (:mod:`.work`) and one timer for all of them; a server whose kernels
are idle and saved does nothing here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import msgspec

from . import metrics
from .alarms import Alarms
from .autosave import AutoSave, UserChoice, from_metadata, merged
from .capture.gpu_use import uses_driver
from .endings import Endings
from .errors import CkptError
from .failed_saves import FailedSaves
from .foretold import Foretold
from .kernel_requests import KernelRequests
from .models import AutoSaveChoice, AutoSaves, Operation
from .notebook_choices import NotebookChoices
from .operations import Run, in_thread
from .tracking import TrackedKernel
from .work import Work

if TYPE_CHECKING:
    from .keeper import Keeper

#: Reasons with which an operation does not begin, and which the next one need not meet.
_HERE_NEVER: Final = frozenset({"cannot_capture", "not_savable"})


class Policies:
    """Saves kernels automatically; part of the keeper.

    A save never runs beside another operation on the kernel, is nobody's activity, and fails
    quietly: with an event, a line in the log, and growing times between tries.

    Parameters
    ----------
    keeper
        Does the saving.
    folder
        Where the user's own choice is kept.
    """

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self._keeper = keeper
        self.settings = AutoSave(parent=keeper)
        #: What notebooks themselves choose.
        self.notebooks = NotebookChoices(keeper, self.refresh)
        self._file = UserChoice(folder / "autosave.json")
        self._user = AutoSaveChoice()
        self._works: WeakKeyDictionary[TrackedKernel, Work] = WeakKeyDictionary()
        self._alarms: Alarms[Work] = Alarms(self._ring)
        # One at a time: kernels that fall idle together are not saved together.
        self._turn = asyncio.Lock()
        self._stopped = False
        self._failed = FailedSaves(keeper)
        self.requests = KernelRequests(keeper, self)
        self._endings = Endings(keeper, self)
        self.foretold = Foretold(keeper, self, self._endings)

    # -- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin; called once when the server is up."""
        self._user = await in_thread(self._file.read)
        self._endings.watch_culler()
        await self.foretold.start()

    async def stop(self) -> None:
        """Save what is to be saved before the server ends; then no more."""
        self._stopped = True
        self.notebooks.stop()
        self._alarms.close()
        await self._endings.before_shutdown(await self.foretold.stop())

    # -- kernels -------------------------------------------------------------------------

    def listener(self, kernel: TrackedKernel) -> Work:
        """Make the listener of a kernel that is about to start; the tracker calls it."""
        self._works[kernel] = work = Work(kernel, self.settings.defaults(), self)
        return work

    def work_of(self, kernel_id: str) -> Work | None:
        """What is known of a kernel's work."""
        kernel = self._keeper.tracker.get(kernel_id)
        return None if kernel is None else self._works.get(kernel)

    def works(self) -> list[Work]:
        """That of all kernels which run below a supervisor."""
        return [self._works[kernel] for kernel in self._keeper.tracker if kernel in self._works]

    def kernel_started(self, kernel: TrackedKernel) -> None:
        """A kernel runs anew, or came out of a state; its own choice is known a moment later."""
        work = self._works[kernel]
        self._alarms.clear(work)
        work.restored()
        self.refresh(work)

    def refresh_kernel(self, kernel: TrackedKernel) -> None:
        """The kernel's own choice is known."""
        self.refresh(self._works[kernel])

    def kernel_ended(self, kernel_id: str) -> None:
        """A kernel was shut down in order."""
        metrics.forget(kernel_id)

    def operation_ended(self, run: Run) -> None:
        """An operation is over, whoever asked for it."""
        metrics.count(run.model)
        self._failed.ended(run.model)
        work, model = self.work_of(run.model.kernel_id), run.model
        if work is None:
            return
        if model.kind in ("park", "unpark"):
            # What was unparked is wanted: it is not parked at once.
            work.stay_on_gpu(work.policy.park)
            if model.status == "failed" and model.error is not None:
                self._not_parked(work, model.error.reason)
        elif model.kind not in ("save", "restore"):
            pass  # nothing of its work is in a state now that was not before
        elif model.kind == "restore":
            if model.status == "done":
                if (origin := work.kernel.restored_from) is not None:
                    metrics.restored(work.kernel.kernel_id, origin.created)
                self._alarms.clear(work)
                work.restored()
        elif model.status == "done" and model.result is not None:
            work.saved(run.began, model.result.seconds, model.result.frozen_seconds or 0.0)
        elif model.cause == "hibernate" or (model.cause == "cull" and _is_in_use(model)):
            work.put_off(self.settings.retry)
        elif model.cause != "user":
            work.failed(self.settings.retry)
            if model.error is not None and model.status == "failed":
                self._tell(work, model.path, model.cause, model.error.message)
        self.worked(work)

    async def before_save(self, kernel: TrackedKernel) -> list[str]:
        """Have the kernel's own callbacks called; returns warnings for the state."""
        if kernel.watch is not None:
            kernel.watch.catch_up()
        warning = await self.requests.before_save(self._works[kernel])
        return [] if warning is None else [warning]

    # -- choices -------------------------------------------------------------------------

    def refresh(self, work: Work) -> None:
        """See anew what counts for a kernel."""
        km = work.kernel.km
        spec = getattr(km.kernel_spec, "metadata", None)
        own = msgspec.convert(work.kernel.autosave or {}, AutoSaveChoice)
        choices = (self._user, from_metadata(spec), work.notebook[0], own)
        work.policy = self.settings.policy(km.kernel_name, choices)
        self.worked(work)

    def user(self) -> AutoSaves:
        """What counts where nothing nearer is chosen."""
        policy = self.settings.policy("", [self._user])
        return self.settings.described(policy, self._user)

    async def choose(self, choice: AutoSaveChoice) -> AutoSaves:
        """Set the user's choice for all kernels; ``bad_request``, ``store_unavailable``."""
        self.settings.check(choice)
        await in_thread(self._file.write, choice)
        self._user = choice
        for work in self.works():
            self.refresh(work)
        return self.user()

    def of_kernel(self, kernel_id: str) -> AutoSaves:
        """What counts for a kernel; ``unknown_kernel``, ``not_savable``."""
        kernel = self._keeper.roster.savable(kernel_id)
        own = msgspec.convert(kernel.autosave or {}, AutoSaveChoice)
        return self.settings.described(self._works[kernel].policy, own)

    async def see_kernel(self, kernel_id: str) -> AutoSaves:
        """The same, with what its notebook says now; ``unknown_kernel``, ``not_savable``."""
        await self.notebooks.see([self._works[self._keeper.roster.savable(kernel_id)]])
        return self.of_kernel(kernel_id)

    async def choose_for(
        self, kernel_id: str, choice: AutoSaveChoice, *, merge: bool = False
    ) -> AutoSaves:
        """Set a kernel's own choice, or with ``merge`` what it says of it.

        Raises CkptError ``unknown_kernel``, ``not_savable``, ``bad_request``.
        """
        self.settings.check(choice)
        own = self.of_kernel(kernel_id).own
        kernel = self._keeper.roster.savable(kernel_id)
        kernel.autosave = msgspec.to_builtins(merged(own, choice) if merge else choice)
        self.refresh(self._works[kernel])
        await self._keeper.leases.renew(kernel)
        return self.of_kernel(kernel_id)

    # -- WorkObserver --------------------------------------------------------------------

    def worked(self, work: Work) -> None:
        """Have the alarm ring when the kernel is due."""
        self.notebooks.see_soon(work)
        due = None if self._stopped else work.due(self.settings.max_cost)
        if due is not None:
            self._alarms.set_by(work, due[0])

    def asked(self, work: Work, data: dict[str, Any]) -> None:
        """A kernel wants something of its server."""
        self.requests.handle(work, data)

    # -- saving --------------------------------------------------------------------------

    def _ring(self, work: Work) -> None:
        due = work.due(self.settings.max_cost)
        if due is None:
            return
        if due[0] > time.monotonic():
            self._alarms.set_by(work, due[0])
        else:
            self._keeper.in_background(self._save_if_due(work))

    async def _save_if_due(self, work: Work) -> None:
        await self.notebooks.see([work])
        async with self._turn:
            # What counted before the wait may not any more.
            due = work.due(self.settings.max_cost)
            if self._stopped or due is None or self.work_of(work.kernel.kernel_id) is not work:
                return
            if due[0] > time.monotonic():
                self._alarms.set_by(work, due[0])
            elif self._keeper.running(work.kernel.kernel_id) is not None:
                pass  # looked at again when the operation ends
            elif due[1] == "park":
                await self._park(work)
            else:
                await self.save(work, due[1], hibernate=due[1] == "hibernate")

    async def save(self, work: Work, reason: str, *, hibernate: bool = False) -> bool:
        """Save a kernel now and wait for the end; whether there is a state of it.

        Never raises: what went wrong was told. ``hibernate``: end its process then.
        """
        keeper, kernel_id = self._keeper, work.kernel.kernel_id
        if await keeper.ability.error() is not None:
            work.put_off()
            return False
        begin = keeper.hibernation.hibernate if hibernate else keeper.save
        try:
            operation = await self._unnoticed(work, partial(begin, kernel_id, reason=reason))
        except CkptError as error:
            if error.reason in _HERE_NEVER:
                work.put_off()
            elif error.reason != "busy":
                work.failed(self.settings.retry)
                self._tell(work, None, reason, error.message)
            self.worked(work)
            return False
        return operation.status == "done"

    async def _unnoticed(self, work: Work, begin: Callable[[], Awaitable[Operation]]) -> Operation:
        """Have an operation done that is no activity of the user's, nor are its callbacks."""
        keeper = self._keeper
        before, touched = _activity(keeper.kernel_manager, work), work.touched_at
        operation = await begin()
        run = keeper.running(work.kernel.kernel_id)
        assert run is not None
        await run.ended()
        if work.touched_at == touched:
            _restore_activity(keeper.kernel_manager, work, before)
        return operation

    async def _park(self, work: Work) -> None:
        """Free the GPUs of an idle kernel, once all that it did is in a state."""
        keeper, kernel = self._keeper, work.kernel
        pid, touched = kernel.pid, work.touched_at
        if pid is None or not await in_thread(uses_driver, pid):
            work.stay_on_gpu()
        elif work.unsaved_since is not None and not await self.save(work, "idle"):
            work.stay_on_gpu(self.settings.retry)
        elif work.touched_at == touched:  # else it was used meanwhile
            begin = partial(keeper.hibernation.parking.park, kernel.kernel_id, "idle")
            try:
                await self._unnoticed(work, begin)
            except CkptError as error:
                keeper.log.debug("Kernel %s is not parked: %s", kernel.kernel_id, error.message)
                self._not_parked(work, error.reason)
        self.worked(work)

    def _not_parked(self, work: Work, reason: str) -> None:
        if reason in _HERE_NEVER:
            work.stay_on_gpu()
        else:
            work.stay_on_gpu(max(self.settings.retry, work.policy.park))

    def _tell(self, work: Work, path: str | None, reason: str, message: str) -> None:
        if work.failures == 1 or reason in ("shutdown", "preemption", "cull"):
            self._keeper.announce.autosave_failed(work.kernel.kernel_id, path, reason, message)


def _is_in_use(operation: Operation) -> bool:
    """Whether a kernel was not saved because somebody uses it."""
    return operation.error is not None and operation.error.reason == "busy"


def _activity(kernel_manager: Any, work: Work) -> tuple[Any, Any]:
    """When the server thinks that somebody last used the kernel, and any kernel."""
    return (
        getattr(work.kernel.km, "last_activity", None),
        getattr(kernel_manager, "last_kernel_activity", None),
    )


def _restore_activity(kernel_manager: Any, work: Work, before: tuple[Any, Any]) -> None:
    now = _activity(kernel_manager, work)
    if before[0] is not None and now[0] != before[0]:
        if now[1] == now[0]:  # no other kernel was used since
            kernel_manager.last_kernel_activity = before[1]
        work.kernel.km.last_activity = before[0]
