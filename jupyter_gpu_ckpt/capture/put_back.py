"""Puts a state's node-local files where they were, without following or losing anything."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ..errors import CkptError
from . import procfs
from .filecopy import copy_sparse, same_content
from .images import is_below, rename_files
from .node_local import NodeLocalEntry, copy_path
from .placing import copy_to_new, free_name, is_trusted, look, move_aside, own

_SHARED_MEMORY: Final = "/dev/shm"
_DATABASE: Final = b"SQLite format 3\0"
_BESIDE_DATABASE: Final = ("-journal", "-wal", "-shm")
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def put_back(
    images_dir: Path, entries: Sequence[NodeLocalEntry], *, dirs: Sequence[str] | None = None
) -> list[str]:
    """Put node-local files, directories and FIFOs back; called before CRIU restores.

    Symbolic links in the way are never followed, and nothing is lost: what is in
    the way and differs, or belongs to a user whom the kernel did not trust when it was saved,
    is renamed to ``NAME.before-restore-N``. A SQLite database that is in the way is copied to that
    name, where nothing else has it open, and then written over.

    Parameters
    ----------
    images_dir
        The image directory with its ``node-local`` copies.
    entries
        From the state's manifest.
    dirs
        The node-local directories of this node's configuration; entries elsewhere are
        refused. ``None`` accepts the directories that the entries name.

    Returns
    -------
    list of str
        Warnings for the user, such as files that were moved aside.

    Raises
    ------
    CkptError
        ``not_restorable`` when a place cannot be written or holds another user's file that
        cannot be moved, ``no_space``, or
        ``state_damaged`` when an entry points outside of its directory or its copy is missing.
    """
    allowed = None if dirs is None else {os.path.realpath(directory) for directory in dirs}
    warnings: list[str] = []
    paths = {entry.path for entry in entries}
    for entry in entries:
        _check(entry, allowed)
    links = [entry.path for entry in entries if entry.link_remap]
    if links:
        rename_files(images_dir, {path: _own_link(images_dir, path) for path in links})
    for entry in _with_own_links(images_dir, entries):
        try:
            with _parent(entry, warnings) as (folder, name):
                changed = _PUT[entry.kind](images_dir, entry, folder, name, warnings)
                if changed and _is_database(folder, name):
                    _move_leftovers(entry, folder, name, paths, warnings)
        except OSError as error:
            raise _cannot(entry.path, error) from error
    return warnings


def clean_up(images_dir: Path, entries: Sequence[NodeLocalEntry]) -> None:
    """Remove the ``link_remap.*`` links that were put back; after a restore, failed or not."""
    for entry in _with_own_links(images_dir, entries):
        if not entry.link_remap:
            continue
        _check(entry, None)
        with contextlib.suppress(OSError), _parent(entry, None) as (folder, name):
            os.unlink(name, dir_fd=folder)


def _own_link(images_dir: Path, path: str) -> str:
    """A link's name in this restore alone: kernels that are alike have links of the same names."""
    place = os.fsencode(os.path.abspath(images_dir))
    return f"{path}.{hashlib.blake2s(place, digest_size=6).hexdigest()}"


def _with_own_links(
    images_dir: Path, entries: Sequence[NodeLocalEntry]
) -> Iterator[NodeLocalEntry]:
    links = {entry.path for entry in entries if entry.link_remap}
    for entry in entries:
        if entry.path in links:
            entry = msgspec.structs.replace(entry, path=_own_link(images_dir, entry.path))
        if entry.same_as in links:
            entry = msgspec.structs.replace(entry, same_as=_own_link(images_dir, entry.same_as))
        yield entry


def _check(entry: NodeLocalEntry, allowed: set[str] | None) -> None:
    """Refuse an entry that does not stay where it may be."""
    for path in (entry.path, entry.base, entry.same_as or entry.path):
        if not path.startswith("/") or os.path.normpath(path) != path or "\0" in path:
            raise _damaged(entry)
    inside = is_below(entry.path, entry.base) and entry.path != entry.base
    if entry.same_as is not None and not is_below(entry.same_as, entry.base):
        inside = False
    name = os.path.basename(entry.path)
    known = allowed is None or entry.base in allowed
    if not inside or not (known or (entry.link_remap and name.startswith("link_remap."))):
        raise _damaged(entry)


