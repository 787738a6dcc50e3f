"""Turns for saves of all servers of a node: so many at a time, whoever's they are."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

#: Seconds between two looks for a free turn.
_LOOK: Final = 0.1


@asynccontextmanager
async def turn(
    folder: Path, count: int, *, wait: float, still_wanted: Callable[[], None]
) -> AsyncIterator[bool]:
    """Hold one of the node's turns while in the block; false where it was not waited for longer.

    A turn is a lock on one of `count` files, which ends with its process, however that ends. The
    files belong to whoever made them first; to lock one it need only be readable. Somebody who
    holds all turns for ever delays others by `wait`, and does no more.

    Parameters
    ----------
    folder
        Where the files are, the same for all servers of the node; made where it is missing, open to
        everybody as ``/tmp`` is. Where they are there already it need not be writable.
    count
        How many turns there are; 0: no limit.
    wait
        Most seconds to wait for one.
    still_wanted
        Called while waiting; what it raises ends that.
    """
    if count == 0:
        yield True
        return
    with suppress(OSError):
        folder.mkdir()
        folder.chmod(0o1777)
    until = time.monotonic() + (wait if _usable(folder) else 0)
    while (held := _take(folder, count)) is None and time.monotonic() < until:
        still_wanted()
        await asyncio.sleep(_LOOK)
    try:
        yield held is not None
    finally:
        if held is not None:
            os.close(held)


def _usable(folder: Path) -> bool:
    """Whether there can be turns at all: not in another user's folder without any, for example."""
    return os.access(folder, os.W_OK | os.X_OK) or any(folder.glob("*.lock"))


def _take(folder: Path, count: int) -> int | None:
    """The descriptor of a lock that was free; ``None`` where none was."""
    for number in range(count):
        try:
            file = _open(folder / f"{number}.lock")
        except OSError:  # another user's who has closed it to us: as if it were taken
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
        else:
            return file
    return None


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(path, flags)
    except FileNotFoundError:
        # Two calls: Linux lets nobody open another user's file with O_CREAT in such a folder.
        try:
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            file = os.open(path, flags)
        else:
            os.fchmod(file, 0o644)  # whatever the umask
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no file")
    return file
