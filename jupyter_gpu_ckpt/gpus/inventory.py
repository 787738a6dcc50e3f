"""GPUs as the driver describes them, and as a state remembers them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

#: A range of addresses: begin and end, hexadecimal.
_RANGE: Final = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16})")


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that computes on a GPU; ``memory`` in bytes, ``None`` where it is not told."""

    pid: int
    memory: int | None = None


class GpuInfo(msgspec.Struct, frozen=True):
    """What of a GPU stays the same: a state's node has these. ``memory`` in bytes."""

    name: str
    uuid: str
    memory: int


class Gpu(msgspec.Struct, frozen=True):
    """A GPU of this node, now; sizes in bytes."""

    index: int
    name: str
    uuid: str
    memory: int
    used: int = 0
    mig: bool = False
    persistence: bool = True
    processes: list[GpuProcess] = []

    @property
    def info(self) -> GpuInfo:
        """What of it stays the same."""
        return GpuInfo(self.name, self.uuid, self.memory)


class Inventory(msgspec.Struct, frozen=True):
    """What the NVIDIA driver says of this node.

    ``driver`` is ``None`` where there is none. ``cuda`` is the newest version it offers, 1000 times
    the first number and 10 times the second. ``broken`` says of GPUs that do not answer why,
    and ``error`` why the driver said nothing at all.
    """

    driver: str | None = None
    cuda: int | None = None
    gpus: list[Gpu] = []
    broken: list[str] = []
    error: str | None = None


class CudaProcess(msgspec.Struct, frozen=True):
    """A process of a state that has CUDA state.

    ``memory_bytes`` is its memory on all of its GPUs, ``visible`` its ``CUDA_VISIBLE_DEVICES``.
    That memory is ``stored`` in files of its own (the driver's custom storage) or in its memory:
    in its ``mappings`` (``START-END``, hexadecimal), which are ``None`` where they are not known.
    """

    pid: int
    parked: bool = False
    memory_bytes: int | None = None
    visible: str | None = None
    stored: bool = False
    mappings: list[str] | None = None

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Begin and end of each of its mappings, in order; what is no range is left out."""
        found = [_RANGE.fullmatch(text) for text in self.mappings or ()]
        ranges = [(int(one[1], 16), int(one[2], 16)) for one in found if one is not None]
        return sorted((begin, end) for begin, end in ranges if begin < end)


class CudaGpu(msgspec.Struct, frozen=True):
    """A GPU that the driver knew when a state was saved, used or not.

    ``released_bytes`` became free on it then; ``None`` where the driver does not tell.
    """

    uuid: str
    name: str
    memory_bytes: int
    released_bytes: int | None = None


class GpuUse(msgspec.Struct, frozen=True):
    """What a state has of GPUs: ``gpu`` in ``kernel-capture``'s event ``done``.

    ``blocked_s`` is for how many seconds the kernel's calls of the driver waited. Which driver it
    was, the state's node says (``NodeInfo.driver``).
    """

    processes: list[CudaProcess] = []
    gpus: list[CudaGpu] = []
    cuda_version: int | None = None
    blocked_s: float = 0.0

    @property
    def memory(self) -> int:
        """Bytes of GPU memory that are in the state, about."""
        return sum(one.memory_bytes or 0 for one in self.processes)

    @property
    def stored(self) -> bool:
        """Whether only a driver that offers custom storage can bring it back."""
        return any(one.stored for one in self.processes)

    @property
    def in_memory(self) -> dict[int, list[tuple[int, int]]]:
        """Address ranges of processes, by their ids, that hold memory of a GPU."""
        return {one.pid: one.ranges for one in self.processes if one.ranges}

    def completed(self, parked: Sequence[CudaProcess]) -> GpuUse:
        """The same with the mappings of parked processes, which only their park knew."""
        known = {one.pid: one.mappings for one in parked}
        return msgspec.structs.replace(
            self,
            processes=[
                msgspec.structs.replace(one, mappings=known.get(one.pid))
                if one.parked and one.mappings is None
                else one
                for one in self.processes
            ],
        )


def version(driver: str) -> tuple[int, ...]:
    """A driver's version, to compare; empty where it is not made of numbers."""
    try:
        return tuple(int(part) for part in driver.split("."))
    except ValueError:
        return ()
