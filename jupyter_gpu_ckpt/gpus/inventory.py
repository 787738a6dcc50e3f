"""GPUs as the driver describes them, and as a state remembers them."""

from __future__ import annotations

import msgspec


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
    That memory is ``stored`` in files of its own (the driver's custom storage) or in its memory.
    """

    pid: int
    parked: bool = False
    memory_bytes: int | None = None
    visible: str | None = None
    stored: bool = False


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


def version(driver: str) -> tuple[int, ...]:
    """A driver's version, to compare; empty where it is not made of numbers."""
    try:
        return tuple(int(part) for part in driver.split("."))
    except ValueError:
        return ()
