"""What a writer reads: files and folders of an image directory, as sources of blocks.

The writer knows only :class:`Source`, so that page data may later come from
elsewhere than a file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import CkptError
from .index import DirEntry, Segment

_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


class Layout(NamedTuple):
    """Which addresses the pages of a file have: they find each other from save to save by them.

    `space` is a name for the addresses that is the same in the next save, `segments` are
    (file offset, length, address) in bytes, multiples of a page, in order of the offset and
    without overlap. Pages in none of them are stored anew each time.
    """

    space: str
    segments: Sequence[Segment]


Layouts = Callable[[bytes], Layout | None]


class Source(Protocol):
    """One file to store. `size` and extents are bytes; ``read_into`` is called from threads.

    Where `layout` is ``None`` the address of a page is its offset in the file.
    """

    path: bytes
    mode: int
    mtime_ns: int
    size: int
    extents: list[tuple[int, int]] | None
    layout: Layout | None

    def open(self) -> None:
        """Get ready for reading; the writer calls it before the first block."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` on."""

    def done_with(self, offset: int, length: int) -> None:
        """Forget a range that is stored; only a hint."""

    def close(self) -> None:
        """Let go; the writer calls it after the last block, and on failure."""


class FileSource:
    """A regular file on disk; with `consume` its space is freed as it is stored."""

    def __init__(
        self,
        path: bytes,
        file: bytes,
        found: os.stat_result,
        *,
        layout: Layout | None = None,
        consume: bool = False,
    ) -> None:
        self.path = path
        self.layout = layout
        self.mode = stat.S_IMODE(found.st_mode) & 0o777
        self.mtime_ns = found.st_mtime_ns
        self.size = found.st_size
        self.extents: list[tuple[int, int]] | None = None
        self._file = file
        self._consume = consume
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
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        if self._consume:
            try:
                self._fd = os.open(self._file, os.O_RDWR | flags)
                return
            except PermissionError:
                self._consume = False  # a read-only file: reading it has to do
        self._fd = os.open(self._file, os.O_RDONLY | flags)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """See :class:`Source`."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self._fd, [buffer[done:]], offset + done)
            if got == 0:
                raise CkptError(
                    "internal",
                    "A file of the image became shorter while it was stored.",
                    hint="Save again.",
                    details=os.fsdecode(self.path),
                )
            done += got

    def done_with(self, offset: int, length: int) -> None:
        """See :class:`Source`."""
        if self._consume:
            # A file system that cannot do it says so, and nothing is lost.
            _libc.fallocate(
                self._fd, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length)
            )

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


def scan(
    root: Path, *, layouts: Layouts | None = None, consume: bool = False
) -> Iterator[DirEntry | FileSource]:
    """Walk an image directory, parents before what is in them, names in order.

    Parameters
    ----------
    root
        The directory.
    layouts
        Gives the layout of a file, by its path relative to `root`.
    consume
        See :class:`FileSource`.

    Raises
    ------
    CkptError
        ``internal`` for anything but folders and regular files.
    OSError
        Not readable.
    """
    yield from _scan(os.fsencode(root), b"", layouts, consume)


def _scan(
    folder: bytes, prefix: bytes, layouts: Layouts | None, consume: bool
) -> Iterator[DirEntry | FileSource]:
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        found = entry.stat(follow_symlinks=False)
        path = prefix + entry.name
        if stat.S_ISDIR(found.st_mode):
            yield DirEntry(path=path, mode=stat.S_IMODE(found.st_mode) & 0o777)
            yield from _scan(entry.path, path + b"/", layouts, consume)
        elif stat.S_ISREG(found.st_mode):
            layout = layouts(path) if layouts is not None else None
            yield FileSource(path, entry.path, found, layout=layout, consume=consume)
        else:
            raise CkptError(
                "internal",
                "The image holds something that is neither a file nor a folder.",
                hint="Save again.",
                details=os.fsdecode(path),
            )
