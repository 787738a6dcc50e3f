"""Hibernation: a kernel is saved and its process ended; it wakes when somebody needs it.

The kernel keeps its id, its session and its pages' connections. For its provisioner it is on its
way back all the time, so that nobody sees it dead; what pages send meanwhile is kept
(:mod:`.doorman`) and delivered in order once the restored process is connected.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from .capture.supervisor import KILL_GRACE
from .describe import asleep
from .doorman import HeldMessage, Kept, each, execute_ids, guard, too_much
from .errors import CkptError
from .idleness import answer, check_idle, holds_all, used
from .launching import not_ended
from .models import Operation, OperationResult
from .observer import RestoreToken
from .operations import Run, in_thread
from .parking import Parking
from .replacing import Replacements
from .restoring import Restore
from .saving import Save
from .tracking import TrackedKernel
from .unheard import Unheard

if TYPE_CHECKING:
    from .keeper import Keeper

#: Seconds that its process has to be gone.
_END: Final = KILL_GRACE + 10.0


class _Sleeper:
    """A hibernated kernel: its state, and what was sent to it since."""

    def __init__(self, kernel: TrackedKernel, state_id: str, token: RestoreToken) -> None:
        self.kernel = kernel
        self.state_id = state_id
        self.token = token
        self.held = Kept()
        self.is_waking = False
        #: The cells that the last try to wake it has answered with an error.
        self.refused: list[str] = []


class Hibernation:
    """Puts kernels to sleep and wakes them; part of the keeper.

    Implements :class:`~jupyter_gpu_ckpt.doorman.Doorman`.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._sleepers: dict[str, _Sleeper] = {}
        #: What is sent to kernels whose place a restored one takes.
        self.replacements = Replacements(keeper)
        #: What is sent to kernels that the server does not hear yet.
        self.unheard = Unheard(self, keeper.log)
        self.parking = Parking(keeper)
        #: How many messages went to each kernel: one that came during a save ends a hibernation.
        self._passed: Counter[str] = Counter()
        #: Whether what is sent to a kernel passes through this server, and so can wake it.
        self.can_wake = False

    def guard(self, settings: dict[str, Any]) -> None:
        """Watch what pages send to kernels; the extension calls it while it is loaded."""
        self.can_wake = guard(settings, self)

    def is_asleep(self, kernel_id: str) -> bool:
        """Whether the kernel is hibernated; also while it is being woken."""
        return kernel_id in self._sleepers

    def check_awake(self, kernel_id: str) -> None:
        """Raise CkptError ``not_savable`` for a hibernated kernel."""
        if self.is_asleep(kernel_id):
            raise asleep()

    def check_unneeded(self, state_id: str) -> None:
        """Raise CkptError ``busy`` for a state that a hibernated kernel is all in."""
        if any(sleeper.state_id == state_id for sleeper in self._sleepers.values()):
            raise CkptError(
                "busy",
                "A hibernated kernel wakes from this state.",
                hint="Wake it or shut it down first.",
            )

    # -- falling asleep ------------------------------------------------------------------

    async def hibernate(self, kernel_id: str, reason: str = "hibernate") -> Operation:
        """Start to save a kernel and end its process; ``reason``: that of the state.

        Raises CkptError ``unknown_kernel``, ``busy``, ``not_savable``, ``cannot_capture``.
        """
        keeper = self._keeper
        kernel = keeper.roster.savable(kernel_id)
        self.check_awake(kernel_id)
        if not self.can_wake:
            raise CkptError(
                "not_savable",
                "Kernels of this server cannot hibernate: their messages do not pass through it.",
                hint="Save the kernel and shut it down instead.",
            )
        check_idle(kernel)
        await keeper.ability.probe()
        path = (await keeper.sessions.paths()).get(kernel_id)

        async def work(run: Run) -> OperationResult:
            return await self._put_to_sleep(run, kernel, reason)

        return keeper.begin("save", kernel_id, work, path=path, cause=reason).model

    async def _put_to_sleep(self, run: Run, kernel: TrackedKernel, reason: str) -> OperationResult:
        keeper, kernel_id, began = self._keeper, kernel.kernel_id, time.monotonic()
        passed = self._passed[kernel_id]
        supervisor = kernel.provisioner.supervisor
        # What was sent before is done when this is answered, and so is in the state.
        await answer(kernel)
        run.phase("checking")
        newest = await self._newest(kernel)
        result = newest or await Save(keeper, kernel, None, reason).run(run)
        await self._verify(run, result.state_id)
        record = await in_thread(keeper.store.state, result.state_id)
        if supervisor is None or kernel.provisioner.supervisor is not supervisor:
            raise CkptError("cancelled", "The kernel was restarted or shut down meanwhile.")
        if run.cancel_flag.is_set():
            raise CkptError("cancelled", "The operation was cancelled. The kernel runs on.")
        check_idle(kernel)
        if self._passed[kernel_id] != passed or not holds_all(record, kernel):
            raise used()
        # Where a state is made now, what is unsaved counts from before it.
        if newest is not None and self._has_unsaved(kernel):
            raise used()
        # From here to the sleeper nothing else happens: what is sent from now on is kept.
        run.cancellable = False
        token = kernel.provisioner.begin_restore()
        self._sleepers[kernel_id] = sleeper = _Sleeper(kernel, result.state_id, token)
        supervisor.kill()
        try:
            await in_thread(supervisor.wait, _END)
        except TimeoutError as error:
            failure = not_ended("internal", error)
            self._failed(sleeper, failure)
            self._forget(sleeper)
            kernel.provisioner.end_restore(token)
            raise failure from error
        keeper.ability.faults.gone(kernel_id)
        # A restart meanwhile has made another process of it.
        kernel.is_hibernated = self._sleepers.get(kernel_id) is sleeper
        await keeper.leases.renew(kernel)
        return OperationResult(
            state_id=result.state_id,
            kernel_id=kernel_id,
            seconds=time.monotonic() - began,
            size=result.size,
            frozen_seconds=result.frozen_seconds,
            warnings=result.warnings,
        )

    async def _newest(self, kernel: TrackedKernel) -> OperationResult | None:
        """The kernel's newest state, if all that it did since is in it."""
        latest = kernel.policy.latest
        if latest is None or self._has_unsaved(kernel):
            return None
        try:
            record = await in_thread(self._keeper.store.state, latest)
        except CkptError:
            return None  # a new one then
        if record.damage is not None:
            return None
        return OperationResult(record.id, kernel.kernel_id, 0.0, record.size)

    def _has_unsaved(self, kernel: TrackedKernel) -> bool:
        work = self._keeper.policies.work_of(kernel.kernel_id)
        return work is None or work.unsaved_since is not None

    async def _verify(self, run: Run, state_id: str) -> None:
        """Read all of a state once, before the process is ended that it is to stand for.

        What is lost is noted with it: the next try makes a new one.
        """
        run.model.state_id = state_id
        store = self._keeper.store
        try:
            result = await in_thread(store.verify, state_id, None, run.cancel_flag)
        except CkptError as error:
            if error.reason != "state_damaged":
                raise
            damage = error.message
        else:
            if not result.lost:
                return
            lost = sum(found.length for found in result.lost)
            damage = f"{lost / 1e6:,.1f} MB of it cannot be read back."
        with contextlib.suppress(CkptError):  # a store that cannot be written
            await in_thread(lambda: store.mark(state_id, damage=damage))
        raise CkptError(
            "state_damaged",
            "The kernel runs on: its saved state cannot be read back whole.",
            hint="Check the disk that holds the states, then try again.",
            details=damage,
        )

    # -- waking --------------------------------------------------------------------------

    async def wake(self, kernel_id: str) -> Operation:
        """Start to wake a kernel, or say what wakes it; ``unknown_kernel``, ``bad_request``."""
        self._keeper.roster.check_known(kernel_id)
        sleeper = self._sleepers.get(kernel_id)
        if sleeper is None:
            raise CkptError("bad_request", "The kernel is not hibernated.")
        running = self._keeper.running(kernel_id)
        if sleeper.is_waking and running is not None:
            return running.model
        return (await self._begin(sleeper)).model

    async def _begin(self, sleeper: _Sleeper) -> Run:
        keeper, kernel = self._keeper, sleeper.kernel
        record = await in_thread(keeper.store.state, sleeper.state_id)
        path = (await keeper.sessions.paths()).get(kernel.kernel_id)
        running = keeper.running(kernel.kernel_id)
        if running is not None and running.model.cause == "wake":
            return running

        async def work(run: Run) -> OperationResult:
            return await self.restore(run, kernel, Restore(keeper, record, "wake"))

        return keeper.begin(
            "restore", kernel.kernel_id, work, path=path, state_id=record.id, cause="wake"
        )

    async def restore(self, run: Run, kernel: TrackedKernel, restore: Restore) -> OperationResult:
        """Put a state in a kernel's place, asleep or not: a hibernated one is awake then."""
        sleeper = self._sleepers.get(kernel.kernel_id)
        if sleeper is None:
            return await restore.in_place(run, kernel)
        async with self._waking(sleeper):
            return await restore.in_place(run, kernel, sleeper.token)

    @contextlib.asynccontextmanager
    async def _waking(self, sleeper: _Sleeper) -> AsyncIterator[None]:
        """What was kept is delivered, or refused where the kernel does not come back."""
        km = sleeper.kernel.km
        before = km.execution_state
        try:
            km.execution_state = "starting"
            sleeper.is_waking = True
            pages = {id(m.connection): m for m in sleeper.held}.values()
            each(pages, HeldMessage.tell_starting, self._keeper.log)
            yield
        except BaseException as error:
            sleeper.is_waking = False
            km.execution_state = before
            if self._sleepers.get(sleeper.kernel.kernel_id) is sleeper:
                self._failed(sleeper, error)
            raise
        self._forget(sleeper)
        km.last_activity = datetime.now(timezone.utc)  # the culler is not to end it at once
        self._passed[sleeper.kernel.kernel_id] += len(sleeper.held)
        each(sleeper.held, HeldMessage.deliver, self._keeper.log)

    def _failed(self, sleeper: _Sleeper, error: BaseException) -> None:
        why = error.message if isinstance(error, CkptError) else "The server is stopping."
        told = CkptError(
            "restore_failed",
            f"The hibernated kernel did not wake: {why}",
            hint="Its saved state is kept: run the cell again to try once more.",
        )
        held = sleeper.held.take()
        sleeper.refused = execute_ids(held)
        each(held, lambda message: message.refuse(told), self._keeper.log)

    async def _wake(self, sleeper: _Sleeper) -> None:
        """Wake a kernel that somebody needs."""
        keeper, kernel_id = self._keeper, sleeper.kernel.kernel_id
        try:
            before = keeper.running(kernel_id)
            if before is not None:
                await before.ended()  # it falls asleep just now, or is rolled back
            if self._sleepers.get(kernel_id) is not sleeper:
                return
            run = await self._begin(sleeper)
            body = (await run.ended()).error
            if body is not None and self._sleepers.get(kernel_id) is sleeper:
                error = CkptError(body.reason, body.message, hint=body.hint, details=body.details)
                self._tell(sleeper, run.model.path, error)
        except CkptError as error:
            keeper.log.warning("Kernel %s does not wake: %s", kernel_id, error.message)
            if self._sleepers.get(kernel_id) is sleeper:
                self._failed(sleeper, error)
                self._tell(sleeper, None, error)
        finally:
            sleeper.is_waking = False

    def _tell(self, sleeper: _Sleeper, path: str | None, error: CkptError) -> None:
        """Say why a kernel did not wake for its page: perhaps no cell waits for an answer."""
        if error.reason == "cancelled":
            return  # by its user, or for a restart
        kept = "Its saved state is kept: run a cell to try again, or restore an older one."
        sleeper.kernel.wake_error = CkptError(
            "restore_failed",
            f"The hibernated kernel did not wake: {error.message}",
            hint=f"{error.hint} {kept}" if error.hint else kept,
            details=error.details,
        )
        self._keeper.announce.wake_failed(
            sleeper.kernel.kernel_id, sleeper.state_id, path, error.message, sleeper.refused
        )

    def kept(self, kernel_id: str) -> list[Kept]:
        """What waits until a kernel is back."""
        sleeper = self._sleepers.get(kernel_id)
        asleep = [sleeper.held] if sleeper is not None else []
        return asleep + self.replacements.kept(kernel_id)

    def _need(self, sleeper: _Sleeper) -> None:
        if not sleeper.is_waking:
            sleeper.is_waking = True
            self._keeper.in_background(self._wake(sleeper))

    # -- Doorman -------------------------------------------------------------------------

    def opened(self, kernel_id: str) -> None:
        """A page connects: its user is about to work."""
        self.replacements.opened(kernel_id)
        sleeper = self._sleepers.get(kernel_id)
        if sleeper is not None:
            self._need(sleeper)

    def holds(self, kernel_id: str, message: HeldMessage) -> bool:
        """Keep what is sent to a hibernated kernel, and wake it where that needs it."""
        sleeper = self._sleepers.get(kernel_id)
        if sleeper is None:
            self._passed[kernel_id] += 1
            keepers = (self.replacements, self.unheard, self.parking)
            return any(one.holds(kernel_id, message) for one in keepers)
        if not sleeper.held.add(message):
            message.refuse(too_much("wake"))
            return True
        if message.needs_kernel():
            if sleeper.is_waking:
                message.tell_starting()
            self._need(sleeper)
        return True

    # -- ends ----------------------------------------------------------------------------

    def _forget(self, sleeper: _Sleeper) -> None:
        self._sleepers.pop(sleeper.kernel.kernel_id, None)
        sleeper.kernel.is_hibernated = False
        sleeper.kernel.wake_error = None

    def stopping(self, kernel_id: str) -> None:
        """Somebody restarts the kernel or shuts it down: what waits for it is void."""
        self._passed.pop(kernel_id, None)
        self.replacements.stopping(kernel_id)
        held = self.unheard.ended(kernel_id) + self.parking.ended(kernel_id)
        sleeper = self._sleepers.get(kernel_id)
        if sleeper is not None:
            self._forget(sleeper)
            held += sleeper.held
        gone = CkptError("cancelled", "The kernel was restarted or shut down meanwhile.")
        each(held, lambda message: message.refuse(gone), self._keeper.log)

    def interrupted(self, kernel_id: str) -> None:
        """Somebody interrupts the kernel: cells that wait for it do so in vain."""
        held = self.replacements.taken(kernel_id) + self.unheard.taken(kernel_id)
        held += self.parking.taken(kernel_id)
        sleeper = self._sleepers.get(kernel_id)
        if sleeper is not None:
            held += sleeper.held.take(only_cells=True)
        told = CkptError("cancelled", "Interrupted before the kernel was back.")
        each(held, lambda message: message.refuse(told, "KeyboardInterrupt"), self._keeper.log)

    def before_shutdown(self) -> None:
        """The server ends: its hibernated kernels are offered by the next one."""
        for kernel_id in self._sleepers:
            self._keeper.leases.offer_after_end(kernel_id, "shutdown")