def _damaged(entry: NodeLocalEntry) -> CkptError:
    return CkptError(
        "state_damaged",
        f"The saved state names a file that it must not touch: {entry.path}.",
        hint="Restore an older state of this kernel.",
    )


def _cannot(path: str, error: OSError) -> CkptError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CkptError(
            "no_space",
            f"There is not enough disk space to put {path} back.",
            hint="Free disk space there, then restore.",
            details=str(error),
        )
    return CkptError(
        "not_restorable",
        f"The file {path}, which the kernel has open, cannot be put back: {error.strerror}.",
        hint="Make its folder writable for you, then restore.",
        details=str(error),
    )


@contextlib.contextmanager
def _parent(entry: NodeLocalEntry, warnings: list[str] | None) -> Iterator[tuple[int, str]]:
    """The folder of an entry as a descriptor, missing ones made, and the name in it.

    With ``warnings`` ``None`` nothing is made or moved.
    """
    *folders, name = os.path.relpath(entry.path, entry.base).split("/")
    folder = os.open(entry.base, _DIRECTORY)
    try:
        path = entry.base
        for part in folders:
            path = os.path.join(path, part)
            inner = _enter(folder, part, path, warnings)
            os.close(folder)
            folder = inner
        yield folder, name
    finally:
        os.close(folder)


def _enter(folder: int, name: str, path: str, warnings: list[str] | None) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        if warnings is None:
            raise
    move_aside(folder, name, path, warnings)
    os.mkdir(name, 0o700, dir_fd=folder)
    return os.open(name, _DIRECTORY, dir_fd=folder)


def _put_directory(
    images_dir: Path, entry: NodeLocalEntry, folder: int, name: str, warnings: list[str]
) -> bool:
    status = look(folder, name)
    if status is not None and stat.S_ISDIR(status.st_mode) and is_trusted(status, entry):
        return False
    move_aside(folder, name, entry.path, warnings)
    os.mkdir(name, 0o700, dir_fd=folder)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    made = os.open(name, flags, dir_fd=folder)
    try:
        own(made, entry)
    finally:
        os.close(made)
    return True


