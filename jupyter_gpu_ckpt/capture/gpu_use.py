"""What running kernels have on GPUs."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

from ..gpus.asking import driver_present, inventory
from ..gpus.inventory import Gpu
from . import procfs

_DRIVER: Final = "/libcuda.so"
#: The machine's own PID namespace has this number on every Linux.
_MACHINE: Final = "pid:[4026531836]"


def uses_driver(pid: int) -> bool:
    """Whether a process of the tree has NVIDIA's driver loaded, or a GPU of its open."""
    return any(_uses(member) for member in procfs.tree(pid))


def memory_on_gpus(pid: int) -> int | None:
    """Bytes that a kernel's tree has on GPUs; the driver is asked only where the tree uses it.

    ``None`` where the driver does not tell: with MIG, where it does not answer, and in a container
    where it names processes by the machine's numbers, or names none.
    """
    if not driver_present() or not uses_driver(pid):
        return 0
    here = inventory()
    if here.error is not None or here.broken:
        return None
    return of_tree(set(procfs.tree(pid)), here.gpus)


def pids_on(gpus: set[str]) -> set[int] | None:
    """Processes with memory on these GPUs now; ``None`` where the driver does not tell."""
    found = [gpu for gpu in inventory(max_age=0.0).gpus if gpu.uuid in gpus]
    # In a container it may name none.
    return {one.pid for gpu in found for one in gpu.processes} or None


def is_among(pid: int | None, pids: set[int] | None) -> bool:
    """Whether a kernel's tree has one of these processes; where none is known: the driver."""
    if pid is None or not uses_driver(pid):
        return False
    return pids is None or not pids.isdisjoint(procfs.tree(pid))


def of_tree(tree: Collection[int], gpus: Collection[Gpu]) -> int | None:
    """Bytes that these processes have on these GPUs; ``None`` where it cannot be known."""
    total = 0
    for gpu in gpus:
        if not _same_numbers(gpu):
            return None
        for one in gpu.processes:
            if one.pid in tree:
                if one.memory is None:
                    return None
                total += one.memory
    return total


def _same_numbers(gpu: Gpu) -> bool:
    """Whether the driver's process numbers are those that are seen here."""
    if gpu.used == 0 or procfs.namespaces(os.getpid())[4] == _MACHINE:
        return True
    # A number of another namespace may be anybody's here, and then of one without a GPU.
    return bool(gpu.processes) and all(_uses(one.pid) for one in gpu.processes)


def _uses(pid: int) -> bool:
    if any(target.startswith("/dev/nvidia") for _, target in procfs.descriptors(pid)):
        return True
    return any(_DRIVER in mapping.path for mapping in procfs.mappings(pid))
