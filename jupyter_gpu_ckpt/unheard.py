"""Cells for a kernel that was just started wait until the server hears what it says.

A page may be connected to the new process before the server's own socket is, which tries again
every 0.1 to 0.2 s: what ran in between would count for nothing, neither as work that is to be
saved nor as activity.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from .doorman import Doorman, HeldMessage, Kept, each, too_much

if TYPE_CHECKING:
    import logging

    from .tracking import TrackedKernel

#: Seconds after which a cell runs anyway; a slow kernel may need as long to start.
_LONGEST: Final = 10.0


class Unheard:
    """Keeps what pages want executed meanwhile.

    Parameters
    ----------
    doorman
        Decides what becomes of it then.
    log
        The server's.
    """

    def __init__(self, doorman: Doorman, log: logging.Logger) -> None:
        self._doorman = doorman
        self._log = log
        #: By the ids of kernels that are not heard yet.
        self._held: dict[str, Kept] = {}

    def started(self, kernel: TrackedKernel) -> None:
        """A kernel runs anew."""
        watch = kernel.watch
        if watch is None or not watch.is_connecting:
            return
        kernel_id = kernel.kernel_id
        held = self._held.setdefault(kernel_id, Kept())
        watch.when_connected(lambda: self._release(kernel_id, held))

    def holds(self, kernel_id: str, message: HeldMessage) -> bool:
        """Whether a message is kept; otherwise it goes to the kernel now."""
        held = self._held.get(kernel_id)
        if held is None or message.execute_id is None:
            return False
        if not held.add(message):
            message.refuse(too_much("start"))
        elif len(held) == 1:
            asyncio.get_running_loop().call_later(_LONGEST, self._release, kernel_id, held)
        return True

    def taken(self, kernel_id: str) -> list[HeldMessage]:
        """What is kept for a kernel; it is kept no longer."""
        return self._held[kernel_id].take() if kernel_id in self._held else []

    def ended(self, kernel_id: str) -> list[HeldMessage]:
        """What was kept for a kernel that is about to end."""
        return self._held.pop(kernel_id, Kept()).take()

    def _release(self, kernel_id: str, held: Kept) -> None:
        if self._held.get(kernel_id) is not held:
            return
        del self._held[kernel_id]

        def deliver(message: HeldMessage) -> None:
            if not self._doorman.holds(kernel_id, message):
                message.deliver()

        each(held, deliver, self._log)
