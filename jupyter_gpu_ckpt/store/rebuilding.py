"""A file of a state while it is read back: what it is made of, and where it is written."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from .codec import BLOB, BLOB_PAGES
from .index import FileEntry, Index, Run


class Reading:
    """A file being read back, and perhaps written to `path`."""

    def __init__(self, index: Index, entry: FileEntry, path: bytes) -> None:
        self.entry = entry
        self.path = path
        self._runs = index.runs
        self._begin, self._end = entry.first_run, entry.first_run + entry.runs
        self.fd = -1
        self._writing = threading.Lock()
        self.left = 0

    def windows(self) -> Iterator[int]:
        """Numbers of the mebibytes that are not all zeros."""
        done = 0
        runs = self._runs
        for at in range(self._begin, self._end):
            page = runs.page[at]
            first, end = page // BLOB_PAGES, -(-(page + runs.count[at]) // BLOB_PAGES)
            if end > done:
                yield from range(max(first, done), end)
                done = end

    def pieces(self, window: int) -> Iterator[Run]:
        """What a window is made of, with pages counted from its beginning."""
        runs, first = self._runs, window * BLOB_PAGES
        at = max(self._begin, bisect_right(runs.page, first, self._begin, self._end) - 1)
        while at < self._end and (page := runs.page[at]) < first + BLOB_PAGES:
            begin = max(page, first)
            stop = min(page + runs.count[at], first + BLOB_PAGES)
            if begin < stop:
                yield Run(begin - first, stop - begin, runs.blob[at], runs.first[at] + begin - page)
            at += 1

    def blobs(self, first: int = 0) -> Iterator[int]:
        """The blobs of all pieces from a window on."""
        runs = self._runs
        at = bisect_left(runs.page, first * BLOB_PAGES, self._begin, self._end)
        if at > self._begin and runs.page[at - 1] + runs.count[at - 1] > first * BLOB_PAGES:
            yield runs.blob[at - 1]
        for position in range(at, self._end):
            page, blob = runs.page[position], runs.blob[position]
            yield blob
            if page // BLOB_PAGES != (page + runs.count[position] - 1) // BLOB_PAGES:
                yield blob

    def window_size(self, window: int) -> int:
        return min(BLOB, self.entry.size - window * BLOB)

    def create(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(self.path, flags, 0o600)
        if self.entry.size:
            os.ftruncate(self.fd, self.entry.size)

    def write(self, data: memoryview, offset: int) -> None:
        # The kernel lets one thread at a time write to a file, and the others spin:
        # waiting here leaves the processor to those that decompress.
        with self._writing:
            while data:
                done = os.pwrite(self.fd, data, offset)
                data, offset = data[done:], offset + done

    def finish(self) -> None:
        os.fchmod(self.fd, self.entry.mode & 0o777)
        os.utime(self.fd, ns=(self.entry.mtime_ns, self.entry.mtime_ns))
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
