"""SQLite databases in WAL mode: what a state depends on beside the database itself.

Beside ``NAME`` lie ``NAME-wal`` and, mapped by every process that has the database open,
``NAME-shm``. Whoever closes the database last removes both; so they may be missing, or other
ones, when a state is restored. For a connection that is between two transactions that does not
matter: an empty pair makes SQLite look at the database anew. One in the middle of a transaction
needs them as they were.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ..errors import CkptError
from . import procfs
from .images_proto import REG, Image, read_image

WAL: Final = "-wal"
_SHM: Final = "-shm"
#: File of an image directory that describes the databases outside of the node-local folders.
NOTE: Final = "databases.json"

#: Bytes of the ``-shm`` file that SQLite locks during a transaction, the first three only by
#: who writes. (It holds byte 128 all the time.)
_LOCKS: Final = frozenset(range(120, 128))
_WRITER: Final = frozenset(range(120, 123))
_WAL_HEADER: Final = 32  # bytes; it changes when SQLite begins the file again
_INDEX_HEADER: Final = slice(0, 96)  # of -shm: how far the transactions go
_CHECKPOINT: Final = struct.Struct("=96xI28xI")  # of -shm: how far they are in the database


_WARNING: Final = (
    "A transaction is open in {path}: this state can be restored only while nothing else is "
    "written to the database. Commit or roll back, then save again."
)


class Database(msgspec.Struct, frozen=True):
    """A database that a state has open in WAL mode.

    Attributes
    ----------
    path
        Of the database, without a suffix.
    transaction
        ``"read"`` or ``"write"`` when one was open, ``"exclusive"`` when the kernel keeps the
        database to itself (``locking_mode``, without ``-shm``), else ``None``.
    mark
        What must be the same at a restore then; ``None`` when that is not known.
    """

    path: str
    transaction: str | None = None
    mark: str | None = None


def open_transactions(pid: int) -> set[str]:
    """``-wal`` files of the databases in which processes of a tree are in a transaction now."""
    return {
        target.removesuffix(_SHM) + WAL
        for member in procfs.tree(pid)
        for link, target in procfs.descriptors(member)
        if target.endswith(_SHM) and any(_held(start, end) for start, end in procfs.locks(link))
    }


def in_transaction(images_dir: Path) -> dict[str, str]:
    """``-wal`` file -> ``"read"`` or ``"write"``, of the transactions in an image directory."""
    if not (images_dir / "filelocks.img").exists():
        return {}
    names = _names(read_image(images_dir / "files.img", "file_entry"))
    found: dict[str, str] = {}
    for lock in read_image(images_dir / "filelocks.img", "file_lock_entry").messages:
        last = lock.start + lock.len - 1
        if not _held(lock.start, last):
            continue
        name = names.get(_file_id(images_dir, lock.pid, lock.fd), "")
        if name.endswith(_SHM):
            path = name.removesuffix(_SHM) + WAL
            writes = _held(lock.start, last, _WRITER)
            found[path] = "write" if writes else found.get(path, "read")
    return found


def mark(wal: str, kind: str) -> str | None:
    """What tells that nothing which a transaction needs has changed; ``None`` if unreadable.

    Others may add to the log while one reads. While one writes they cannot, unless it died.
    """
    try:
        with open(wal, "rb") as file:
            status = os.fstat(file.fileno())
            parts = [file.read(_WAL_HEADER).hex()]
        if kind != "read":
            parts += [str(status.st_size), str(status.st_mtime_ns)]
        if kind != "exclusive":
            with open(wal.removesuffix(WAL) + _SHM, "rb") as file:
                index = file.read(_CHECKPOINT.size)
            parts += map(str, _CHECKPOINT.unpack(index))
            if kind == "write":
                parts.append(index[_INDEX_HEADER].hex())
    except (OSError, struct.error):
        return None
    return " ".join(parts)


def take_note(
    images_dir: Path, before: Mapping[str, Mapping[str, str | None]], *, dirs: Sequence[str]
) -> list[str]:
    """Write down, right after a dump, what its databases in WAL mode need at a restore.

    Parameters
    ----------
    images_dir
        The finished image directory.
    before
        :func:`marks` of the transactions that were open before the dump.
    dirs
        The node-local directories: files there are part of the state, and left out.

    Returns
    -------
    list of str
        Warnings for the user.
    """
    files = read_image(images_dir / "files.img", "file_entry")
    transactions = in_transaction(images_dir)
    shared = shared_memory_files(files)
    databases, warnings = [], []
    for wal in sorted(_wals(files)):
        path = wal.removesuffix(WAL)
        if any(path.startswith(directory.rstrip("/") + "/") for directory in dirs):
            continue
        kind = transactions.get(wal) if path + _SHM in shared else "exclusive"
        known = None
        if kind is not None:
            known = mark(wal, kind)
            if kind != "exclusive" and before.get(wal, {}).get(kind) != known:
                known = None  # it changed around the freeze: which of the two is in the state?
            warnings.append(_WARNING.format(path=path))
        databases.append(Database(path, kind, known))
    if databases:
        note = images_dir / NOTE
        note.touch(mode=0o600)
        note.write_bytes(msgspec.json.encode(databases))
    return warnings


def marks(wals: Collection[str]) -> dict[str, dict[str, str | None]]:
    """The marks of databases before a dump, for :func:`take_note`."""
    return {wal: {kind: mark(wal, kind) for kind in ("read", "write")} for wal in wals}


def shared_memory_files(files: Image) -> set[str]:
    """The ``-shm`` files of ``files.img`` that belong to a database."""
    return {wal.removesuffix(WAL) + _SHM for wal in _wals(files)} & set(_names(files).values())


def make_ready(images_dir: Path, files: Image) -> bool:
    """Make what a restore will open where it is missing; whether ``files`` was changed.

    Idempotent: once the size is forgotten the file is long enough.

    Raises
    ------
    CkptError
        ``not_restorable`` when the state is in the middle of a transaction that is gone, or
        when the files cannot be made.
    """
    try:
        databases = msgspec.json.decode((images_dir / NOTE).read_bytes(), type=list[Database])
    except FileNotFoundError:
        return False
    except msgspec.DecodeError as error:
        message = f"The saved state is damaged: {NOTE} cannot be read."
        raise CkptError(
            "state_damaged", message, hint="Restore an older state of this kernel."
        ) from error
    changed = False
    for database in databases:
        if database.transaction is not None:
            _check_transaction(database)
        for suffix in (WAL, _SHM):
            name = os.fsencode(database.path + suffix)
            entries = [e.reg for e in files.messages if e.type == REG and e.reg.name == name]
            if not entries:
                continue  # in exclusive locking mode there is no -shm
            _make(database, suffix, entries[0])
            for entry in entries if suffix == _SHM else ():
                # It may have grown, and is as long as is needed.
                entry.ClearField("size")
                changed = True
    return changed


def _check_transaction(database: Database) -> None:
    wal = database.path + WAL
    if database.mark is not None and mark(wal, database.transaction or "") == database.mark:
        return
    raise CkptError(
        "not_restorable",
        f"The kernel was in a transaction of the database {database.path} when it was saved, and "
        "the database has been used since.",
        hint="Restore a state that was saved outside of a transaction. To go back to this one, "
        f"put {os.path.basename(database.path)} and the files -wal and -shm beside it back as "
        "they were.",
    )


def _make(database: Database, suffix: str, entry: Any) -> None:
    """An empty file where it is missing; ``-shm`` is made long enough to be mapped."""
    path = database.path + suffix
    try:
        owner = os.stat(database.path)
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            made = True
        except FileExistsError:
            if suffix == WAL:
                return
            fd = os.open(path, flags)
            made = False
        try:
            if made:
                if os.geteuid() == 0:
                    os.fchown(fd, owner.st_uid, owner.st_gid)
                os.fchmod(fd, stat.S_IMODE(entry.mode or owner.st_mode))
            if suffix == _SHM and os.fstat(fd).st_size < entry.size:
                os.ftruncate(fd, entry.size)
        finally:
            os.close(fd)
    except OSError as error:
        raise CkptError(
            "not_restorable",
            f"The file {path}, which belongs to a database that the kernel has open, cannot be "
            f"made again: {error.strerror}.",
            hint="Put the database back at its place, in a folder that you can write to.",
            details=str(error),
        ) from error


def _held(start: int, last: int, locks: Collection[int] = _LOCKS) -> bool:
    """Whether a lock of these bytes is one of a transaction."""
    return any(start <= byte <= last for byte in locks)


def _names(files: Image) -> dict[int, str]:
    return {e.id: os.fsdecode(e.reg.name) for e in files.messages if e.type == REG}


def _wals(files: Image) -> set[str]:
    names = set(_names(files).values())
    return {n for n in names if n.endswith(WAL) and n.removesuffix(WAL) in names}


def _file_id(images_dir: Path, pid: int, fd: int) -> int:
    """The ``files.img`` id behind a descriptor; 0 when there is none."""
    ids = read_image(images_dir / f"ids-{pid}.img", "task_kobj_ids_entry").messages
    for entry in ids:
        table = images_dir / f"fdinfo-{entry.files_id}.img"
        if table.exists():
            for open_file in read_image(table, "fdinfo_entry").messages:
                if open_file.fd == fd:
                    return int(open_file.id)
    return 0
