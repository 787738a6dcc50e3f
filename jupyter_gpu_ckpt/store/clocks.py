"""Clocks: whose says when a file was written, and one that goes on while a machine sleeps."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Final

#: File systems whose times come from one machine: this one, or the server. On others, such as
#: Lustre, Ceph and what FUSE brings, each node may write its own.
_ONE_CLOCK: Final = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "nfs", "nfs4", "overlay", "ramfs"}
    | {"tmpfs", "xfs", "zfs"}
)


def uptime() -> float:
    """Seconds since this machine was started, those that it slept among them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def has_one_clock(folder: Path) -> bool:
    """Whether the times of all files in a folder come from the same clock, whoever writes them."""
    return file_system(folder) in _ONE_CLOCK


def file_system(path: Path) -> str:
    """Type of the file system that a path is on; empty if that cannot be known."""
    real = os.path.realpath(path)
    best, found = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best):  # of two at one place the later one is seen
            best, found = point, after.split()[0]
    return found
