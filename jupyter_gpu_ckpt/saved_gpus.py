"""What a state has of GPUs, for the models."""

from __future__ import annotations

import msgspec


class SavedGpu(msgspec.Struct, frozen=True):
    """A GPU that the driver knew at the save; ``used``: the kernel could use it."""

    uuid: str
    name: str
    memory: int
    used: bool


class SavedGpus(msgspec.Struct, frozen=True):
    """What a state has of GPUs: ``memory`` of so many ``processes``.

    For ``blocked_seconds`` of the save the kernel's calls of CUDA waited.
    """

    memory: int
    processes: int
    driver: str | None
    blocked_seconds: float
    gpus: list[SavedGpu]
