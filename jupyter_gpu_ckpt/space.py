"""Whether a save fits, known before its kernel is frozen for it."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import CkptError


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_space(needed: int, spool: Path, store: Path) -> bool:
    """Raise when a state of this size does not fit; nothing is hoped for from compression.

    Parameters
    ----------
    needed
        Bytes, from :func:`.capture.estimate.state_size`.
    spool
        Where the kernel's memory is written first.
    store
        Where the state is kept; it need not exist yet.

    Returns
    -------
    bool
        Whether it fits only if what is stored is removed from the spool at once, because both
        are on one disk.

    Raises
    ------
    CkptError
        ``no_space``.
    """
    store = existing(store)
    _check(needed, spool, "the working folder (GpuCkpt.spool_dir)")
    if os.stat(spool).st_dev == os.stat(store).st_dev:
        return _free(spool) < 2 * needed
    _check(needed, store, "the store (GpuCkpt.store_url)")
    return False


def _free(folder: Path) -> int:
    """Bytes that this user may still write."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _check(needed: int, folder: Path, what: str) -> None:
    free = _free(folder)
    if free < needed:
        raise CkptError(
            "no_space",
            f"Saving this kernel may take {_mib(needed)}, and {_mib(free)} are free in {what}. "
            "The kernel runs on.",
            hint="Free disk space, delete old states ('jupyter gpu-ckpt rm', then 'gc'), or delete "
            "large variables.",
            details=str(folder),
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
