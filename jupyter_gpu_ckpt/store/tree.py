"""What a writer reads: files and folders of an image directory, as sources of blocks.

The writer knows only :class:`Source`, so that page data may later come from
elsewhere than a file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..errors import CkptError
from .manifest import DirEntry


class Source(Protocol):
    """One file to store. `size` and extents are bytes; ``read_into`` is called from threads."""

    path: bytes
    mode: int
    mtime_ns: int
    size: int
    extents: list[tuple[int, int]] | None

    def open(self) -> None:
        """Get ready for reading; the writer calls it before the first block."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` on."""

    def close(self) -> None:
        """Let go; the writer calls it after the last block, and on failure."""


class FileSource:
    """A regular file on disk."""

    def __init__(self, path: bytes, file: bytes, found: os.stat_result) -> None:
        self.path = path
        self.mode = stat.S_IMODE(found.st_mode) & 0o777
        self.mtime_ns = found.st_mtime_ns
        self.size = found.st_size
        self.extents: list[tuple[int, int]] | None = None
        self._file = file
        self._fd = -1
        # Fewer blocks on disk than bytes: the only files worth asking about holes.
        if found.st_blocks * 512 < found.st_size:
            self.open()
            try:
                self.extents = data_extents(self._fd, self.size)
            finally:
                self.close()

    def open(self) -> None:
        """See :class:`Source`."""
        self._fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """See :class:`Source`."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self._fd, [buffer[done:]], offset + done)
            if got == 0:
                raise CkptError(
                    "internal",
                    "A file of the image became shorter while it was stored.",
                    details=os.fsdecode(self.path),
                )
            done += got

    def close(self) -> None:
        """See :class:`Source`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def data_extents(fd: int, size: int) -> list[tuple[int, int]] | None:
    """Where a file has data: (offset, length) in bytes, or ``None`` if it has no holes."""
    extents: list[tuple[int, int]] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        extents.append((start, end - start))
        at = end
    return None if extents == [(0, size)] else extents


def scan(root: Path) -> Iterator[DirEntry | FileSource]:
    """Walk an image directory, parents before what is in them, names in order.

    Raises
    ------
    CkptError
        ``internal`` for anything but folders and regular files.
    OSError
        Not readable.
    """
    yield from _scan(os.fsencode(root), b"")


def _scan(folder: bytes, prefix: bytes) -> Iterator[DirEntry | FileSource]:
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        found = entry.stat(follow_symlinks=False)
        path = prefix + entry.name
        if stat.S_ISDIR(found.st_mode):
            yield DirEntry(path=path, mode=stat.S_IMODE(found.st_mode) & 0o777)
            yield from _scan(entry.path, path + b"/")
        elif stat.S_ISREG(found.st_mode):
            yield FileSource(path, entry.path, found)
        else:
            raise CkptError(
                "internal",
                "The image holds something that is neither a file nor a folder.",
                details=os.fsdecode(path),
            )
