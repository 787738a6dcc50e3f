"""Putting one thing into a folder that is held by descriptor, for :mod:`.put_back`."""

from __future__ import annotations

import os
import stat

from .filecopy import copy_sparse
from .node_local import NodeLocalEntry


def look(folder: int, name: str) -> os.stat_result | None:
    """What is there, if anything; a link is not followed."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_trusted(status: os.stat_result, entry: NodeLocalEntry) -> bool:
    """Whether what is there is as safe to use as what was saved.

    Anybody may make any name in ``/tmp``: a kernel must not come back with a library, a
    document or a folder that another user has put in the place of its own.
    """
    return status.st_uid in (0, os.geteuid(), entry.uid)


def move_aside(folder: int, name: str, path: str, warnings: list[str]) -> None:
    """Rename what is there, if anything, to a name that is free."""
    if look(folder, name) is None:
        return
    aside = free_name(folder, name)
    os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
    warnings.append(f"{path} was in the way and is now {aside}.")


def free_name(folder: int, name: str) -> str:
    """A name beside it that is free."""
    number = 1
    while look(folder, f"{name}.before-restore-{number}") is not None:
        number += 1
    return f"{name}.before-restore-{number}"


def copy_to_new(source: int, folder: int, name: str, like: NodeLocalEntry | os.stat_result) -> None:
    """Copy to a new file, whole or not at all."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    target = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        copy_sparse(source, target)
        own(target, like)
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(target)


def own(fd: int, like: NodeLocalEntry | os.stat_result) -> None:
    """Owner, permissions and time. Owner first: changing it clears set-id bits."""
    if isinstance(like, NodeLocalEntry):
        uid, gid, mode, mtime_ns = like.uid, like.gid, like.mode, like.mtime_ns
    else:
        uid, gid, mode, mtime_ns = like.st_uid, like.st_gid, like.st_mode, like.st_mtime_ns
    if os.geteuid() == 0:
        os.fchown(fd, uid, gid)
    os.fchmod(fd, stat.S_IMODE(mode))
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.utime(fd, ns=(mtime_ns, mtime_ns))
