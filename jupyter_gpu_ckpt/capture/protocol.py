"""The JSON lines that ``kernel-capture`` writes: parsing, and the structs they become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final

import msgspec

from ..gpus.inventory import CudaProcess, GpuUse

#: Longest line of ``kernel-capture`` that is believed; longer ones are dropped whole.
MAX_LINE: Final = 1 << 20


class CriuBinary(msgspec.Struct, frozen=True):
    """The CRIU that ``kernel-capture`` would run."""

    path: str
    version: str


class Finding(msgspec.Struct, frozen=True):
    """A problem or a note of ``probe``."""

    reason: str
    message: str
    hint: str | None = None


class Capabilities(msgspec.Struct, frozen=True):
    """Which Linux capabilities ``kernel-capture`` can use here."""

    checkpoint_restore: bool = False
    net_admin: bool = False
    setpcap: bool = False
    sys_ptrace: bool = False
    sys_admin: bool = False


class GpuAbility(msgspec.Struct, frozen=True):
    """What the NVIDIA driver offers: to save GPU memory, and to restore it onto another GPU."""

    checkpoint: bool = False
    gpu_map: bool = False
    driver: str | None = None
    cuda_version: int | None = None


class Probe(msgspec.Struct, frozen=True):
    """What this node can capture. ``problems`` is empty exactly when it can."""

    version: str
    kernel: str
    can_capture: bool
    criu: CriuBinary | None = None
    capabilities: Capabilities = Capabilities()
    no_new_privs: bool = False
    seccomp: int = 0
    uid: int = -1
    root: bool = False
    can_set_pid: bool = False
    pid_namespaces: bool = False
    time_namespaces: bool = False
    gpu: GpuAbility | None = None
    problems: list[Finding] = []
    notes: list[Finding] = []


class DumpResult(msgspec.Struct, frozen=True):
    """A finished dump: seconds the kernel stood still, seconds in all, bytes written.

    ``left_out`` names processes that run beside the kernel's tree and so are not in the images.
    ``gpu`` is what the images have of GPUs; ``gpu_problem`` says why the kernel that goes on did
    not get its GPU back, although the images are whole.
    """

    frozen_seconds: float
    dump_seconds: float
    image_bytes: int
    left_out: tuple[str, ...] = ()
    gpu: GpuUse | None = None
    gpu_problem: Finding | None = None

    @property
    def on_gpu(self) -> dict[int, list[tuple[int, int]]]:
        """Address ranges in the images that are a GPU's memory, by process."""
        return {} if self.gpu is None else self.gpu.in_memory


class _Problem(msgspec.Struct, frozen=True):
    problem: Finding | None = None


def dump_result(event: dict[str, Any], parked: Sequence[CudaProcess] = ()) -> DumpResult:
    """What a ``done`` event says, and of processes that were ``parked`` before, their park.

    Raises ``msgspec.ValidationError``.
    """
    tasks = event.get("left_out")
    gpu = event.get("gpu")
    use = msgspec.convert(gpu, GpuUse | None)
    return DumpResult(
        float(event.get("frozen_s") or 0),
        float(event.get("dump_s") or 0),
        int(event.get("image_bytes") or 0),
        tuple(_names(tasks if isinstance(tasks, list) else [])),
        None if use is None else use.completed(parked),
        None if gpu is None else msgspec.convert(gpu, _Problem).problem,
    )


def _names(tasks: list[Any]) -> Iterator[str]:
    """``comm (pid)`` of each task in an event's list."""
    for task in tasks:
        if isinstance(task, dict):
            yield f"{task.get('comm')} ({task.get('pid')})"


class RestoredEvent(msgspec.Struct, frozen=True):
    """A finished restore; ``pid`` is the kernel's, as this process sees it.

    ``gpu_s`` are the seconds that the GPU's part took, ``None`` where there was none.
    """

    pid: int
    restore_s: float
    gpu_s: float | None = None
    pid_namespace: bool = False
    time_namespace: bool = False


def parse_event(line: bytes) -> dict[str, Any] | None:
    """One event, or ``None`` for a line that is none (noise never breaks a save)."""
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        return event
    return None


def read_events(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """Events from a pipe until it closes; lines above :data:`MAX_LINE` are skipped."""
    skipping = False
    while line := stream.readline(MAX_LINE):
        complete = line.endswith(b"\n")
        if not skipping and (complete or len(line) < MAX_LINE):
            event = parse_event(line)
            if event is not None:
                yield event
        skipping = not complete
