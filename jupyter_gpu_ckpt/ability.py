"""What this node can capture and restore, as the keeper asks it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from . import describe
from .capture.images import MappedFile
from .capture.native import KernelCapture, find_kernel_capture
from .capture.node import NodeInfo, node_info
from .capture.preflight import check_node, check_restore, kernel_and_descendants
from .capture.protocol import Probe
from .errors import CkptError
from .gpus.asking import inventory
from .gpus.checks import checks
from .gpus.faults import GpuFaults
from .gpus.fit import FIRST_DRIVER_TO_MOVE, choices, fit
from .gpus.inventory import Gpu, Inventory, version
from .limits import denial
from .models import Difference, Doctor, DoctorCheck
from .operations import in_thread
from .store import StateRecord

#: Seconds for which a probe's answer is believed.
_PROBE_AGE: Final = 60.0
#: Seconds for which a node's GPUs are taken to be the same, where nobody asks how they are.
_GPU_AGE: Final = 600.0
#: Seconds for which it is believed what room they have, where it is only shown.
_SHOWN_AGE: Final = 5.0
_PORTS: Final = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


class Found(NamedTuple):
    """What a restore would meet here, and which GPU stands for which: ``--gpu-map``.

    ``choices`` are the GPUs of this node that can stand for each of the state, by UUID.
    """

    differences: list[Difference]
    gpu_map: dict[str, str]
    choices: dict[str, list[Gpu]]


class Ability:
    """Finds ``kernel-capture`` and remembers for a while what it said.

    Parameters
    ----------
    configured
        Gives the configured path of the program, or ``None``.
    log, on_lost
        For what GPUs report, see :class:`~jupyter_gpu_ckpt.gpus.faults.GpuFaults`.
    """

    def __init__(
        self,
        configured: Callable[[], str | None],
        log: logging.Logger | Any,
        on_lost: Callable[[str], None],
    ) -> None:
        self._configured = configured
        #: Errors of GPUs that kernels use.
        self.faults = GpuFaults(log, on_lost)
        self._probed: tuple[float, Probe | CkptError] | None = None

    def native(self) -> KernelCapture:
        """The kernel-capture program; ``cannot_capture`` when there is none, or it is denied."""
        if (denied := denial()) is not None:
            raise denied
        path = find_kernel_capture(self._configured())
        if path is None:
            raise CkptError(
                "cannot_capture",
                "The kernel-capture program is not installed.",
                hint="Install the package from its Linux wheel.",
            )
        return KernelCapture(path)

    async def probe(self) -> Probe:
        """What this node can capture; ``cannot_capture`` when nothing."""
        now = time.monotonic()
        if self._probed is None or now - self._probed[0] > _PROBE_AGE:
            try:
                found: Probe | CkptError = await self.native().probe()
            except CkptError as error:
                found = error
            self._probed = (now, found)
        probe = self._probed[1]
        if isinstance(probe, CkptError):
            raise probe
        check_node(probe)
        return probe

    @property
    def can_park(self) -> bool:
        """Whether, as the last probe said, there is a driver that frees GPUs of what is on them."""
        probe = self._probed[1] if self._probed is not None else None
        return isinstance(probe, Probe) and probe.gpu is not None and probe.gpu.checkpoint

    @staticmethod
    async def node(probe: Probe) -> NodeInfo:
        """This node, as its states describe it."""
        return await in_thread(lambda: node_info(probe, inventory(_GPU_AGE)))

    async def error(self) -> CkptError | None:
        """Why this node cannot capture; ``None`` when it can."""
        try:
            await self.probe()
        except CkptError as error:
            return error
        return None

    async def differences(
        self,
        record: StateRecord,
        ending_pid: int | None = None,
        *,
        beside: bool | None = None,
        gpu_map: Mapping[str, str] | None = None,
    ) -> Found:
        """What a restore of a state would meet here, and its GPUs; ``cannot_capture``.

        Parameters
        ----------
        record
            The state.
        ending_pid
            The kernel that is to make place for it, if one runs.
        beside
            ``True`` leaves out what does not concern a kernel beside its original, ``False``
            what does not concern one in its place.
        gpu_map
            Which GPU is to stand for one of the save, by UUID.
        """
        probe = await self.probe()
        meta = record.meta
        outside = describe.outside(record)

        def look() -> Found:
            ending = set() if ending_pid is None else kernel_and_descendants(ending_pid)
            saved = msgspec.convert(meta.node, NodeInfo)
            use = describe.gpu_use(record)
            # Before a restore it has to be true now: others may have taken memory since.
            age = _SHOWN_AGE if beside is None else 0.0
            gpus = inventory(age) if use is not None else Inventory()
            placed = fit(use, gpus, saved.driver, ending, gpu_map or {})
            found = check_restore(
                probe=probe,
                saved=saved,
                here=node_info(probe),
                mapped_files=msgspec.convert(meta.mapped_files, list[MappedFile]),
                open_files=outside.required() if outside is not None else (),
                pids=meta.pids,
                listeners=[(meta.connection["ip"], meta.connection[name]) for name in _PORTS],
                ending=ending,
                gpus=placed,
            )
            found = [difference for difference in found if difference.mode != other]
            # Drivers before 580 take none, and go by index: then each GPU stands for itself.
            can_map = version(gpus.driver or "") >= FIRST_DRIVER_TO_MOVE
            return Found(found, placed.pairs if can_map else {}, choices(use, gpus))

        other = {True: "rollback", False: "new", None: "-"}[beside]
        try:
            return await in_thread(look)
        except (KeyError, msgspec.ValidationError) as error:
            raise CkptError(
                "not_restorable",
                "The state was saved by another version of jupyter-gpu-ckpt, in a way that this "
                "one does not understand.",
                hint="Restore it with the version that saved it, or delete it.",
                details=str(error),
            ) from error

    async def doctor(self, check_store: Callable[[], list[DoctorCheck]]) -> Doctor:
        """What this node can capture, and what stands in the way.

        Parameters
        ----------
        check_store
            Raises CkptError when the store is out of order, and returns what else is to be
            said of it; run in a worker thread.
        """
        self._probed = None
        try:
            probe: Probe | CkptError = await self.native().probe()
        except CkptError as error:
            probe = error
        gpus = checks(await in_thread(inventory, 0.0))
        try:
            of_store = await in_thread(check_store)
        except CkptError as error:
            return describe.doctor(probe, error, gpus)
        usable = DoctorCheck("store", "ok", "The store can be used.")
        return describe.doctor(probe, None, [usable, *of_store, *gpus])
