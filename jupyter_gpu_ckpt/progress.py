"""How far a transfer has come, said now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

#: Called with what is done and the total, in bytes.
Progress = Callable[[int, int], None]

_SECONDS: Final = 0.1


class Meter:
    """Counts from any thread, and says so at most every 0.1 s, from one thread at a time.

    Parameters
    ----------
    total
        Bytes that the count goes up to; more are not told.
    progress
        Called with (bytes done, total); ``None``: nobody wants to know.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._said = 0.0

    def add(self, count: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._progress is None or now - self._said < _SECONDS:
                return
            self._said = now
            self._progress(min(self._done, self._total), self._total)

    def end(self) -> None:
        """All is done."""
        if self._progress is not None:
            self._progress(self._total, self._total)
