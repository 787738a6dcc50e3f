"""A save: the kernel's process tree -> image directory -> store."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import psutil
from jupyter_client.connect import port_names

from .capture import files, images, outside, transactions
from .capture.contents import Survey
from .capture.estimate import state_size
from .capture.explain import links_collided
from .capture.gpu_use import memory_on_gpus
from .capture.native import KernelCapture
from .capture.pagemap import PageFile, page_files
from .capture.preflight import check_save
from .capture.protocol import DumpResult, Probe
from .connection import saved_connection, spec_of
from .errors import CkptError
from .history import is_history
from .models import OperationResult
from .node_turns import turn
from .operations import Run, in_thread
from .outside import Outside
from .space import check_space
from .store import Layout, StateMeta, StateRecord, StateWriter
from .tracking import TrackedKernel

if TYPE_CHECKING:
    from .keeper import Keeper

#: Seconds to wait for the end of database transactions. When the freeze fell into one
#: nevertheless it is dumped again: so often at least, and for so many seconds. (A small kernel
#: that is in a transaction half of the time would fail one save in sixteen after four.)
_TRANSACTION: Final = 2.0
_DUMPS: Final = 4
_DUMPING: Final = 10.0
#: Seconds for which a save is repeated while links of another one are in its way.
_LINKS: Final = 15.0


#: Most cells of an earlier kernel that a state names.
_COUNTS: Final = 5000


class _Found(NamedTuple):
    """What the images say."""

    mapped: list[images.MappedFile]
    pids: list[int]
    pages: dict[str, PageFile]
    survey: Survey
    outside: Outside

    def layout(self, path: bytes) -> Layout | None:
        """The addresses of a file of pages, by which the store compares it with the last save."""
        found = self.pages.get(os.fsdecode(path))
        return None if found is None else Layout(found.space, found.segments)


class Save:
    """One save of one kernel. Whatever fails, the kernel runs on and no half state stays.

    Parameters
    ----------
    keeper
        Settings, store and the rest.
    kernel
        The kernel, which runs.
    label
        The user's words for the state.
    reason
        Who wanted it: ``user``, ``idle``, ...
    """

    def __init__(
        self, keeper: Keeper, kernel: TrackedKernel, label: str | None, reason: str
    ) -> None:
        self._keeper = keeper
        self._kernel = kernel
        self._label = label
        self._reason = reason
        self._supervisor = kernel.provisioner.supervisor
        self._warnings: list[str] = []
        #: Counts of the notebook's cells before the save.
        self._counts: dict[str, int] = {}

    async def run(self, run: Run) -> OperationResult:
        """Do it; called by :class:`~jupyter_gpu_ckpt.operations.Operations`."""
        run.phase("checking")
        keeper = self._keeper
        async with turn(
            Path(keeper.node_turns_dir),
            keeper.saves_per_node,
            wait=keeper.node_turn_timeout,
            still_wanted=run.check_cancelled,
        ) as had:
            if not had:
                keeper.log.warning("No turn of GpuCkpt.saves_per_node was free: saved without one")
            return await self._run(run)

    async def _run(self, run: Run) -> OperationResult:
        began = time.monotonic()
        native = self._keeper.ability.native()
        probe = await self._keeper.ability.probe()
        pid = self._pid()
        process = await in_thread(_look_at, pid)
        self._warnings += await self._keeper.policies.before_save(self._kernel)
        # Before the freeze: none of these cells can have run after it.
        self._counts = await self._keeper.sessions.counts(run.model.path)
        async with self._keeper.spool.folder(run.model.id) as spool:
            image_dir = spool / "images"
            await in_thread(check_save, pid, probe)
            devices = await in_thread(outside.devices, pid)
            in_use = self._keeper.tidying.in_use()
            tight = await in_thread(self._check_space, pid, spool, in_use)
            # First, because a store that cannot be written should not cost the kernel a freeze.
            writer = await in_thread(self._begin)
            try:
                run.phase("dumping", 0.02)
                dump, node_local = await self._dump_whole(run, native, pid, image_dir)
                frozen_at = _frozen_at(image_dir, dump)
                # Before the store takes the images, which may remove them.
                found = await in_thread(self._read, image_dir, dump, node_local, devices)
                run.phase("storing", 0.5)
                await in_thread(
                    lambda: writer.add_tree(
                        image_dir,
                        layout=found.layout,
                        consume=tight,
                        progress=run.span(0.5, 0.97),
                        cancel=run.cancel_flag,
                    )
                )
                await in_thread(found.survey.count, writer.added())
                meta = await self._describe(found, probe, dump, node_local, process, frozen_at)
                meta.contents = msgspec.to_builtins(found.survey.contents(writer.parent))
                run.point_of_no_return()
                record = await in_thread(writer.commit, meta)
            except BaseException:
                await in_thread(writer.abort)
                raise
        if self._kernel.provisioner.supervisor is self._supervisor:
            self._kernel.policy.saved(record.id)
            kernel_id = self._kernel.kernel_id
            if self._keeper.tracker.get(kernel_id) is self._kernel:  # not shut down meanwhile
                self._keeper.ability.faults.saved(kernel_id, dump.gpu, began)
        await self._keeper.leases.renew(self._kernel)
        self._keeper.in_background(self._keeper.tidying.apply())
        warnings = [*record.meta.warnings, *self._gpu_back(run, dump, record)]
        return OperationResult(
            state_id=record.id,
            kernel_id=self._kernel.kernel_id,
            seconds=time.monotonic() - began,
            size=record.size,
            frozen_seconds=dump.frozen_seconds,
            warnings=warnings,
        )

    def _gpu_back(self, run: Run, dump: DumpResult, record: StateRecord) -> list[str]:
        """Restore what was just saved, where the kernel did not get its GPU back.

        What it does on the GPU waits or fails for good. Returns what to tell the user.
        """
        if dump.gpu_problem is None:
            return []
        told = (
            "The NVIDIA driver did not give the kernel its GPU back after a save "
            f"({dump.gpu_problem.message.rstrip('.')})"
        )
        self._keeper.in_background(self._restore_from(run, record, f"{told}."))
        return [f"{told}: it is restored from this state."]

    async def _restore_from(self, run: Run, record: StateRecord, note: str) -> None:
        keeper, kernel = self._keeper, self._kernel
        await run.ended()
        if kernel.provisioner.supervisor is not self._supervisor or kernel.is_hibernated:
            return
        try:
            keeper.roll_back(record, kernel, run.model.path, notes=[note])
        except CkptError as error:
            keeper.log.warning("Kernel %s is not restored: %s", kernel.kernel_id, error.message)

    def _is_shared(self, path: str) -> bool:
        """Whether others write to a file too, so that it is never put back over what is there.

        These are below the home folder, which may itself lie in /tmp.
        """
        logs = os.path.realpath(self._keeper.launching.log_folder())
        return is_history(path) or os.path.dirname(path) == logs

    def _begin(self) -> StateWriter:
        kernel = self._kernel
        return self._keeper.store.begin(kernel.kernel_id, parent=kernel.policy.latest)

    def _check_space(self, pid: int, spool: Path, in_use: set[str]) -> bool:
        keeper = self._keeper
        # What is not known of a GPU refuses no save: should it not fit, the save says so itself.
        needed = state_size(pid, keeper.node_local_dirs) + (memory_on_gpus(pid) or 0)
        keeper.tidying.check_room(self._kernel.kernel_id, needed, in_use)
        return check_space(needed, spool, keeper.store_folder())

    def _pid(self) -> int:
        if self._supervisor is None or self._supervisor.poll() is not None:
            raise CkptError("not_savable", "The kernel has ended.", hint="Start it again.")
        pid = self._supervisor.pid
        if pid is None:
            raise CkptError("not_savable", "The kernel is still starting.", hint="Try again.")
        return pid

    async def _dump_whole(
        self, run: Run, native: KernelCapture, pid: int, image_dir: Path
    ) -> tuple[DumpResult, list[files.NodeLocalEntry]]:
        """Dump, and again while the freeze fell into a transaction of a database.

        Or while another kernel's save had a link of the same name at that moment: CRIU numbers
        those per save, in folders that all kernels share.
        """
        give_up = time.monotonic() + _DUMPING
        in_the_way = time.monotonic() + _LINKS
        for number in itertools.count(1):
            image_dir.mkdir(mode=0o700)
            lasting = await in_thread(lambda: transactions.wait_for_end(pid, timeout=_TRANSACTION))
            try:
                dump, node_local = await self._dump(run, native, pid, image_dir)
            except CkptError as error:
                if time.monotonic() >= in_the_way or not links_collided(error):
                    raise
                # Names of its own, as a restore has, cannot be given: CRIU chooses them, counting
                # from 1 in each dump, and no option changes that. Both saves were undone or only
                # this one: at different times each gets through.
                await in_thread(lambda: shutil.rmtree(image_dir))
                await asyncio.sleep(random.uniform(0.2, 1.5))
                continue
            torn = await in_thread(
                lambda open_before=lasting: transactions.in_images(
                    image_dir,
                    lasting=open_before,
                    dirs=self._keeper.node_local_dirs,
                    is_shared=self._is_shared,
                )
            )
            if not torn:
                self._warnings += await in_thread(
                    lambda open_before=lasting: transactions.note_databases(
                        image_dir, open_before, dirs=self._keeper.node_local_dirs
                    )
                )
                return dump, node_local
            await in_thread(lambda: shutil.rmtree(image_dir))
            if number >= _DUMPS and time.monotonic() >= give_up:
                break
        raise CkptError(
            "dump_failed",
            f"The kernel writes to a database all the time: {torn[0]}. "
            "A state of that moment could not be restored. The kernel runs on.",
            hint="Save again when it writes less often.",
        )

    async def _dump(
        self, run: Run, native: KernelCapture, pid: int, image_dir: Path
    ) -> tuple[DumpResult, list[files.NodeLocalEntry]]:
        keeper = self._keeper
        found: list[files.NodeLocalEntry] = []
        dirs = keeper.node_local_dirs

        def collect() -> None:
            found.extend(
                files.collect(
                    pid,
                    image_dir,
                    dirs,
                    limit=keeper.node_local_limit,
                    is_shared=self._is_shared,
                )
            )

        dump = await native.dump(
            pid,
            image_dir,
            timeout=keeper.save_timeout,
            ghost_limit=keeper.ghost_limit,
            window_dirs=await in_thread(files.window_dirs, pid, dirs),
            on_window=collect,
            progress=lambda part: run.progress(0.02 + 0.48 * part),
            on_gpu=lambda waits: run.phase("gpu" if waits else "dumping"),
            cancel=run.cancel_event,
            gpu_timeout=keeper.gpu_timeout,
            gpu_to_store=keeper.gpu_to_store,
            parked=self._kernel.parked_processes,
        )
        return dump, found

    def _above(self, count: int | None) -> dict[str, int]:
        """Cells with counts that this kernel had not come to: an earlier one's."""
        above = [cell for cell in self._counts.items() if cell[1] > (count or 0)]
        return dict(above[:_COUNTS])

    def _read(
        self,
        image_dir: Path,
        dump: DumpResult,
        node_local: list[files.NodeLocalEntry],
        devices: list[str],
    ) -> _Found:
        pages = page_files(image_dir)
        km = self._kernel.km
        return _Found(
            images.mapped_files(image_dir, exclude=self._keeper.node_local_dirs),
            images.all_pids(image_dir),
            pages,
            Survey(image_dir, pages, node_local, dump.on_gpu),
            outside.survey(
                image_dir,
                devices=devices,
                own_ports=[getattr(km, name) for name in port_names],
                exclude=self._keeper.node_local_dirs,
                is_shared=self._is_shared,
            ),
        )

    async def _describe(
        self,
        found: _Found,
        probe: Probe,
        dump: DumpResult,
        node_local: list[files.NodeLocalEntry],
        process: dict[str, Any],
        frozen_at: float,
    ) -> StateMeta:
        """What must be known about the state beside its images."""
        kernel, km = self._kernel, self._kernel.km
        node = await self._keeper.ability.node(probe)
        if kernel.watch is None:
            raise CkptError("cancelled", "The kernel was shut down meanwhile.")
        # By now what the kernel published before it was frozen has arrived.
        activity = kernel.watch.at(frozen_at)
        display_name, language = spec_of(km)
        return StateMeta(
            kernel_id=kernel.kernel_id,
            kernel_name=km.kernel_name,
            display_name=display_name,
            language=language,
            path=(await self._keeper.sessions.paths()).get(kernel.kernel_id),
            reason=self._reason,
            label=self._label,
            node=msgspec.to_builtins(node),
            connection=saved_connection(km),
            execution_count=activity.execution_count,
            execution_state=activity.execution_state,
            in_flight_msg_id=activity.in_flight_msg_id,
            other_counts=self._above(activity.execution_count),
            frozen_seconds=dump.frozen_seconds,
            mapped_files=msgspec.to_builtins(found.mapped),
            node_local=msgspec.to_builtins(node_local),
            pids=found.pids,
            cwd=process["cwd"],
            argv=process["argv"],
            warnings=[*self._warnings, *_warnings(dump)],
            outside=msgspec.to_builtins(found.outside),
            gpu=msgspec.to_builtins(dump.gpu),
        )


def _warnings(dump: DumpResult) -> list[str]:
    """What the user should know about a state that was saved all the same."""
    if not dump.left_out:
        return []
    names = ", ".join(dump.left_out)
    return [f"Background processes that an earlier restore set apart are not in the state: {names}"]


def _look_at(pid: int) -> dict[str, Any]:
    try:
        process = psutil.Process(pid)
        return {"cwd": process.cwd(), "argv": process.cmdline()}
    except psutil.Error:
        return {"cwd": None, "argv": []}


def _frozen_at(image_dir: Path, dump: DumpResult) -> float:
    """A moment (Unix seconds) at which the tree stood still.

    CRIU writes the process tree's image then. Where the file system's clock is another
    machine's, the middle of the freeze is reckoned back from now.
    """
    now = time.time()
    written = os.stat(image_dir / "pstree.img").st_mtime
    if now - dump.dump_seconds - 1 <= written <= now:
        return written
    return now - dump.frozen_seconds / 2
