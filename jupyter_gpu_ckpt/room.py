"""When a kernel that waits for room on a GPU looks again.

Each look starts a program. What this server's kernels do is known at once; for what others on the
node do it is looked less and less often.
"""

from __future__ import annotations

import asyncio
from typing import Final

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
