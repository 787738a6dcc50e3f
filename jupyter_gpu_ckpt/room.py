"""When a kernel that waits for room on a GPU looks again, and who has memory there.

Each look starts a program. What this server's kernels do is known at once; for what others on the
node do it is looked less and less often.
"""

from __future__ import annotations

import asyncio
from typing import Final

from .capture import procfs
from .capture.gpu_use import uses_driver
from .gpus.asking import inventory

#: Seconds between two looks: at first, and at most.
SHORTEST: Final = 0.5
LONGEST: Final = 4.0


class Room:
    """One wait for room; belongs to one event loop."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._pause = SHORTEST

    def may_be_there(self) -> None:
        """A kernel of this server was parked, or ends: look at once."""
        self._news.set()

    async def wait(self, cancelled: asyncio.Event, most: float) -> None:
        """Wait until it is worth looking again, somebody cancels, or ``most`` seconds are over."""
        waits = [asyncio.ensure_future(one.wait()) for one in (self._news, cancelled)]
        try:
            await asyncio.wait(
                waits,
                timeout=max(0.0, min(self._pause, most)),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for one in waits:
                one.cancel()
        self._pause = SHORTEST if self._news.is_set() else min(2 * self._pause, LONGEST)
        self._news.clear()


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
