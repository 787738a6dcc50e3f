"""Database transactions: a kernel should not be frozen in the middle of a short one.

While SQLite writes, its rollback journal ``NAME-journal`` is open beside the database, and it
is gone a moment later. A state that was taken then cannot be restored: the journal is missing,
and putting it back would undo what other processes have written since. IPython writes its
history, which all kernels share, after every cell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from . import procfs
from .images import is_below, named_files

_SUFFIX: Final = "-journal"
_LOOK_EVERY: Final = 0.005  # seconds


def wait_for_end(pid: int, *, timeout: float) -> set[str]:
    """Wait until no process of the tree is in a transaction; for a worker thread.

    Called by the keeper right before a dump.

    Parameters
    ----------
    pid
        The kernel's process id.
    timeout
        Seconds to wait at most.

    Returns
    -------
    set of str
        Journals that stayed open all the time: transactions that the user keeps open.
    """
    deadline = time.monotonic() + timeout
    lasting = _open_journals(pid)
    now = lasting
    while now and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
        now = _open_journals(pid)
        lasting &= now
    return lasting


def in_images(
    images_dir: Path,
    *,
    lasting: Collection[str],
    dirs: Sequence[str],
    is_shared: Callable[[str], bool] = lambda path: False,
) -> list[str]:
    """Journals of short transactions that the freeze fell into, from a finished dump.

    Called by the keeper: the images are of no use then. Journals that :func:`wait_for_end`
    gave as ``lasting`` are left out, and those below the node-local ``dirs``, which are part
    of the state unless ``is_shared`` says that other kernels write to the database too.
    """
    return [
        path
        for path in named_files(images_dir)
        if path.endswith(_SUFFIX)
        and path not in lasting
        and (
            is_shared(path.removesuffix(_SUFFIX))
            or not any(is_below(path, directory) for directory in dirs)
        )
    ]


def _open_journals(pid: int) -> set[str]:
    return {
        target
        for member in procfs.tree(pid)
        for _, target in procfs.descriptors(member)
        if target.endswith(_SUFFIX)
    }
