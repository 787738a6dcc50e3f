"""What a running kernel has on GPUs, before a save."""

from __future__ import annotations

from typing import Final

from ..gpus.asking import driver_present, inventory
from . import procfs

_DRIVER: Final = "/libcuda.so"


def uses_driver(pid: int) -> bool:
    """Whether a process of the tree has NVIDIA's driver loaded, or a GPU of its open."""
    return any(
        any(target.startswith("/dev/nvidia") for _, target in procfs.descriptors(member))
        or any(_DRIVER in mapping.path for mapping in procfs.mappings(member))
        for member in procfs.tree(pid)
    )


def memory_on_gpus(pid: int) -> int:
    """Bytes that a kernel's tree has on GPUs; the driver is asked only where the tree uses it.

    In a container the driver may name no processes: then all that is used on such a GPU counts.
    """
    if not driver_present() or not uses_driver(pid):
        return 0
    tree = set(procfs.tree(pid))
    total = 0
    for gpu in inventory().gpus:
        if gpu.processes:
            total += sum(one.memory or 0 for one in gpu.processes if one.pid in tree)
        else:
            total += gpu.used
    return total
