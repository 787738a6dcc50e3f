"""Decoded blobs that several parts of a state need, in bounded memory."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from .codec import BLOB, PAGE, Scratch

Load = Callable[[int, memoryview, Scratch], None]


class _Entry:
    def __init__(self, buffer: bytearray, size: int) -> None:
        self.buffer = buffer
        self.view = memoryview(buffer)[:size]
        self.users = 0
        self.ready = False
        self.error: BaseException | None = None

    def is_done(self) -> bool:
        return self.ready or self.error is not None


class BlobCache:
    """Blobs by their number, each decoded by the thread that needs it first.

    A blob is kept until nobody is expected to need it again; when memory is short, the one
    that was used longest ago goes first.

    Parameters
    ----------
    pages
        Number of pages of each blob.
    load
        Called with a blob, memory of its size, and the thread's buffers.
    memory
        Bytes to keep; exceeded by what threads are using just now.
    """

    def __init__(self, pages: array[int], load: Load, memory: int) -> None:
        self._pages = pages
        self._load = load
        self._memory = memory
        self._held = 0
        self._expected = array("I", bytes(4 * len(pages)))
        self._changed = threading.Condition()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._spare: list[bytearray] = []

    def expect(self, blobs: Iterable[int]) -> None:
        """Say which blobs will be used, each as often as it is named."""
        with self._changed:
            for blob in blobs:
                self._expected[blob] += 1

    def forget(self, blobs: Iterable[int]) -> None:
        """Take back what was expected and has not happened."""
        with self._changed:
            for blob in blobs:
                self._expect_less(blob)

    def only_use(self, blob: int) -> bool:
        """Whether a blob is not here and will be used but once, so need not go through here."""
        with self._changed:
            if self._expected[blob] > 1 or blob in self._entries:
                return False
            self._expect_less(blob)
            return True

    @contextmanager
    def use(self, blob: int, scratch: Scratch) -> Iterator[memoryview]:
        """Get a blob; it stays as it is until the context ends.

        Raises
        ------
        Exception
            Whatever `load` raised, in every thread that waited for it.
        """
        entry = self._acquire(blob, scratch)
        try:
            yield entry.view
        finally:
            self._release(blob, entry)

    def _acquire(self, blob: int, scratch: Scratch) -> _Entry:
        with self._changed:
            there = self._entries.get(blob)
            if there is not None:
                there.users += 1
                self._entries.move_to_end(blob)
                self._changed.wait_for(there.is_done)
                if there.error is None:
                    return there
                there.users -= 1
                raise there.error
            entry = self._entries[blob] = self._new(self._pages[blob] * PAGE)
            entry.users = 1
        try:
            self._load(blob, entry.view, scratch)
        except BaseException as error:
            with self._changed:
                entry.error = error
                self._held -= len(entry.buffer)
                del self._entries[blob]
                self._changed.notify_all()
            raise
        with self._changed:
            entry.ready = True
            self._changed.notify_all()
        return entry

    def _new(self, size: int) -> _Entry:
        """Memory for a blob; the lock is held."""
        # Full-size memory is used again and again: new memory would cost page faults.
        full = size > BLOB // 2
        need = BLOB if full else size
        while self._held + need > self._memory and self._drop_oldest():
            pass
        self._held += need
        if full:
            return _Entry(self._spare.pop() if self._spare else bytearray(BLOB), size)
        return _Entry(bytearray(size), size)

    def _drop_oldest(self) -> bool:
        for blob, entry in self._entries.items():
            if entry.ready and not entry.users:
                self._drop(blob)
                return True
        return False

    def _drop(self, blob: int) -> None:
        entry = self._entries.pop(blob)
        self._held -= len(entry.buffer)
        if len(entry.buffer) == BLOB:
            self._spare.append(entry.buffer)

    def _release(self, blob: int, entry: _Entry) -> None:
        with self._changed:
            entry.users -= 1
            self._expect_less(blob)
            unneeded = not self._expected[blob] or self._held > self._memory
            if unneeded and not entry.users and self._entries.get(blob) is entry:
                self._drop(blob)

    def _expect_less(self, blob: int) -> None:
        if self._expected[blob]:
            self._expected[blob] -= 1
