"""Worker threads over a stream of blocks: bounded memory, progress, cancel, first error wins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ..errors import CkptError
from ..progress import Meter, Progress
from .codec import Scratch

Item = TypeVar("Item")

# Bytes of a thread's buffers: plain, encoded and encrypted, and what the libraries take.
_A_THREAD = 4 << 20


def worker_count(wanted: int | None, memory: int) -> int:
    """Threads to use: a few more than cores, because some wait for the disk.

    Parameters
    ----------
    wanted
        Not more than this; ``None`` for what fits the machine.
    memory
        Bytes that buffers may take, of which each thread needs some.
    """
    if wanted is None:
        wanted = min(16, len(os.sched_getaffinity(0)) + 2)
    return max(1, min(wanted, memory // (4 * _A_THREAD)))


class Pool(Generic[Item]):
    """Runs `work` on every item; each thread takes the next one when it is free.

    Parameters
    ----------
    work
        Called with an item and the thread's buffers; returns the bytes done, for progress.
    total
        Bytes that progress goes up to.
    workers, level
        Number of threads; zstd level for their buffers.
    progress
        Called with (bytes done, total); see :class:`~jupyter_gpu_ckpt.progress.Meter`.
    cancel
        Ends the run with ``CkptError("cancelled")`` within about a block a thread.
    """

    def __init__(
        self,
        work: Callable[[Item, Scratch], int],
        *,
        total: int,
        workers: int,
        level: int,
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> None:
        self._work = work
        self._workers = workers
        self._level = level
        self._meter = Meter(total, progress)
        self._cancel = cancel
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, items: Iterator[Item]) -> None:
        """Work through `items`, which is advanced by one thread at a time.

        Raises
        ------
        CkptError
            ``cancelled``.
        Exception
            Whatever `work` or `items` raised first.
        """
        threads = [
            threading.Thread(target=self._loop, args=(items,), name=f"gpu-ckpt-store-{n}")
            for n in range(self._workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        self._meter.end()

    def _loop(self, items: Iterator[Item]) -> None:
        scratch = Scratch(self._level)
        try:
            while True:
                with self._lock:
                    if self._error is not None:
                        return
                    if self._cancel is not None and self._cancel.is_set():
                        raise CkptError("cancelled", "The operation was cancelled.")
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                self._meter.add(self._work(item, scratch))
        except BaseException as error:
            # Not swallowed: run() raises it in the caller's thread.
            with self._lock:
                if self._error is None:
                    self._error = error
