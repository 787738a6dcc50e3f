"""The REST API below ``/gpu-ckpt/api``; ``openapi.yaml`` describes it."""

from __future__ import annotations

from . import autosave, doctor, endings, gc, kernels, lost, operations, states, unknown
from .base import KEEPER_SETTING, GpuCkptHandler

default_handlers: list[tuple[str, type[GpuCkptHandler]]] = [
    *autosave.routes,
    *doctor.routes,
    *endings.routes,
    *gc.routes,
    *kernels.routes,
    *lost.routes,
    *operations.routes,
    *states.routes,
    *unknown.routes,
]

__all__ = ["KEEPER_SETTING", "default_handlers"]
