"""How large a state of a running kernel will be, before anything is done to it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from typing import Final

from . import files, procfs

#: Small images, page tables, and what the kernel goes on to allocate until it is frozen.
_MARGIN: Final = 1.1


def state_size(pid: int, node_local_dirs: Sequence[str] = ()) -> int:
    """Bytes that an image directory of this kernel needs, nothing left out.

    CRIU writes the memory of each process, so what a fork shares with its parent counts for both;
    shared memory counts once, and so do deleted and node-local files that are open.

    Parameters
    ----------
    pid
        The kernel's process id.
    node_local_dirs
        Folders from which open files are saved with the kernel.
    """
    tree = procfs.tree(pid)
    own = shared = 0
    sharing: list[int] = []
    for member in tree:
        status = procfs.status(member)
        own += procfs.kilobytes(status, "RssAnon") + procfs.kilobytes(status, "VmSwap")
        resident = procfs.kilobytes(status, "RssShmem")
        if resident:
            sharing.append(member)
            shared = max(shared, resident)
    if len(sharing) > 1:
        # Each one's part of what several map; asking for it takes longer.
        parts = (procfs.kilobytes(procfs.rollup(member), "Pss_Shmem") for member in sharing)
        shared = max(shared, sum(parts))
    memfds, deleted = _nameless(tree)
    return int((own + max(shared, memfds) + deleted + files.size(tree, node_local_dirs)) * _MARGIN)


def _nameless(tree: Sequence[int]) -> tuple[int, int]:
    """Bytes of open memfds, and of open files without a name."""
    memfds: dict[tuple[int, int], int] = {}
    deleted: dict[tuple[int, int], int] = {}
    for member in tree:
        for link, target in procfs.descriptors(member):
            if not target.endswith(" (deleted)"):
                continue
            with contextlib.suppress(OSError):
                status = os.stat(link)
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    found = memfds if target.startswith("/memfd:") else deleted
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(memfds.values()), sum(deleted.values())
