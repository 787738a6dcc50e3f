"""A restore: store -> image directory -> process tree -> the server's kernel again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from .adoption import reconnect, take_in
from .capture import files, images
from .capture.node import node_info
from .capture.supervisor import KILL_GRACE, Supervisor
from .connection import can_reach, own_address
from .describe import gpu_use, outside
from .doorman import execute_ids, left_out
from .errors import CkptError
from .feeding import Feed, came_back, feed
from .history import learn_kernel_info
from .launching import not_ended
from .models import OperationResult, RestoredFrom
from .observer import RestoreToken
from .operations import Run, in_thread
from .store import StateRecord, make_private_dir
from .tracking import TrackedKernel, WaitingProcess
from .watch import Activity

if TYPE_CHECKING:
    from .keeper import Keeper

Cause = Literal["death", "user", "lost", "wake"]

#: Seconds beyond its wait for connections after which a held kernel goes on by itself, should
#: this server not come to release it.
_HOLD_MARGIN: Final = 20.0

#: Seconds that the old process tree has to be gone once it was killed.
_KILL_TIMEOUT: Final = KILL_GRACE + 10.0

#: So many connections that a restore has closed are named to the user.
_NAMED: Final = 8


class Restore:
    """One restore of one state. Whatever fails, the state stays as it is.

    Parameters
    ----------
    keeper
        Settings, store and the rest.
    record
        The state.
    cause
        Why.
    notes
        What the user is to be told with the kernel when it is back.
    gpu_map
        Which GPU is to stand for one of the save, by UUID; the others are found.
    """

    def __init__(
        self,
        keeper: Keeper,
        record: StateRecord,
        cause: Cause,
        notes: Sequence[str] = (),
        gpu_map: Mapping[str, str] | None = None,
    ) -> None:
        self._keeper = keeper
        self._record = record
        self._meta = record.meta
        self._cause: Cause = cause
        self._connection = dict(self._meta.connection)
        #: Whether another kernel than the state's own comes out of it.
        self._is_copy = False
        self._warnings = list(notes)
        self._gpu_map = dict(gpu_map or {})
        self._began = time.monotonic()

    # -- the three ways ------------------------------------------------------------------

    async def in_place(
        self, run: Run, kernel: TrackedKernel, token: RestoreToken | None = None
    ) -> OperationResult:
        """Put the state in the place of a kernel of this server, dead or alive.

        Parameters
        ----------
        run
            The operation.
        kernel
            The kernel. It runs on until the state has been read and found restorable here.
        token
            The restore that :meth:`.GpuCkptProvisioner.begin_restore` began at its death; it is
            the caller's to end.
        """
        provisioner = kernel.provisioner
        self._place(kernel.kernel_id, kernel.km.ip)
        own: RestoreToken | None = None
        try:
            ending = kernel.pid
            async with self._images(run, ending) as state:
                if not can_reach(kernel.km, self._connection):
                    raise CkptError(
                        "not_restorable",
                        "The kernel's address has changed since the state was saved.",
                        hint="Shut the kernel down, then restore the state.",
                    )
                if ending is not None:
                    run.point_of_no_return()
                elif kernel.pid is not None:
                    raise _overtaken()
                if token is None:
                    token = own = provisioner.begin_restore()
                elif not provisioner.is_wanted(token):
                    # What runs by now is somebody's wish: it must not be ended for this.
                    raise _overtaken()
                await self._end_process(kernel)
                supervisor = await self._bring_up(run, state)
                if not provisioner.adopt(token, supervisor):
                    supervisor.kill()
                    raise _overtaken()
                self._listen_to_gpus(kernel)
        except BaseException:
            if own is not None:
                provisioner.end_restore(own)
            raise
        kernel.policy.restored(self._record.id)
        kernel.restored_from = self._origin(kernel.last_count())
        kernel.listen(self._activity())
        try:
            await self._connect(run, kernel)
        finally:
            supervisor.release()
        return self._result(run)

    async def revive(self, run: Run) -> OperationResult:
        """Bring in a kernel that this server does not have.

        Under its old id it is what it was; under another it is a copy, with an address and
        process numbers of its own, and may run beside its original.
        """
        keeper, kernel_id = self._keeper, run.model.kernel_id
        if kernel_id != self._meta.kernel_id:
            self._place(kernel_id, own_address(kernel_id))
        async with self._images(run, None) as state:
            supervisor = await self._bring_up(run, state)
        try:
            waiting = WaitingProcess(supervisor, self._connection, self._activity())
            kernel = await take_in(keeper, kernel_id, run.model.path, self._meta, waiting)
        except BaseException:
            keeper.tracker.withdraw(kernel_id)
            supervisor.kill()
            raise
        self._listen_to_gpus(kernel)
        kernel.policy.restored(self._record.id)
        kernel.restored_from = self._origin(None)
        try:
            # Before the process goes on, so that a page that asks for its session finds it.
            if run.model.path is not None:
                replaced = await keeper.sessions.attach(run.model.path, kernel_id)
                keeper.hibernation.replacements.replaced(kernel_id, replaced)
            if self._meta.execution_state == "busy":
                await learn_kernel_info(kernel.km, timeout=2.0)
            await self._connect(run, kernel)
        finally:
            supervisor.release()
        await keeper.leases.renew(kernel)
        return self._result(run)

    def _place(self, kernel_id: str, ip: str) -> None:
        """Say which kernel the state becomes, and where it listens."""
        self._is_copy = kernel_id != self._meta.kernel_id
        if self._is_copy:
            self._connection["ip"] = ip

    # -- steps ---------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _images(self, run: Run, ending_pid: int | None) -> AsyncIterator[Feed]:
        """The image directory, checked and ready; removed afterwards."""
        keeper, record = self._keeper, self._record
        run.phase("reading", 0.02)
        keeper.ability.native()
        async with (
            keeper.spool.folder(run.model.id) as spool,
            feed(run, keeper.store, record.id, spool, self._told, ending_pid is not None) as state,
        ):
            run.phase("checking")
            await self._check(state.image_dir, ending_pid)
            yield state

    async def _told(self, error: CkptError) -> CkptError:
        """What the store could not read, with what to do about it."""
        if error.reason != "state_damaged":
            return error
        return await self._keeper.saved.found_damaged(self._record, error)

    async def _check(self, image_dir: Path, ending_pid: int | None) -> None:
        found = await self._keeper.ability.differences(
            self._record, ending_pid, beside=self._is_copy, gpu_map=self._gpu_map
        )
        self._gpu_map = found.gpu_map
        blocking = [difference for difference in found.differences if difference.blocking]
        if blocking:
            raise CkptError(
                "not_restorable",
                "The state cannot be restored here. " + blocking[0].message,
                hint="The state is kept: restore it on a node like the one it was saved on.",
                details="\n".join(difference.message for difference in blocking),
            )

        def prepare() -> None:
            images.prepare_for_restore(
                image_dir, beside=self._connection["ip"] if self._is_copy else None
            )
            for path in images.open_files(image_dir):
                _make_log(Path(path), self._keeper.launching.log_folder())

        await in_thread(prepare)

    async def _end_process(self, kernel: TrackedKernel) -> None:
        """Kill what runs and wait until it was reaped: its process numbers are needed."""
        old = kernel.provisioner.supervisor
        if old is None:
            return
        old.kill()
        try:
            await in_thread(old.wait, _KILL_TIMEOUT)
        except TimeoutError as error:
            raise not_ended("restore_failed", error) from error

    async def _bring_up(self, run: Run, state: Feed) -> Supervisor:
        """Restore the tree; its main thread waits for :meth:`_connect`.

        It can be cancelled for as long as nothing is lost by it.
        """
        keeper, meta, image_dir = self._keeper, self._meta, state.image_dir
        run.phase("restoring")
        entries = msgspec.convert(meta.node_local, list[files.NodeLocalEntry])
        native = keeper.ability.native()
        limit = keeper.restore_timeout + 10
        if meta.gpu is not None:  # its memory is copied after the rest
            limit += keeper.restore_timeout + keeper.gpu_timeout
        try:
            self._warnings += await in_thread(files.put_back, image_dir, entries)
            async with state.served() as server:
                supervisor = await in_thread(
                    lambda: Supervisor.restore(
                        native.path,
                        image_dir,
                        pids=meta.pids,
                        cwd=meta.cwd if meta.cwd and os.path.isdir(meta.cwd) else None,
                        hold=True,
                        hold_timeout=keeper.hold_timeout + _HOLD_MARGIN,
                        timeout=keeper.restore_timeout,
                        pid_namespace="always" if self._is_copy else "auto",
                        stream=server is not None,
                        gpu_map=self._gpu_map,
                        gpu_timeout=keeper.gpu_timeout,
                        log=keeper.launching.log_folder() / f"{run.model.kernel_id}.log",
                    )
                )
                await came_back(run, supervisor, server, self._told, limit)
        finally:
            await in_thread(files.clean_up, image_dir, entries)
        self._check_clock(supervisor)
        self._name_closed()
        return supervisor

    def _check_clock(self, supervisor: Supervisor) -> None:
        """Warn where the monotonic clock may have jumped: it begins at zero with each boot."""
        restored = supervisor.restored
        same_boot = self._meta.node.get("boot_id") == node_info().boot_id
        if restored is not None and not restored.time_namespace and not same_boot:
            self._warnings.append(
                "The node's clock is not the old one's: a sleep or timer that was running may end "
                "early or late."
            )

    def _name_closed(self) -> None:
        """Tell of connections that are closed now: their programs may have to open them again."""
        found = outside(self._record)
        closed = found.closed() if found is not None else []
        if closed:
            more = f" and {len(closed) - _NAMED} more" if len(closed) > _NAMED else ""
            self._warnings.append(f"Did not come back: {', '.join(closed[:_NAMED])}{more}.")

    def _listen_to_gpus(self, kernel: TrackedKernel) -> None:
        """From now on, what GPUs report is about those of the process that was restored."""
        faults, use = self._keeper.ability.faults, gpu_use(self._record)
        self._warnings += faults.restored(kernel.kernel_id, use, self._gpu_map)

    async def _connect(self, run: Run, kernel: TrackedKernel) -> None:
        """Wait until the server's sockets are back, so that no output or reply is lost."""
        run.phase("connecting", 0.9)
        if not await reconnect(self._keeper, kernel, self._meta):
            self._warnings.append("Output right after the restore may be missing.")

    def _origin(self, last_count: int | None) -> RestoredFrom:
        meta = self._meta
        return RestoredFrom(
            state_id=self._record.id,
            created=self._record.created,
            restored=datetime.now(timezone.utc).isoformat().replace("+00:00", "Z"),
            cause=self._cause,
            execution_count=meta.execution_count,
            in_flight_msg_id=meta.in_flight_msg_id,
            last_execution_count=last_count,
            other_counts=meta.other_counts,
            warnings=self._warnings,  # the list itself: some are found later
        )

    def _activity(self) -> Activity:
        meta = self._meta
        return Activity(meta.execution_state, meta.execution_count, meta.in_flight_msg_id)

    def _result(self, run: Run) -> OperationResult:
        kernel_id = run.model.kernel_id
        kept = self._keeper.hibernation.kept(kernel_id)
        self._warnings += left_out(kept, kernel_id, self._keeper.log)
        message = "\n".join(self._warnings) or None
        self._keeper.announce.restored(
            self._record,
            kernel_id,
            run.model.path,
            self._cause,
            message,
            held=[msg_id for one in kept for msg_id in execute_ids(one)],
        )
        return OperationResult(
            state_id=self._record.id,
            kernel_id=kernel_id,
            seconds=time.monotonic() - self._began,
            size=self._record.size,
            warnings=self._warnings,
        )


def _overtaken() -> CkptError:
    return CkptError(
        "cancelled",
        "The kernel was restarted or shut down meanwhile.",
        hint="The saved state is kept: restore it again if it is still wanted.",
    )


def _make_log(path: Path, folder: Path) -> None:
    """A kernel's log is open in its images; a home folder may not have it (any more)."""
    if path.parent == folder and path.suffix == ".log":
        with contextlib.suppress(OSError):
            make_private_dir(folder)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600))
