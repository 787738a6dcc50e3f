"""Database transactions: a kernel should not be frozen in the middle of a short one.

While SQLite writes, its rollback journal ``NAME-journal`` is open beside the database, and it
is gone a moment later. A state that was taken then cannot be restored: the journal is missing,
and putting it back would undo what other processes have written since. IPython writes its
history, which all kernels share, after every cell. In WAL mode (:mod:`.wal`) a transaction needs
files that others may change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from . import procfs, wal
from .images import is_below, named_files

_SUFFIX: Final = "-journal"
_LOOK_EVERY: Final = 0.005  # seconds

#: Journal or write-ahead log -> what identified it before the dump, see :func:`.wal.marks`.
Lasting = Mapping[str, Mapping[str, str | None]]


def wait_for_end(pid: int, *, timeout: float) -> Lasting:
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
    dict
        Journals and write-ahead logs of transactions that were open all the time: the user keeps
        them open. With each what :func:`note_databases` needs.
    """
    deadline = time.monotonic() + timeout
    lasting = _open_journals(pid)
    now = lasting
    while now and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY)
        now = _open_journals(pid)
        lasting &= now
    return wal.marks(lasting)


def in_images(
    images_dir: Path,
    *,
    lasting: Collection[str],
    dirs: Sequence[str],
    is_shared: Callable[[str], bool] = lambda path: False,
) -> list[str]:
    """Databases in whose short transactions the freeze fell, from a finished dump.

    Called by the keeper: the images are of no use then. What :func:`wait_for_end` gave as
    ``lasting`` is left out, and databases below the node-local ``dirs``, which are part
    of the state unless ``is_shared`` says that other kernels write to the database too.
    """
    journals = [path for path in named_files(images_dir) if path.endswith(_SUFFIX)]
    torn = [path for path in [*journals, *wal.in_transaction(images_dir)] if path not in lasting]
    databases = (path.removesuffix(_SUFFIX).removesuffix(wal.WAL) for path in torn)
    return [
        database
        for database in databases
        if is_shared(database) or not any(is_below(database, directory) for directory in dirs)
    ]


def note_databases(images_dir: Path, lasting: Lasting, *, dirs: Sequence[str]) -> list[str]:
    """Note in a finished image directory what its databases need; warnings for the user.

    Called by the keeper after a dump, with what :func:`wait_for_end` gave before it.
    """
    return wal.take_note(images_dir, lasting, dirs=dirs)


def _open_journals(pid: int) -> set[str]:
    return wal.open_transactions(pid) | {
        target
        for member in procfs.tree(pid)
        for _, target in procfs.descriptors(member)
        if target.endswith(_SUFFIX)
    }
