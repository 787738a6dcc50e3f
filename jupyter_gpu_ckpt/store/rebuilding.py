"""A file of a state while it is read back: what it is made of, and where it is written."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from .codec import BLOB, BLOB_PAGES, PAGE
from .index import FileEntry, Index, Run

# Of files of so many bytes, pieces of so many are written past the page cache: memory for the
# cache costs more time than writing, and others lose theirs. The disk is waited for then.
_DIRECT_FILE, _DIRECT_PIECE = 16 << 20, 256 << 10
# After so many bytes it has to have taken them at so many a second, or the rest is left to the
# cache, which may take all of it at once.
_TRIAL, _QUICK = 64 << 20, 300e6

_libc = ctypes.CDLL(None, use_errno=True)


class Reading:
    """A file being read back, and perhaps written to `path`."""

    def __init__(self, index: Index, entry: FileEntry, path: bytes) -> None:
        self.entry = entry
        self.path = path
        self._runs = index.runs
        self._begin, self._end = entry.first_run, entry.first_run + entry.runs
        self.left = 0
        self._fd = self._direct = -1
        self._writing = threading.Lock()
        self._counting = threading.Lock()
        self._past_cache = False
        self._since = 0.0
        self._written = 0

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
        """Make the file, with the space that its data will take.

        Raises
        ------
        OSError
            It cannot be made, or the space is not there.
        """
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._fd, self.entry.size)
        if self.entry.size < _DIRECT_FILE:
            return
        try:
            self._direct = os.open(self.path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return
        self._reserve()
        self._past_cache = True
        self._since = time.monotonic()

    def _reserve(self) -> None:
        """Have room for large pieces: only there may several threads write at once."""
        runs, begin, end = self._runs, 0, 0
        for at in range(self._begin, self._end + 1):
            page = runs.page[at] if at < self._end else -1
            if page == end:
                end += runs.count[at]
                continue
            if end - begin >= BLOB_PAGES:
                offset, stop = begin * PAGE, min(end * PAGE, self.entry.size)
                if _libc.fallocate(
                    self._fd, 0, ctypes.c_int64(offset), ctypes.c_int64(stop - offset)
                ):
                    number = ctypes.get_errno()
                    if number == errno.ENOSPC:
                        raise OSError(number, os.strerror(number), os.fsdecode(self.path))
                    return  # not every file system can do it, and none has to
            if at < self._end:
                begin, end = page, page + runs.count[at]

    def write(self, data: memoryview, offset: int) -> None:
        """Write pages; the last of the file may be whole, :meth:`finish` cuts it off."""
        if self._past_cache and len(data) >= _DIRECT_PIECE:
            done = self._write_directly(data, offset)
            data, offset = data[done:], offset + done
        # The kernel lets one thread at a time write to a file, and the others spin:
        # waiting here leaves the processor to those that decompress.
        with self._writing:
            while data:
                done = os.pwrite(self._fd, data, offset)
                data, offset = data[done:], offset + done

    def _write_directly(self, data: memoryview, offset: int) -> int:
        try:
            done = os.pwrite(self._direct, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._past_cache = False  # wants other alignment
            return 0
        with self._counting:
            self._written += done
            seconds = time.monotonic() - self._since
            if self._written >= _TRIAL and self._written < _QUICK * seconds:
                self._past_cache = False
        return done

    def finish(self) -> None:
        """Give the file its size, mode and time."""
        os.ftruncate(self._fd, self.entry.size)
        os.fchmod(self._fd, self.entry.mode & 0o777)
        os.utime(self._fd, ns=(self.entry.mtime_ns, self.entry.mtime_ns))
        self.close()

    def close(self) -> None:
        """Let go of the file, also of one that is not whole."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1
