"""States, kernels and nodes as the REST API and the CLI say them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final, Literal

import msgspec

from . import __version__
from .capture.protocol import Probe
from .connection import spec_of
from .errors import CkptError
from .gpus.fit import used_gpus
from .gpus.inventory import Gpu, GpuUse
from .models import (
    Difference,
    Doctor,
    DoctorCheck,
    ErrorBody,
    Kernel,
    LostKernel,
    Node,
    Operation,
    RestoredFrom,
    RestoreMode,
    State,
)
from .outside import Outside
from .parked import Parked
from .recovery import LostRecord
from .rights import rights
from .saved_gpus import GpuHere, SavedGpu, SavedGpus
from .store import DamagedState, StateRecord

_WHY: Final[dict[str, Literal["lost", "shutdown", "cull"]]] = {
    "shutdown": "shutdown",
    "cull": "cull",
}


def state(
    record: StateRecord,
    differences: Sequence[Difference] | None = None,
    *,
    cost: int | None = None,
    choices: Mapping[str, Sequence[Gpu]] | None = None,
) -> State:
    """A state; ``differences`` is what a restore here would meet, ``None`` where not checked.

    ``cost`` is what deleting it would free, in bytes; ``choices`` are the GPUs of this node that
    can stand for each of its own, by UUID.
    """
    meta = record.meta
    modes = None if differences is None else _modes(differences)
    return State(
        id=record.id,
        kernel_id=meta.kernel_id,
        kernel_name=meta.kernel_name,
        display_name=meta.display_name,
        path=meta.path,
        created=record.created,
        reason=meta.reason,
        label=meta.label,
        node=_node(meta.node),
        size=record.size,
        stored_size=record.stored_size,
        frozen_seconds=meta.frozen_seconds,
        execution_count=meta.execution_count,
        execution_state=meta.execution_state,
        restorable=None if modes is None else bool(modes),
        modes=modes,
        differences=list(differences or []),
        warnings=meta.warnings,
        parent=record.parent,
        cost=cost,
        pinned=record.pinned,
        durable=record.durable,
        encrypted=record.key_id is not None,
        verified=record.verified,
        damage=record.damage,
        outside=outside(record),
        gpu=_gpu(record, choices or {}),
    )


def outside(record: StateRecord) -> Outside | None:
    """What the state's kernel had outside of it.

    ``None`` for states that do not say, or in words that only a later version knows.
    """
    try:
        return msgspec.convert(record.meta.outside, Outside | None)
    except msgspec.ValidationError:
        return None


def gpu_use(record: StateRecord) -> GpuUse | None:
    """What the state has of GPUs, ``None``: nothing; ``not_restorable``: in later words."""
    try:
        return msgspec.convert(record.meta.gpu, GpuUse | None)
    except msgspec.ValidationError as error:
        raise CkptError(
            "not_restorable",
            "The state says of GPUs what this version does not understand.",
            hint="Restore it with a newer version of jupyter-gpu-ckpt.",
            details=str(error),
        ) from error


def _gpu(record: StateRecord, choices: Mapping[str, Sequence[Gpu]]) -> SavedGpus | None:
    try:
        use = gpu_use(record)
    except CkptError:
        return None
    if use is None or not use.processes:
        return None
    used = used_gpus(use.processes, use.gpus)
    return SavedGpus(
        memory=use.memory,
        processes=len(use.processes),
        driver=record.meta.node.get("driver"),
        blocked_seconds=use.blocked_s,
        gpus=[
            SavedGpu(
                uuid=gpu.uuid,
                name=gpu.name,
                memory=gpu.memory_bytes,
                used=gpu.uuid in used,
                choices=[
                    GpuHere(one.index, one.uuid, one.name, max(0, one.memory - one.used))
                    for one in choices.get(gpu.uuid, ())
                ],
            )
            for gpu in use.gpus
        ],
    )


def unreadable(bad: DamagedState) -> State:
    """A state of which nothing can be read but its name."""
    return State(
        id=bad.state_id,
        kernel_id=bad.kernel_id,
        kernel_name="",
        display_name="",
        path=None,
        created=bad.created,
        reason="",
        label=None,
        node=_node({}),
        size=0,
        stored_size=0,
        frozen_seconds=0.0,
        execution_count=None,
        execution_state="",
        restorable=False,
        modes=[],
        damage=bad.message,
    )


def _modes(differences: Sequence[Difference]) -> list[RestoreMode]:
    """The ways of restoring that nothing stands in the way of."""
    blocked = {d.mode for d in differences if d.blocking}
    every: tuple[RestoreMode, ...] = ("rollback", "new")
    return [] if None in blocked else [mode for mode in every if mode not in blocked]


def kernel(
    kernel_id: str,
    km: Any,
    path: str | None,
    newest: StateRecord | None,
    error: CkptError | None,
    operation: Operation | None,
    restored_from: RestoredFrom | None = None,
    *,
    hibernated: bool = False,
    parked: Parked | None = None,
    can_park: bool = False,
    gpu_lost: str | None = None,
) -> Kernel:
    """A kernel of the server; ``error`` is why it cannot be saved."""
    return Kernel(
        id=kernel_id,
        name=km.kernel_name,
        display_name=spec_of(km)[0],
        path=path,
        execution_state="hibernated"
        if hibernated
        else getattr(km, "execution_state", None) or "unknown",
        savable=error is None,
        error=None
        if error is None
        else ErrorBody(error.message, error.reason, error.hint, error.details),
        last_state=None if newest is None else state(newest),
        operation=operation,
        restored_from=restored_from,
        parked=parked,
        can_park=can_park,
        gpu_lost=gpu_lost,
    )


def asleep() -> CkptError:
    """What to raise where a hibernated kernel is to be saved."""
    return CkptError(
        "not_savable",
        "The kernel is hibernated: all of it is in its saved state.",
        hint="It wakes when a cell is run.",
    )


def lost_kernel(lost: LostRecord) -> LostKernel:
    """A lost kernel and its newest state that is whole."""
    record, newest = lost.record, lost.state
    seen = datetime.fromtimestamp(lost.last_seen, timezone.utc)
    return LostKernel(
        kernel_id=record.kernel_id,
        kernel_name=record.kernel_name,
        display_name=record.display_name,
        path=record.path if record.path is not None else newest.meta.path,
        node=record.lease.hostname if record.lease else newest.meta.node.get("hostname", ""),
        last_seen=seen.isoformat(timespec="seconds").replace("+00:00", "Z"),
        state=state(newest),
        why="hibernated" if record.hibernated else _WHY.get(record.offer or "", "lost"),
        damaged=list(lost.damaged),
        server=record.server,
    )


def _node(node: dict[str, Any]) -> Node:
    return Node(
        id=str(node.get("id", "")),
        hostname=str(node.get("hostname", "")),
        kernel_release=str(node.get("kernel_release", "")),
        cpu=str(node.get("cpu_model", "")),
        criu=str(node["criu"]) if node.get("criu") else None,
        gpus=[str(gpu.get("name", "")) for gpu in node.get("gpus") or [] if isinstance(gpu, dict)],
    )


def store_warning(error: CkptError) -> DoctorCheck:
    """Describe what keeps states from being listed or uploaded, as a finding."""
    return DoctorCheck("remote store", "warning", error.message, error.hint)


def damaged_state(bad: DamagedState) -> DoctorCheck:
    """A state that cannot be read, with why."""
    hint = bad.hint or f"To delete it: jupyter gpu-ckpt rm {bad.state_id}"
    return DoctorCheck("damaged state", "warning", bad.message, hint)


def damaged_record(error: CkptError) -> DoctorCheck:
    """A kernel's record that cannot be read, with why."""
    return DoctorCheck("damaged record", "warning", error.message, error.hint)


