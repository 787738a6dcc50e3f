"""The keeper: saves, restores and lists the kernels of one server.

It joins the parts: provisioners tell it of kernels (:mod:`.tracking`), a save or a restore
(:mod:`.saving`, :mod:`.restoring`) runs as an operation (:mod:`.operations`) between the
process tree (:mod:`.capture`) and the store (:mod:`.store`), and leases (:mod:`.recovery`)
let the next server find what was lost.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

from . import describe, models
from .ability import Ability
from .announce import Announcer
from .deaths import DeathPolicy
from .errors import CkptError
from .hibernation import Hibernation
from .lost import LostKernels
from .lost_gpus import LostGpus
from .observer import keep_from_kernels, make_default, observe
from .operations import Emit, Operations, Run, in_thread
from .policies import Policies
from .provisioner import GpuCkptProvisioner
from .recovery import Leases
from .restarter import DeathRestorer
from .restoring import Restore
from .roster import Roster
from .saved import SavedStates
from .saving import Save
from .sessions import Sessions
from .settings import GpuCkpt
from .space import existing
from .spool import Spool
from .store import StateRecord
from .tidying import Tidying
from .tracking import TrackedKernel, Tracker
from .troubles import Troubles


class Keeper(GpuCkpt):
    """Saves kernels into the store and brings them back.

    Created by the server extension; REST handlers call its methods on the server's event
    loop. Every method raises :class:`~jupyter_gpu_ckpt.errors.CkptError` only.

    Parameters
    ----------
    parent
        The extension app; the configuration section is ``c.GpuCkpt``.
    kernel_manager, session_manager
        The server's own.
    emit
        Called with a schema id and the data of an event; ``None`` emits nothing.
    """

    def __init__(
        self,
        *,
        parent: Any,
        kernel_manager: Any,
        session_manager: Any,
        emit: Emit | None = None,
    ) -> None:
        super().__init__(parent=parent)
        self.kernel_manager = kernel_manager
        self.store = self.open_store(lambda state_id: self.saved.uploaded(state_id))
        self.troubles = Troubles(self.log)
        self.spool = Spool(self.spool_folder())
        self.launching = GpuCkptProvisioner(config=self.config)
        self.lost_gpus = LostGpus(self)
        self.ability = Ability(
            lambda: self.launching.kernel_capture, self.log, self.lost_gpus.heard
        )
        self.announce = Announcer(emit, self.log)
        self.policies = Policies(self, self.data_folder())
        self._operations = Operations(
            self.announce, self.log, on_ended=self.policies.operation_ended
        )
        self._deaths = DeathRestorer(self)
        self.hibernation = Hibernation(self)
        self.tracker = Tracker(
            lambda: DeathPolicy(self.death_window, self.death_limit),
            self.policies.listener,
            on_started=self._on_started,
            on_died=self._on_died,
            on_stopping=self._on_stopping,
            on_ended=self._on_ended,
            on_interrupted=self.hibernation.interrupted,
        )
        self.roster = Roster(kernel_manager, self.tracker, self.store, self.ability)
        self.sessions = Sessions(kernel_manager, session_manager, self.roster.is_pristine, self.log)
        self.leases = Leases(
            self.store,
            self.tracker,
            self.sessions.paths,
            ttl=self.lease_ttl,
            interval=self.lease_interval,
            on_fenced=lambda kernel, hostname: self.lost.fence(kernel, hostname),
            server=self.server_name(),
            troubles=self.troubles,
        )
        self.lost = LostKernels(self)
        self.saved = SavedStates(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = threading.Event()
        self.tidying = Tidying(self, self._stopping)
        observe(kernel_manager, self.tracker)
        keep_from_kernels(kernel_manager, self.key_variables())
        make_default(kernel_manager)

    # -- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin: look for lost kernels, renew leases. Called once when the server is up."""
        await self.policies.start()
        self.saved.start()
        self.lost_gpus.start()
        self.store.start()
        self.in_background(self.tidying.begin())
        self.in_background(self.lost.heartbeat())

    async def stop(self) -> None:
        """Orderly end: last saves, then no more. Called before the kernels are shut down."""
        await self.policies.stop()
        self.hibernation.before_shutdown()
        self._stopping.set()
        await self._operations.stop(timeout=15.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.leases.end_all()
        left = await in_thread(self.store.stop, self.upload_timeout)
        if left:
            self.log.warning(
                "Not uploaded, and on this node only, where the next server goes on with it: %s",
                ", ".join(left),
            )
        self.ability.faults.close()
        self.tracker.close()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside what clients ask for, until it ends or the server stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, CkptError):
            self.troubles.tell("Not all was done in the background", error, again=False)
        else:
            self.log.error("Background work of the keeper failed", exc_info=error)

    # -- kernels -------------------------------------------------------------------------

    async def kernels(self) -> list[models.Kernel]:
        """Every kernel of the server, and whether it can be saved."""
        return await self.roster.all(await self.sessions.paths(), self.running)

    async def kernel(self, kernel_id: str) -> models.Kernel:
        """One kernel; ``unknown_kernel``."""
        self.roster.check_known(kernel_id)
        return await self.roster.one(kernel_id, await self.sessions.paths(), self.running)

    # -- operations ----------------------------------------------------------------------

    def running(self, kernel_id: str) -> Run | None:
        """The operation that runs on this kernel now, if any."""
        return self._operations.running(kernel_id)

    def verifying(self, state_id: str) -> Run | None:
        """The check of this state that runs now, if any."""
        return self._operations.verifying(state_id)

    def begin(
        self,
        kind: models.OperationKind,
        kernel_id: str,
        work: Callable[[Run], Awaitable[models.OperationResult]],
        *,
        path: str | None,
        state_id: str | None = None,
        cause: str = "user",
    ) -> Run:
        """Start an operation; ``busy``."""
        run = self._operations.start(
            kind, kernel_id, work, path=path, state_id=state_id, cause=cause
        )
        return self.hibernation.replacements.during(run) if kind == "restore" else run

    def check_free(self, kernel_id: str) -> None:
        """Raise CkptError ``busy`` when an operation runs on this kernel."""
        self._operations.check_free(kernel_id)

    async def save(
        self, kernel_id: str, *, label: str | None = None, reason: str = "user"
    ) -> models.Operation:
        """Start saving; ``unknown_kernel``, ``busy``, ``not_savable``, ``cannot_capture``."""
        self.hibernation.check_awake(kernel_id)
        self.roster.savable(kernel_id)
        await self.ability.probe()
        path = (await self.sessions.paths()).get(kernel_id)
        kernel = self.roster.savable(kernel_id)
        if kernel.watch is not None:
            kernel.watch.catch_up()  # what was said until now is no work after the save
        save = Save(self, kernel, label, reason)
        return self.begin("save", kernel_id, save.run, path=path, cause=reason).model

    async def restore(
        self,
        state_id: str,
        *,
        mode: models.RestoreMode = "rollback",
        path: str | None = None,
        take_over: bool = False,
        gpu_map: Mapping[str, str] | None = None,
    ) -> models.Operation:
        """Start restoring; ``unknown_state``, ``busy``, ``not_restorable``, ``cannot_capture``.

        ``rollback`` puts the state in the place of its kernel, or brings the kernel back if it
        runs nowhere (``take_over``: or in another server, which then ends it); ``new`` makes
        another kernel of it, with a session for ``path`` if given. ``gpu_map``: which GPU (UUID) is
        to stand for one of the save.
        """
        record = await in_thread(self.store.state, state_id)
        await self.ability.probe()
        if mode == "new":
            return self.revive(record, str(uuid.uuid4()), path, "user", gpu_map=gpu_map).model
        kernel_id = record.meta.kernel_id
        if kernel_id not in self.kernel_manager:
            elsewhere = await in_thread(self.leases.elsewhere, kernel_id)
            if elsewhere is not None and not take_over:
                raise elsewhere
            path = path or await in_thread(self.leases.last_path, kernel_id) or record.meta.path
            wait = elsewhere is not None
            run = self.revive(record, kernel_id, path, "user", wait=wait, gpu_map=gpu_map)
            return run.model
        path = (await self.sessions.paths()).get(kernel_id)
        return self.roll_back(record, self.roster.savable(kernel_id), path, gpu_map).model

    def roll_back(
        self,
        record: StateRecord,
        kernel: TrackedKernel,
        path: str | None,
        gpu_map: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> Run:
        """Start putting a state in the place of a kernel of this server; ``busy``."""
        restore = Restore(self, record, "user", notes, gpu_map)

        async def work(run: Run) -> models.OperationResult:
            try:
                return await self.hibernation.restore(run, kernel, restore)
            except CkptError as error:
                if error.reason != "cancelled" and not run.cancellable and not kernel.is_hibernated:
                    # The old process had been ended for it.
                    self.announce.restore_failed(
                        kernel.kernel_id, record.id, path, "user", error.message
                    )
                raise

        return self.begin("restore", kernel.kernel_id, work, path=path, state_id=record.id)

    def revive(
        self,
        record: StateRecord,
        kernel_id: str,
        path: str | None,
        cause: Literal["user", "lost"],
        *,
        wait: bool = False,
        notes: Sequence[str] = (),
        gpu_map: Mapping[str, str] | None = None,
    ) -> Run:
        """Start bringing in a kernel that this server does not have; ``busy``.

        ``wait``: give the server that runs it the time to see that it is taken over. ``notes`` are
        told with the result.
        """

        async def work(run: Run) -> models.OperationResult:
            async with self.leases.claimed(kernel_id, run, take_over=wait):
                run.check_cancelled()
                return await Restore(self, record, cause, notes, gpu_map).revive(run)

        return self.begin("restore", kernel_id, work, path=path, state_id=record.id, cause=cause)

    def operations(self) -> list[models.Operation]:
        """Operations of this server, newest first (the last 100 ended ones)."""
        return self._operations.all()

    def operation(self, operation_id: str) -> models.Operation:
        """One operation; ``unknown_operation``."""
        return self._operations.get(operation_id).model

    async def cancel(self, operation_id: str) -> models.Operation:
        """Cancel a running operation; ``unknown_operation``, ``busy`` when it is too late."""
        return self._operations.cancel(operation_id)

    # -- states --------------------------------------------------------------------------

    async def delete_state(self, state_id: str) -> None:
        """Remove a state for good; ``unknown_state``, ``busy`` while it is being restored."""
        record: StateRecord | None = None
        try:
            record = await in_thread(self.store.state, state_id)
        except CkptError as error:
            # What nobody can restore (damaged, of a newer format) can still be got rid of.
            if error.reason not in ("state_damaged", "not_restorable"):
                raise
        for operation in self.operations():
            if operation.status == "running" and operation.state_id == state_id:
                raise CkptError("busy", "This state is being read.", hint="Try again later.")
        self.hibernation.check_unneeded(state_id)
        await in_thread(self.store.delete, state_id)
        if record is None:
            return
        kernel = self.tracker.get(record.meta.kernel_id)
        if kernel is not None:
            kernel.policy.forget(state_id)
        if record.meta.kernel_id not in self.kernel_manager:
            await self.tidying.forget_kernel(record.meta.kernel_id)
        self.announce.state_deleted(record)

    async def gc(self, dry_run: bool = False) -> dict[str, Any]:
        """Remove what no state uses: ``{"packs", "bytes", "dry_run"}``."""
        removed = await in_thread(lambda: self.store.gc(dry_run=dry_run))
        return {"packs": removed.packs, "bytes": removed.bytes, "dry_run": dry_run}

    async def doctor(self) -> models.Doctor:
        """What this node can capture, and what stands in the way."""
        return await self.ability.doctor(self._check_store)

    def _check_store(self) -> list[models.DoctorCheck]:
        """Raise what would keep a save from being written; in a worker thread.

        Returns a warning for each state and each kernel's record that is damaged.
        """
        self.store.usage()
        folder = existing(self.store_folder())
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CkptError(
                "store_unavailable",
                f"The folder for saved states cannot be written: {folder}.",
                hint="Check its permissions, or set GpuCkpt.store_url.",
            )
        damaged = [describe.damaged_state(bad) for bad in self.store.damaged()]
        damaged += [describe.damaged_record(bad) for bad in self.store.unreadable_kernels()]
        return [describe.store_warning(warning) for warning in self.store.warnings()] + damaged

    # -- what provisioners report --------------------------------------------------------

    def _on_started(self, kernel: TrackedKernel) -> None:
        self.policies.kernel_started(kernel)
        self.ability.faults.gone(kernel.kernel_id)  # what the process before had on GPUs
        self.hibernation.unheard.started(kernel)

        async def register() -> None:
            await self.leases.renew(kernel)
            self.policies.refresh_kernel(kernel)
            await asyncio.sleep(1.0)  # a session for the notebook follows its kernel at once
            await self.leases.renew(kernel)

        self.in_background(register())

    def _on_died(self, kernel: TrackedKernel) -> bool:
        may = self.restore_on_death and not self._stopping.is_set()
        is_restored = may and self._deaths.kernel_died(kernel)
        if not is_restored:
            self.ability.faults.gone(kernel.kernel_id)
        return is_restored

    def _on_stopping(self, kernel_id: str) -> None:
        self.hibernation.stopping(kernel_id)
        run = self.running(kernel_id)
        if run is not None:
            run.cancel()

    def _on_ended(self, kernel_id: str) -> None:
        self.policies.kernel_ended(kernel_id)
        self.ability.faults.gone(kernel_id)

        async def end() -> None:
            await self.leases.end(kernel_id)
            await self.tidying.forget_kernel(kernel_id)

        self.in_background(end())
