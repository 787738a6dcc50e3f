"""Whose rights on files a thread has: a service that runs as root reads users' stores as they."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

#: Asks without changing anything: there is no such id.
_NONE: Final = 0xFFFFFFFF
_LIBC: Final[Any] = ctypes.CDLL(None)


def file_user() -> int:
    """User id with which this thread acts on files; see :func:`acting_as_owner`."""
    return int(_LIBC.setfsuid(ctypes.c_uint(_NONE))) & _NONE


@contextmanager
def acting_as_owner(folder: Path) -> Iterator[None]:
    """In the block, root acts on files as the user whom a folder belongs to.

    So nothing that the user puts there, such as a symbolic link, leads to what she could not read
    or remove herself. For others than root, and where there is no folder, nothing changes. It
    counts for this thread, and for those that it starts.

    Raises
    ------
    OSError
        The folder cannot be looked at, or the rights cannot be given up.
    """
    if os.geteuid() != 0:
        yield
        return
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        yield
        return
    if found.st_uid == 0 or not stat.S_ISDIR(found.st_mode):
        yield
        return
    # The group first: who is not root any more may not change it.
    group = int(_LIBC.setfsgid(ctypes.c_uint(found.st_gid))) & _NONE
    user = int(_LIBC.setfsuid(ctypes.c_uint(found.st_uid))) & _NONE
    try:
        if file_user() != found.st_uid:
            raise PermissionError("the rights of another user cannot be given up")
        yield
    finally:
        _LIBC.setfsuid(ctypes.c_uint(user))
        _LIBC.setfsgid(ctypes.c_uint(group))
