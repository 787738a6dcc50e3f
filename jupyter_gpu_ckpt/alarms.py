"""One timer for many: wakes each of its clients when its time has come."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Alarms(Generic[Key]):
    """A heap of times and a single timer of the event loop for the first of them.

    Parameters
    ----------
    ring
        Called with a key when its time has come; once, until it is set again.
    """

    def __init__(self, ring: Callable[[Key], None]) -> None:
        self._ring = ring
        self._heap: list[tuple[float, int, Key]] = []
        self._numbers = itertools.count()
        self._set: dict[Key, tuple[float, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def is_set(self, key: Key) -> bool:
        """Whether the key will be rung for."""
        return key in self._set

    def set_by(self, key: Key, when: float) -> None:
        """Ring at ``when`` (monotonic seconds), or before if that is already so.

        Who is woken too early looks again, which costs less than moving an alarm with every
        message of a kernel.
        """
        known = self._set.get(key)
        if known is not None and known[0] <= when:
            return
        entry = (when, next(self._numbers))
        self._set[key] = entry
        heapq.heappush(self._heap, (*entry, key))
        self._arm()

    def clear(self, key: Key) -> None:
        """Do not ring for this key."""
        self._set.pop(key, None)

    def close(self) -> None:
        """Ring no more."""
        self._heap.clear()
        self._set.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        """Have the timer of the loop go off for the first alarm that still counts."""
        while self._heap and self._set.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            delay = max(0.0, self._heap[0][0] - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._go_off)

    def _go_off(self) -> None:
        self._timer = None
        now = time.monotonic()
        due = []
        while self._heap and self._heap[0][0] <= now:
            *entry, key = heapq.heappop(self._heap)
            if self._set.get(key) == tuple(entry):
                del self._set[key]
                due.append(key)
        self._arm()
        for key in due:
            self._ring(key)
