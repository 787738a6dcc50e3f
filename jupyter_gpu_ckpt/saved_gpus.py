"""What a state has of GPUs, for the models."""

from __future__ import annotations

import msgspec


class GpuHere(msgspec.Struct, frozen=True):
    """A GPU of this node; ``free`` is its free memory now, in bytes."""

    index: int
    uuid: str
    name: str
    free: int


class SavedGpu(msgspec.Struct, frozen=True):
    """A GPU that the driver knew at the save; ``used``: the kernel could use it.

    ``choices`` are the GPUs of this node that can stand for it: none where the kernel could not use
    it, where the driver cannot move it, and where that was not checked (lists).
    """

    uuid: str
    name: str
    memory: int
    used: bool
    choices: list[GpuHere] = []


class SavedGpus(msgspec.Struct, frozen=True):
    """What a state has of GPUs: ``memory`` of so many ``processes``.

    For ``blocked_seconds`` of the save the kernel's calls of CUDA waited.
    """

    memory: int
    processes: int
    driver: str | None
    blocked_seconds: float
    gpus: list[SavedGpu]