def _put_file(
    images_dir: Path, entry: NodeLocalEntry, folder: int, name: str, warnings: list[str]
) -> bool:
    if entry.same_as is not None:
        _put_link(entry, folder, name, warnings)
        return False
    if entry.source is None:
        raise _damaged(entry)
    there = look(folder, name) if entry.shared else None
    if there is not None and stat.S_ISREG(there.st_mode) and is_trusted(there, entry):
        return False
    try:
        source = os.open(
            copy_path(images_dir, entry.source), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except FileNotFoundError as error:
        raise CkptError(
            "state_damaged",
            f"The saved state lacks the contents of {entry.path}.",
            hint="Restore an older state of this kernel.",
        ) from error
    try:
        if _is_there(source, entry, folder, name):
            return False
        if _write_over_database(source, entry, folder, name, warnings):
            return True
        try:
            if not _is_old_memory(entry, folder, name):
                move_aside(folder, name, entry.path, warnings)
        except PermissionError:
            status = look(folder, name)
            if status is None or not is_trusted(status, entry):
                raise
            warnings.append(f"{entry.path} has changed since the save and could not be put back.")
            return False
        copy_to_new(source, folder, name, entry)
        return True
    finally:
        os.close(source)


def _write_over_database(
    source: int, entry: NodeLocalEntry, folder: int, name: str, warnings: list[str]
) -> bool:
    """Put a SQLite database back into the very file that it was; what it held is kept aside.

    SQLite does not write where the name leads to another file than the one that it opened. A file
    that something else has open, or that has other names, is not touched.
    """
    status = look(folder, name)
    if (
        status is None
        or not stat.S_ISREG(status.st_mode)
        or (status.st_dev, status.st_ino) != (entry.device, entry.inode)
        or status.st_nlink > 1
        or not is_trusted(status, entry)
        or os.pread(source, len(_DATABASE), 0) != _DATABASE
        or procfs.is_in_use(status.st_dev, status.st_ino)
    ):
        return False
    try:
        target = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except PermissionError:
        return False
    try:
        aside = free_name(folder, name)
        copy_to_new(target, folder, aside, status)
        try:
            os.ftruncate(target, 0)
            copy_sparse(source, target)
        except OSError:
            _copy_back(folder, aside, target)
            raise
        own(target, entry)
    finally:
        os.close(target)
    warnings.append(f"{entry.path} has changed since the save; what it held is now {aside}.")
    return True


def _copy_back(folder: int, aside: str, target: int) -> None:
    kept = os.open(aside, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.ftruncate(target, 0)
        copy_sparse(kept, target)
        os.unlink(aside, dir_fd=folder)
    finally:
        os.close(kept)


def _is_database(folder: int, name: str) -> bool:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
    try:
        return os.pread(fd, len(_DATABASE), 0) == _DATABASE
    except OSError:
        return False
    finally:
        os.close(fd)


def _move_leftovers(
    entry: NodeLocalEntry, folder: int, name: str, paths: set[str], warnings: list[str]
) -> None:
    """A journal or log of the database's other life would be played into this one."""
    for suffix in _BESIDE_DATABASE:
        if entry.path + suffix not in paths:
            move_aside(folder, name + suffix, entry.path + suffix, warnings)


def _is_there(source: int, entry: NodeLocalEntry, folder: int, name: str) -> bool:
    """Whether the very same file is there already; its permissions are set right."""
    status = look(folder, name)
    if status is None or not stat.S_ISREG(status.st_mode) or not is_trusted(status, entry):
        return False
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        present = os.open(name, flags, dir_fd=folder)
    except PermissionError:
        return False
    try:
        if not same_content(source, present):
            return False
        if stat.S_IMODE(status.st_mode) != entry.mode:
            os.fchmod(present, entry.mode)
        return True
    except PermissionError:
        return False
    finally:
        os.close(present)


def _is_old_memory(entry: NodeLocalEntry, folder: int, name: str) -> bool:
    """Remove the very segment of shared memory that the rolled-back kernel had.

    It is memory of the killed processes like all else, not a document; kept, it would
    fill the node's memory with every restore.
    """
    status = look(folder, name)
    if entry.base != _SHARED_MEMORY or status is None:
        return False
    if (status.st_dev, status.st_ino) != (entry.device, entry.inode):
        return False
    os.unlink(name, dir_fd=folder)
    return True


def _put_link(entry: NodeLocalEntry, folder: int, name: str, warnings: list[str]) -> None:
    assert entry.same_as is not None
    original = NodeLocalEntry(entry.same_as, entry.base, "file", 0, 0, 0)
    with _parent(original, warnings) as (other, other_name):
        there = look(folder, name)
        first = os.stat(other_name, dir_fd=other, follow_symlinks=False)
        if there is not None and (there.st_dev, there.st_ino) == (first.st_dev, first.st_ino):
            return
        move_aside(folder, name, entry.path, warnings)
        os.link(other_name, name, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)


def _put_fifo(
    images_dir: Path, entry: NodeLocalEntry, folder: int, name: str, warnings: list[str]
) -> bool:
    status = look(folder, name)
    if status is not None and stat.S_ISFIFO(status.st_mode) and is_trusted(status, entry):
        return False
    move_aside(folder, name, entry.path, warnings)
    os.mkfifo(name, 0o600, dir_fd=folder)
    made = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
    try:
        own(made, entry)
    finally:
        os.close(made)
    return True


#: Whether it wrote anything.
_Put = Callable[[Path, NodeLocalEntry, int, str, list[str]], bool]
_PUT: Final[dict[str, _Put]] = {
    "dir": _put_directory,
    "file": _put_file,
    "fifo": _put_fifo,
}
