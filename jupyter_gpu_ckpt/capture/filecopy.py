"""Copying and comparing file contents by descriptor, holes kept."""

from __future__ import annotations

import errno
import os
from typing import Final

_CHUNK: Final = 1 << 20
_LARGEST: Final = 1 << 30  # one call's share; keeps interruptions possible
_CANNOT: Final = {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}


def copy_sparse(source: int, target: int) -> int:
    """Copy everything of one descriptor to an empty one; the size in bytes.

    Holes stay holes; blocks are shared where the file system can (reflinks).
    """
    size = os.fstat(source).st_size
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            if error.errno != errno.EINVAL:
                raise
            start, end = at, size  # a file system that knows no holes
        else:
            end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        if start >= size:
            break
        if not _copy_range(source, target, start, end):
            break
        at = end
    os.ftruncate(target, size)
    return size


def _copy_range(source: int, target: int, start: int, end: int) -> bool:
    """Whether all of it was there to copy (a file may shrink meanwhile)."""
    in_kernel = True
    while start < end:
        count = min(end - start, _LARGEST)
        if in_kernel:
            try:
                done = os.copy_file_range(source, target, count, start, start)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                in_kernel = False
                continue
        else:
            os.lseek(target, start, os.SEEK_SET)
            done = os.sendfile(target, source, start, count)
        if done == 0:
            return False
        start += done
    return True


def same_content(first: int, second: int) -> bool:
    """Whether two regular files hold the same bytes."""
    if os.fstat(first).st_size != os.fstat(second).st_size:
        return False
    at = 0
    while data := os.pread(first, _CHUNK, at):
        if data != os.pread(second, len(data), at):
            return False
        at += len(data)
    return True
