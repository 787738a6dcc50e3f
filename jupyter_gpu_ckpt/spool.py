"""Working folders for image directories while an operation runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from .capture import procfs
from .capture.files import discard_links
from .capture.node import node_id
from .errors import CkptError
from .liveness import process_lives
from .operations import in_thread
from .store import make_private_dir

#: Folders that another node's server left are removed after this many seconds.
_FOREIGN_AGE: Final = 24 * 3600.0


class Spool:
    """The part of the spool that belongs to this server: ``<spool>/<node>-<pid>-<start>/``.

    Several servers of one user may share the spool folder, also from several nodes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        start = procfs.started(os.getpid())
        self._own = root / f"{node_id()}-{os.getpid()}-{start}"

    @contextlib.asynccontextmanager
    async def folder(self, name: str) -> AsyncIterator[Path]:
        """An empty folder, mode 0700, that is removed on leaving, whatever happened.

        Raises CkptError ``no_space`` or ``store_unavailable``.
        """
        path = self._own / name
        try:
            make_private_dir(self.root)
            make_private_dir(self._own)
            self._check_private()
            path.mkdir(mode=0o700)
        except OSError as error:
            raise CkptError(
                "store_unavailable",
                "The working folder for saved states cannot be written.",
                hint="Check GpuCkpt.spool_dir, its permissions and its free space.",
                details=f"{path}: {error.strerror}",
            ) from error
        try:
            yield path
        finally:
            await in_thread(lambda: shutil.rmtree(path, ignore_errors=True))

    def _check_private(self) -> None:
        """Refuse folders in which another user could swap images: they would be restored."""
        root, own = os.stat(self.root), os.lstat(self._own)
        open_to_others = root.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if (open_to_others and not root.st_mode & stat.S_ISVTX) or not _is_ours(own):
            raise CkptError(
                "store_unavailable",
                f"Other users can write to the working folder for saved states, {self.root}.",
                hint="Memory images hold secrets. Set GpuCkpt.spool_dir to a folder of your own, "
                f"or run: chmod go-w {self.root}",
            )

    def clean(self) -> None:
        """Remove what servers that are gone left behind; called once at start, in a thread.

        Raises CkptError ``store_unavailable``.
        """
        try:
            found = list(self.root.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise CkptError(
                "store_unavailable",
                f"The working folder for saved states cannot be read: {self.root}.",
                hint="Check GpuCkpt.spool_dir and its permissions.",
                details=error.strerror,
            ) from error
        for path in found:
            if path != self._own and self._is_left_over(path):
                if path.name.startswith(f"{node_id()}-"):
                    for images_dir in path.glob("*/images"):
                        discard_links(images_dir)
                shutil.rmtree(path, ignore_errors=True)

    def _is_left_over(self, path: Path) -> bool:
        node, _, rest = path.name.partition("-")
        pid, _, start = rest.partition("-")
        try:
            status = path.lstat()
        except OSError:
            return False
        if not (pid.isdigit() and start.isdigit() and _is_ours(status)):
            return False
        if node == node_id():
            return not process_lives(int(pid), float(start))
        return time.time() - status.st_mtime > _FOREIGN_AGE


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
