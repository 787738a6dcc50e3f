"""How much memory this process has needed."""

from __future__ import annotations

from pathlib import Path


def peak_memory() -> int:
    """Most bytes that were in memory at once since the program began.

    Not `ru_maxrss`: that of a process which was forked off begins with its parent's.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system does not tell")
