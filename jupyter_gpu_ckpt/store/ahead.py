"""Pieces of a file in order, read ahead by threads in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final

from ..errors import CkptError
from .codec import Scratch

#: Pieces that stay as they are beside the one that was taken last.
KEPT: Final = 1
#: Pieces that are ready at most, beyond one for each thread.
_READY: Final = 2


class Ahead:
    """Iterates over `count` pieces, which threads get ready before they are asked for.

    A piece is valid until the next but one is taken. As a context manager it ends its
    threads; they are idle while nobody takes pieces.

    Parameters
    ----------
    read
        Called in a thread with a piece's number and buffers that are the piece's own while it
        is valid; returns the piece.
    count
        How many pieces there are.
    workers, level
        Number of threads; zstd level for their buffers.
    cancel
        Set it to have the iteration end with ``CkptError("cancelled")``.
    """

    def __init__(
        self,
        read: Callable[[int, Scratch], memoryview],
        count: int,
        *,
        workers: int,
        level: int,
        cancel: threading.Event | None,
    ) -> None:
        self._read = read
        self._count = count
        self._cancel = cancel
        workers = min(workers, count)
        self._buffers = [Scratch(level) for _ in range(min(count, workers + _READY + KEPT + 1))]
        self._changed = threading.Condition()
        self._ready: dict[int, memoryview | BaseException] = {}
        self._begun = 0
        self._given = 0
        self._over = False
        self._threads = [
            threading.Thread(target=self._work, name=f"gpu-ckpt-ahead-{n}", daemon=True)
            for n in range(workers)
        ]

    def __enter__(self) -> Iterator[memoryview]:
        for thread in self._threads:
            thread.start()
        return self._pieces()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _pieces(self) -> Iterator[memoryview]:
        for number in range(self._count):
            with self._changed:
                self._given = number
                self._changed.notify_all()
                while number not in self._ready:
                    self._changed.wait()
                piece = self._ready.pop(number)
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_go_on)
                if self._over or self._begun == self._count:
                    return
                number = self._begun
                self._begun += 1
            piece: memoryview | BaseException
            try:
                if self._cancel is not None and self._cancel.is_set():
                    raise CkptError("cancelled", "The operation was cancelled.")
                piece = self._read(number, self._buffers[number % len(self._buffers)])
            except BaseException as error:
                # Not swallowed: who takes the pieces gets it in the piece's place.
                piece = error
            with self._changed:
                self._ready[number] = piece
                self._changed.notify_all()

    def _may_go_on(self) -> bool:
        """Whether there is nothing left, or a buffer for the next piece that is in no use."""
        if self._over or self._begun == self._count:
            return True
        before = self._begun - len(self._buffers)  # who had its buffer
        return before < 0 or before < self._given - KEPT
