"""Names, folders and modes of a store, and what the operating system's errors mean for it."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

from ..errors import CkptError
from .acting import file_user

_KERNEL_ID = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
_STATE_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}\Z")

#: How file systems say that they know no hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

# How often to make a folder that another process removes because it is empty.
_ATTEMPTS = 100

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_OF_ONE_FILE = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}


def owner_folder(owner: str) -> str:
    """File name for an owner: any non-empty name, with unsafe characters percent-encoded."""
    name = quote(owner, safe="@")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if not name or len(name) > 200:
        raise CkptError(
            "bad_request",
            "The owner of a store needs a name of sensible length.",
            hint="Set GpuCkpt.owner to one.",
        )
    return name


def check_kernel_id(kernel_id: str) -> str:
    """Return `kernel_id` if it can be a file name of ours, else raise ``unknown_kernel``."""
    if not is_kernel_id(kernel_id):
        raise CkptError(
            "unknown_kernel",
            "There is no kernel with this id.",
            hint="It may have ended: list the kernels anew.",
        )
    return kernel_id


def is_kernel_id(kernel_id: str) -> bool:
    """Whether `kernel_id` can be a file name of ours."""
    return _KERNEL_ID.match(kernel_id) is not None


def is_state_id(state_id: str) -> bool:
    """Whether `state_id` has the form of a state id."""
    if _STATE_ID.match(state_id) is None:
        return False
    try:
        begun(state_id)
    except ValueError:
        return False
    return True


def begun(state_id: str) -> datetime:
    """When a state was begun to be saved, which its id says.

    Raises
    ------
    ValueError
        It says a time that there never was.
    """
    # Not by strptime, whose module is looked for at its first use: a server that has become
    # another user may not find it any more.
    month, day, hour, minute, second = (int(state_id[at : at + 2]) for at in (4, 6, 9, 11, 13))
    return datetime(int(state_id[:4]), month, day, hour, minute, second, tzinfo=timezone.utc)


def check_state_id(state_id: str) -> str:
    """Return `state_id` if it has the form of one, else raise ``unknown_state``."""
    if not is_state_id(state_id):
        raise unknown_state()
    return state_id


def unknown_state() -> CkptError:
    """Build the error for an id that names no state of this owner."""
    return CkptError(
        "unknown_state",
        "There is no saved state with this id.",
        hint="It may have been deleted: list the states anew.",
    )


def is_of_one_file(error: OSError) -> bool:
    """Whether it is this file that cannot be read, while the others of the store can."""
    return error.errno in _OF_ONE_FILE


def store_error(error: OSError, doing: str) -> CkptError:
    """Turn an operating system error on the store (or a spool folder) into ours.

    Parameters
    ----------
    error
        What the system said.
    doing
        What did not work, to go after "could not": "write to the state store".
    """
    details = f"{type(error).__name__}: {error.strerror or error}"
    if error.filename is not None:
        details += f" ({os.fsdecode(error.filename)})"
    if error.errno in _FULL:
        return CkptError(
            "no_space",
            f"There is not enough disk space to {doing}.",
            hint="Delete old states or files you no longer need, or raise the disk quota.",
            details=details,
        )
    return CkptError(
        "store_unavailable",
        f"It was not possible to {doing}: {error.strerror or error}.",
        hint="Check that the folder exists, is mounted, and that you may write to it.",
        details=details,
    )


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise :func:`store_error` for an ``OSError`` of the body."""
    try:
        yield
    except OSError as error:
        raise store_error(error, doing) from error


def make_private_dir(path: Path) -> None:
    """Create `path`, mode 0700 whatever the umask; missing parents likewise.

    Another process may remove empty folders meanwhile: it is made anew then.

    Raises
    ------
    OSError
        Something is in the way or may not be written, or the folder goes whenever it is made.
    """
    for attempt in range(_ATTEMPTS):
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)
            return
        except FileExistsError:
            if path.is_dir():
                return
            if attempt == _ATTEMPTS - 1:
                raise
        except FileNotFoundError:
            if path.parent == path or attempt == _ATTEMPTS - 1:
                raise
            make_private_dir(path.parent)


def check_safe_root(root: Path) -> None:
    """Refuse a root in which other users could swap our folders.

    A sticky folder (as ``/tmp``) is fine: there only the owner may rename or remove.

    Raises
    ------
    CkptError
        ``store_unavailable``.
    """
    mode = os.stat(root).st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise CkptError(
            "store_unavailable",
            f"Other users can write to the state store's folder {root}.",
            hint=f"Saved states hold secrets. Run: chmod go-w {root}",
        )


def check_private(folder: Path) -> None:
    """Make sure that an owner's folder is a folder, ours, and closed to others.

    Raises
    ------
    CkptError
        ``store_unavailable``.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise CkptError(
            "store_unavailable",
            f"{folder} should be a folder, and is not one.",
            hint="Move it away, or choose another place for the store.",
        )
    if found.st_uid != file_user():
        raise CkptError(
            "store_unavailable",
            f"The state store's folder {folder} belongs to another user.",
            hint="Choose another place for the store, or have the folder's owner corrected.",
        )
    if found.st_mode & 0o077:
        os.chmod(folder, 0o700)


def create_file(path: Path, data: bytes) -> None:
    """Write a new private file and make its content durable.

    Raises
    ------
    OSError
        In particular ``FileExistsError``: nothing is overwritten.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def create_once(path: Path, data: bytes) -> None:
    """Write a private file that is never replaced: where another process was first, its file stays.

    Raises
    ------
    OSError
        Not writable.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        create_file(temporary, data)
        with suppress(FileExistsError):
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                create_file(path, data)
    finally:
        temporary.unlink(missing_ok=True)
    sync_dir(path.parent)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """``os.write`` until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def move_into(temporary: Path, path: Path) -> None:
    """Give a finished file its name, durably, making its folder if needed.

    Raises
    ------
    OSError
        The file has not got its name.
    """
    for attempt in range(_ATTEMPTS):
        try:
            make_private_dir(path.parent)
            os.rename(temporary, path)
            break
        except FileNotFoundError:
            # Another process removed the folder because it was empty.
            if attempt == _ATTEMPTS - 1:
                raise
    try:
        with suppress(FileNotFoundError):  # already removed again
            sync_dir(path.parent)
            sync_dir(path.parent.parent)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def put_file(writers: Path, path: Path, data: bytes) -> None:
    """Write a private file, or another one in its place, whole or not at all.

    Parameters
    ----------
    writers
        The folder ``writers`` of the same owner, for the file until it has its name.
    path, data
        The file and its content.

    Raises
    ------
    OSError
        Not writable.
    """
    temporary = writers / f".{path.stem}-{secrets.token_hex(8)}"
    try:
        create_file(temporary, data)
        move_into(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
