"""R's session folder: ``tempdir()``, without which a restored R cannot go on.

R makes ``/tmp/RtmpXXXXXX`` when it starts and has nothing open in it, but takes for granted that
it is there: ``file("")``, with which the evaluate package (1.0 and newer) catches the output of
every cell of IRkernel, makes its file there, and the kernel ends where it cannot.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

#: R sets it for its children; it is in its own memory only, not in ``/proc/PID/environ``.
_VARIABLE: Final = re.compile(rb"R_SESSION_TMPDIR=(/[^\0]{1,4000})\0")
#: Set while R starts, so near the begin of the heap. Bytes.
_LOOKED_AT: Final = 4 << 20
_HEAP: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw.*\[heap\]$", re.MULTILINE)
_IS_R: Final = re.compile(rb" /\S.*/(?:libR\.so|bin/exec/R)$", re.MULTILINE)


def folders(pid: int) -> list[str]:
    """The session folder of a process that is R; empty of any other, or where it is gone.

    Whoever may restore the process may read its memory, in which this looks. Only a folder that
    exists and belongs to the process's user counts, whatever else the memory names so.

    Returns
    -------
    list of str
        Real paths, sorted; more than one where R's data holds such a text, too.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
        heap = _HEAP.search(maps)
        if heap is None or _IS_R.search(maps) is None:
            return []
        begin, end = int(heap[1], 16), int(heap[2], 16)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            content = os.pread(memory.fileno(), min(end - begin, _LOOKED_AT), begin)
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return []
    found = {os.path.realpath(os.fsdecode(m[1])) for m in _VARIABLE.finditer(content)}
    return sorted(path for path in found if _is_folder_of(path, owner))


def _is_folder_of(path: str, owner: int) -> bool:
    try:
        return os.path.isdir(path) and os.stat(path, follow_symlinks=False).st_uid == owner
    except OSError:
        return False
