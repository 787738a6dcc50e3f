"""What a CRIU image directory says about a process tree, and the edits before a restore."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from . import sockets, wal
from .elf import build_id
from .images_proto import REG, Image, read_image, write_image

_HUGE_PAGES: Final = 0x40000  # MAP_HUGETLB, among a mapping's flags
_MAPS_A_FILE: Final = 1 << 6 | 1 << 7  # VMA status bits: private and shared file mappings


class Task(msgspec.Struct, frozen=True):
    """One process of the image: its PID and the ids of all its threads (its PID among them)."""

    pid: int
    tids: list[int]


class MappedFile(msgspec.Struct, frozen=True):
    """A file that processes of the tree map: a library, the interpreter, a data file.

    ``size`` is in bytes, ``mtime_ns`` in nanoseconds since the epoch, ``build_id``
    hexadecimal and ``None`` for files that carry none.
    """

    path: str
    size: int
    mtime_ns: int
    build_id: str | None = None


def tasks(images_dir: Path) -> list[Task]:
    """The processes of the image, the root of the tree first.

    Of a child that had ended, and that nobody had waited for, CRIU writes memory that it never
    set as the one thread id.
    """
    return [
        Task(entry.pid, list(entry.threads) if entry.pid in entry.threads else [entry.pid])
        for entry in read_image(images_dir / "pstree.img", "pstree_entry").messages
    ]


def all_pids(images_dir: Path) -> list[int]:
    """Every number that must be free for a restore: PIDs, TIDs, session and group ids.

    The processes' first, the root's before all: of many that are taken, errors name the first
    ones, and threads often have lower numbers. Sessions and groups whose leader is outside the
    image are left out: CRIU does not create those.
    """
    found = tasks(images_dir)
    threads = sorted(tid for task in found for tid in task.tids)
    return list(dict.fromkeys([*(task.pid for task in found), *threads]))


def mapped_files(images_dir: Path, *, exclude: Sequence[str] = ()) -> list[MappedFile]:
    """Files that the tree maps or executes and that exist here, with what identifies them.

    Parameters
    ----------
    images_dir
        A finished image directory of a tree on this node.
    exclude
        Node-local directories: files below them are part of the state, and left out.

    Returns
    -------
    list of MappedFile
        Sorted by path. Deleted and link-remapped files are CRIU's business, and left out. So
        are a database's ``-shm`` files, which :mod:`.wal` makes again.
    """
    files = read_image(images_dir / "files.img", "file_entry")
    mapped = mapped_ids(images_dir)
    remapped = remapped_ids(images_dir)
    exclude = [os.path.realpath(directory) for directory in exclude]
    names = {
        entry.reg.name
        for entry in files.messages
        if entry.type == REG and entry.id in mapped and entry.id not in remapped
    } - {os.fsencode(name) for name in wal.shared_memory_files(files)}
    result = []
    for name in sorted(names):
        path = os.fsdecode(name)
        if any(is_below(path, directory) for directory in exclude):
            continue
        try:
            status = os.stat(path)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            result.append(MappedFile(path, status.st_size, status.st_mtime_ns, build_id(path)))
    return result


def open_files(images_dir: Path) -> list[str]:
    """Paths of all regular-file entries (open, mapped, working directories), sorted."""
    files = read_image(images_dir / "files.img", "file_entry")
    return sorted({os.fsdecode(e.reg.name) for e in files.messages if e.type == REG})


def link_remaps(images_dir: Path) -> list[str]:
    """Paths of the links that CRIU left (``--link-remap``) for files whose name is gone, sorted.

    CRIU names each after the id of its own entry. A user's file may be called alike, and is
    the user's.
    """
    files = read_image(images_dir / "files.img", "file_entry")
    named = {(os.fsdecode(e.reg.name), e.id) for e in files.messages if e.type == REG}
    return sorted(path for path, id_ in named if os.path.basename(path) == f"link_remap.{id_}")


def named_files(images_dir: Path) -> list[str]:
    """Like :func:`open_files`, without those that have lost their name."""
    files = read_image(images_dir / "files.img", "file_entry")
    nameless = remapped_ids(images_dir)
    return sorted(
        {os.fsdecode(e.reg.name) for e in files.messages if e.type == REG and e.id not in nameless}
    )


def inet_listeners(images_dir: Path) -> list[tuple[str, int]]:
    """Addresses and TCP ports that the tree listens on, sorted."""
    files = read_image(images_dir / "files.img", "file_entry")
    return sockets.listeners(files)


def has_huge_pages(images_dir: Path) -> bool:
    """Whether a process reserved huge pages (MAP_HUGETLB; transparent ones do not count).

    CRIU reads these out of order, which a stream does not let it.
    """
    return any(
        vma.flags & _HUGE_PAGES
        for path in images_dir.glob("mm-*.img")
        for entry in read_image(path, "mm_entry").messages
        for vma in entry.vmas
    )


def prepare_for_restore(images_dir: Path, *, beside: str | None = None) -> None:
    """Edit the images so that they can be restored; called by the keeper before every restore.

    ``beside`` is the IPv4 loopback address on which a copy listens that is to run beside its
    original; ``None`` keeps the addresses.

    * A TCP connection whose other end is not in the image comes back as a fresh, closed
      socket. Connections inside the tree stay.
    * The recorded size of files that no process maps is forgotten: such a file may have
      grown since, as IPython's history does, and CRIU would refuse it.
    * So does a Unix socket whose peer is in neither the image nor this node.
    * Sockets with an address that this node lacks move to the loopback interface.
    * Files beside a database in WAL mode are made where they are missing.

    Idempotent; files are replaced atomically.

    Raises
    ------
    CkptError
        ``state_damaged`` when an image cannot be read, ``not_restorable`` when the state is in
        the middle of a database transaction that is gone.
    """
    path = images_dir / "files.img"
    files = read_image(path, "file_entry")
    changed = wal.make_ready(images_dir, files)
    changed |= sockets.close_outside_connections(files)
    changed |= sockets.close_outside_unix_sockets(files)
    changed |= sockets.move_to_this_node(files)
    if beside is not None:
        changed |= sockets.move_beside(files, beside)
    changed |= _forget_sizes(files, mapped_ids(images_dir))
    if changed:
        write_image(path, files)


def rename_files(images_dir: Path, names: Mapping[str, str]) -> None:
    """Give files other paths, old to new, at which the restore will look for them.

    Raises
    ------
    CkptError
        ``state_damaged`` when an image cannot be read.
    """
    path = images_dir / "files.img"
    files = read_image(path, "file_entry")
    raw = {os.fsencode(old): os.fsencode(new) for old, new in names.items()}
    found = [entry.reg for entry in files.messages if entry.type == REG and entry.reg.name in raw]
    for file in found:
        file.name = raw[file.name]
    if found:
        write_image(path, files)


def is_below(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or something in it (by name only)."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def mapped_ids(images_dir: Path) -> dict[int, bool]:
    """Ids of the files that the tree maps or executes, and of each whether it is code."""
    found: dict[int, bool] = {}
    for path in images_dir.glob("mm-*.img"):
        for entry in read_image(path, "mm_entry").messages:
            found[entry.exe_file_id] = True
            for vma in entry.vmas:
                if vma.status & _MAPS_A_FILE:
                    is_code = bool(vma.prot & mmap.PROT_EXEC)
                    found[vma.shmid] = found.get(vma.shmid, False) or is_code
    return found


def remapped_ids(images_dir: Path) -> set[int]:
    """Ids of the files that have lost their name, and of the links that CRIU made for them."""
    path = images_dir / "remap-fpath.img"
    if not path.exists():
        return set()
    entries = read_image(path, "remap_file_path_entry").messages
    return {e.orig_id for e in entries} | {e.remap_id for e in entries}


def _forget_sizes(files: Image, mapped: Collection[int]) -> bool:
    changed = False
    for entry in files.messages:
        if entry.type == REG and entry.id not in mapped and entry.reg.HasField("size"):
            entry.reg.ClearField("size")
            changed = True
    return changed
