"""What the service looks at before it reads a folder into which a user can put what she likes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..errors import CkptError

#: Bytes of manifests and records of one user: some 20,000 states.
_MOST: Final = 128 << 20
#: As many count for the smallest file, and for a folder.
_LEAST: Final = 1024
#: ``kernels/ID/states/FILE``: nobody looks deeper.
_DEPTH: Final = 3


def check_records(folder: Path) -> None:
    """Refuse records of a store that would fill the service's memory, block it, or lead elsewhere.

    Parameters
    ----------
    folder
        The owner's.

    Raises
    ------
    CkptError
        ``store_unavailable``.
    OSError
        They cannot be looked at.
    """
    if os.geteuid() != 0 and (user := _owner(folder)) not in (None, os.geteuid()):
        raise CkptError(
            "store_unavailable",
            f"The folder {folder} belongs to another account of the system (user id {user}).",
            hint="Where users have accounts of their own the service runs as root, as the hub "
            "does: see docs/jupyterhub/admin-page.md.",
        )
    size, writers = 0, os.path.join(folder, "writers", "")
    for path, found in _records(folder):
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise CkptError(
                "store_unavailable",
                f"{path} is no file, though one belongs there: the store is not read.",
                hint="Remove it, or have its user do so.",
            )
        # Of what writers have there, such as packs, no more is read than who they are.
        size += _LEAST if path.startswith(writers) else max(found.st_size, _LEAST)
        if size > _MOST:
            raise CkptError(
                "store_unavailable",
                f"The records of this store have more than {_MOST >> 20} MiB, and are not read.",
                hint="Its user can delete states, or the folder can be looked at by hand.",
            )


def _owner(folder: Path) -> int | None:
    try:
        return os.lstat(folder).st_uid
    except FileNotFoundError:
        return None


def _records(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for name in ("store.json", "keys", "kernels", "deleted", "writers"):
        yield from _below(os.path.join(folder, name), _DEPTH)


def _below(path: str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """A file, or a folder and all below it; what goes meanwhile is left out."""
    try:
        found = os.lstat(path)
        yield path, found
        names = os.listdir(path) if depth and stat.S_ISDIR(found.st_mode) else ()
    except FileNotFoundError:
        return
    for name in names:
        yield from _below(os.path.join(path, name), depth - 1)
