"""Node-local files of a kernel: collected while it stands still, put back before a restore.

Node-local directories (``/tmp``, ``/dev/shm``, ...) are not there on another node, and on
this one they may have been emptied or changed. What the tree has open or mapped below them
is therefore part of the state, and so is R's session folder. Deleted files are CRIU's
business; the ``link_remap.*`` links that it leaves for files whose name is gone belong to the
state too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from ..errors import CkptError
from . import procfs, r_session
from .filecopy import copy_sparse
from .images import is_below, link_remaps
from .node_local import FOLDER, NodeLocalEntry, copy_path
from .put_back import clean_up, put_back

__all__ = ["NodeLocalEntry", "clean_up", "collect", "discard_links", "put_back", "window_dirs"]

_PREFIX: Final = "link_remap."


def collect(
    pids_root: int,
    images_dir: Path,
    dirs: Sequence[str],
    *,
    limit: int,
    is_shared: Callable[[str], bool] = lambda path: False,
) -> list[NodeLocalEntry]:
    """Copy the node-local files of a stopped tree into its image directory.

    Called by the keeper in the window, between CRIU's dump and the thaw. CRIU's
    ``link_remap.*`` links are removed from the node, whatever happens, because the next
    dump would stumble over them.

    Parameters
    ----------
    pids_root
        The kernel's process id.
    images_dir
        The finished image directory; copies go to ``node-local/`` in it.
    dirs
        The node-local directories.
    limit
        Largest total of copies, bytes on disk.
    is_shared
        Tells of a file's path whether other kernels write to it too.

    Returns
    -------
    list of NodeLocalEntry
        Parents before children, hard links after what they link to.

    Raises
    ------
    CkptError
        ``not_savable`` when the limit is exceeded or a file cannot be read; ``no_space``.
    """
    collection = _Collection([os.path.realpath(directory) for directory in dirs], is_shared)
    remaps = link_remaps(images_dir)
    try:
        for pid in procfs.tree(pids_root):
            collection.add_process(pid)
        for path in remaps:
            collection.add_file(path, link_remap=True)
        collection.check(limit)
        return collection.copy(images_dir)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CkptError(
                "no_space",
                "There is not enough disk space for the files that the kernel has open.",
                hint="Free disk space or delete old states.",
                details=str(error),
            ) from error
        raise
    finally:
        _unlink(remaps)


def size(pids: Sequence[int], dirs: Sequence[str]) -> int:
    """Bytes that :func:`collect` would copy for these processes if they stood still now."""
    collection = _Collection([os.path.realpath(directory) for directory in dirs])
    for pid in pids:
        collection.add_process(pid)
    return sum(found for found, _ in collection.sizes())


def window_dirs(pid: int, dirs: Sequence[str]) -> list[str]:
    """For what :func:`collect` is called: for whatever the tree has open below these folders.

    R's session folder is to be copied though nothing is open in it, so for R it is the root,
    below which every process has something open.
    """
    if any(r_session.folders(process) for process in procfs.tree(pid)):
        return ["/"]
    return list(dirs)


def discard_links(images_dir: Path) -> None:
    """Remove from the node what ``--link-remap`` left for an image directory that is given up.

    Called when a dump was undone, and by the keeper for each image directory that a dead
    server left behind. Never raises: an unfinished directory names no links.
    """
    with contextlib.suppress(CkptError, OSError):
        _unlink(link_remaps(images_dir))


def _unlink(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class _Collection:
    """Finds what to copy, then copies it."""

    def __init__(
        self, bases: Sequence[str], is_shared: Callable[[str], bool] = lambda path: False
    ) -> None:
        self.bases = bases
        self.is_shared = is_shared
        self.dirs: dict[str, NodeLocalEntry] = {}
        self.files: dict[str, os.stat_result] = {}
        self.fifos: dict[str, os.stat_result] = {}
        self.remaps: set[str] = set()

    def add_process(self, pid: int) -> None:
        directory = procfs.cwd(pid)
        if directory is not None:
            self._add_directory(directory)
        sockets = None
        for link, target in procfs.descriptors(pid):
            if target.startswith("/"):
                if self._base(target) is not None:
                    self._add_open(link, target)
            elif target.startswith("socket:["):
                if sockets is None:
                    sockets = procfs.unix_socket_paths(pid)
                path = sockets.get(int(target[8:-1]))
                if path is not None:
                    self._add_directory(os.path.dirname(os.path.normpath(path)))
        for mapping in procfs.mappings(pid):
            if self._base(mapping.path) is not None:
                self.add_file(mapping.path, inode=mapping.inode)
        for folder in r_session.folders(pid):
            self._add_whole(folder)

    def _base(self, path: str) -> str | None:
        found = [base for base in self.bases if is_below(path, base)]
        return max(found, key=len) if found else None

    def _add_whole(self, path: str) -> None:
        """Note a folder with all files and folders in it, open or not."""
        if self._base(path) is None:
            return
        self._add_directory(path)
        for folder, inner, names in os.walk(path):
            for name in inner:
                self._add_directory(os.path.join(folder, name))
            for name in names:
                self.add_file(os.path.join(folder, name))

    def _add_open(self, link: str, target: str) -> None:
        try:
            status = os.stat(link)
        except OSError:
            return
        if stat.S_ISREG(status.st_mode):
            self.add_file(target, inode=status.st_ino)
        elif stat.S_ISDIR(status.st_mode):
            self._add_directory(target)
        elif stat.S_ISFIFO(status.st_mode) and os.path.lexists(target):
            self.fifos[target] = status
            self._add_directory(os.path.dirname(target))

    def add_file(self, path: str, *, inode: int | None = None, link_remap: bool = False) -> None:
        """Note a file, unless its name is gone or leads to another file by now."""
        try:
            status = os.lstat(path)
        except OSError:
            return
        if not stat.S_ISREG(status.st_mode) or (inode is not None and status.st_ino != inode):
            return
        if path in self.files:
            return
        self.files[path] = status
        self._add_directory(os.path.dirname(path))
        if link_remap:
            self.remaps.add(path)
        if status.st_nlink > 1 and self._base(path) is not None:
            self._add_siblings(path, status)

    def _add_siblings(self, path: str, status: os.stat_result) -> None:
        """Other names of the file in its folder: a semaphore is opened by name again later.

        Links that CRIU made for this dump are added by name; others are another dump's.
        """
        folder = os.path.dirname(path)
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                other = os.path.join(folder, entry.name)
                if entry.inode() == status.st_ino and not entry.name.startswith(_PREFIX):
                    self.add_file(other, inode=status.st_ino)

    def _add_directory(self, path: str) -> None:
        base = self._base(path)
        if base is None:
            return
        while path != base and path not in self.dirs:
            try:
                status = os.lstat(path)
            except OSError:
                return
            if not stat.S_ISDIR(status.st_mode):
                return
            self.dirs[path] = _entry(path, base, "dir", status)
            path = os.path.dirname(path)

    def sizes(self) -> list[tuple[int, str]]:
        """Bytes on disk and a path of each file; one with several names counts once."""
        found: dict[tuple[int, int], tuple[int, str]] = {}
        for path, status in self.files.items():
            size = min(status.st_size, status.st_blocks * 512)
            found.setdefault((status.st_dev, status.st_ino), (size, path))
        return list(found.values())

    def check(self, limit: int) -> None:
        """Raise when the copies would exceed the limit; before anything is copied."""
        sizes = self.sizes()
        total = sum(size for size, _ in sizes)
        if total > limit:
            largest, path = max(sizes)
            raise CkptError(
                "not_savable",
                f"The kernel has {_mib(total)} of files in temporary folders; at most "
                f"{_mib(limit)} can be saved with it. The kernel runs on.",
                hint=f"Close or move {path} ({_mib(largest)}), or raise the limit.",
            )

    def copy(self, images_dir: Path) -> list[NodeLocalEntry]:
        """Copy everything found; the entries, in the order in which they are put back."""
        entries = [self.dirs[path] for path in sorted(self.dirs)]
        first: dict[tuple[int, int], str] = {}
        number = 0
        for path, status in self._in_order():
            base = self._base(path) or os.path.dirname(path)
            remap = path in self.remaps
            key = status.st_dev, status.st_ino
            if key in first:
                entries.append(
                    _entry(path, base, "file", status, same_as=first[key], link_remap=remap)
                )
                continue
            first[key] = path
            size = _copy_out(path, status, images_dir, number)
            entry = _entry(path, base, "file", status, size=size, source=number, link_remap=remap)
            entries.append(msgspec.structs.replace(entry, shared=self.is_shared(path)))
            number += 1
        for path, status in self.fifos.items():
            entries.append(_entry(path, self._base(path) or "", "fifo", status))
        return entries

    def _in_order(self) -> Iterator[tuple[str, os.stat_result]]:
        """Lasting names first, so that links which go again are the links."""
        return iter(sorted(self.files.items(), key=lambda item: (item[0] in self.remaps, item[0])))


def _entry(
    path: str,
    base: str,
    kind: Literal["dir", "file", "fifo"],
    status: os.stat_result,
    *,
    size: int = 0,
    source: int | None = None,
    same_as: str | None = None,
    link_remap: bool = False,
) -> NodeLocalEntry:
    return NodeLocalEntry(
        path=path,
        base=base,
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        size=size,
        source=source,
        same_as=same_as,
        link_remap=link_remap,
        device=status.st_dev,
        inode=status.st_ino,
    )


def _copy_out(path: str, status: os.stat_result, images_dir: Path, number: int) -> int:
    folder = images_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as error:
        raise CkptError(
            "not_savable",
            f"The kernel has {path} open, which you are not allowed to read. The kernel runs on.",
            hint="Close the file, or ask for the right to read it, then save again.",
        ) from error
    try:
        now = os.fstat(source)
        if (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino):
            raise CkptError(
                "dump_failed",
                f"The file {path} was replaced during the save. The kernel runs on.",
                hint="Save again.",
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(copy_path(images_dir, number), flags, 0o600)
        try:
            return copy_sparse(source, target)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