def doctor(
    probe: Probe | CkptError, store_error: CkptError | None, more: Sequence[DoctorCheck] = ()
) -> Doctor:
    """What was found about this node, one check a line.

    Parameters
    ----------
    probe
        What ``kernel-capture`` said, or why it said nothing.
    store_error
        Why the store cannot be used, if so.
    more
        Further checks.
    """
    checks: list[DoctorCheck] = []
    if isinstance(probe, CkptError):
        checks.append(DoctorCheck("kernel-capture", "problem", probe.message, probe.hint))
    else:
        checks.append(DoctorCheck("kernel-capture", "ok", f"Version {probe.version}."))
        if probe.criu is not None:
            found = f"CRIU {probe.criu.version} at {probe.criu.path}."
            checks.append(DoctorCheck("criu", "ok", found))
        checks.append(DoctorCheck("kernel", "ok", f"Linux {probe.kernel}."))
        if probe.gpu is not None and probe.gpu.checkpoint:
            onto = "onto any GPU of its kind" if probe.gpu.gpu_map else "onto the same GPU only"
            checks.append(DoctorCheck("GPU memory", "ok", f"Saved with kernels, restored {onto}."))
        checks += [DoctorCheck(p.reason, "problem", p.message, p.hint) for p in probe.problems]
        checks += [DoctorCheck(n.reason, "warning", n.message, n.hint) for n in probe.notes]
    if store_error is not None:
        checks.append(DoctorCheck("store", "problem", store_error.message, store_error.hint))
    known = None if isinstance(probe, CkptError) else probe
    return Doctor(
        can_capture=known is not None and known.can_capture,
        version=__version__,
        checks=[*checks, *more],
        rights=None if known is None else rights(known),
    )
