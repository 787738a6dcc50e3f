"""What a running kernel has on GPUs, before a save."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from ..gpus.inventory import Inventory
from . import procfs

_DRIVER: Final = "/libcuda.so"


def uses_driver(pid: int) -> bool:
    """Whether a process of the tree has NVIDIA's driver loaded, or a GPU of its open."""
    return any(
        any(target.startswith("/dev/nvidia") for _, target in procfs.descriptors(member))
        or any(_DRIVER in mapping.path for mapping in procfs.mappings(member))
        for member in procfs.tree(pid)
    )


def memory_on_gpus(tree: Collection[int], inventory: Inventory) -> int:
    """Bytes that these processes have on GPUs.

    In a container the driver may name no processes: then all that is used on such a GPU counts.
    """
    total = 0
    for gpu in inventory.gpus:
        if gpu.processes:
            total += sum(one.memory or 0 for one in gpu.processes if one.pid in tree)
        else:
            total += gpu.used
    return total
