"""Writes a small store with fixed contents: ``python -m tests.store.format2 FOLDER``.

What the version that introduced format 2 wrote is in ``tests/store/data/format-2``. It is not
to be made anew: later versions must read it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from jupyter_gpu_ckpt.store import StateStore
from jupyter_gpu_ckpt.store.tree import Layout

from .conftest import KERNEL, make_meta, noise

PAGE = 4096
ADDRESS = 0x7F00_0000_0000


def images() -> list[dict[str, bytes]]:
    """Two images of a kernel: in the second a page was written, and one mapped before others."""
    memory = (
        noise(3 * PAGE) + b"row of a table\n" * 40_000 + bytes(-600_000 % PAGE) + bytes(9 * PAGE)
    )
    changed = bytearray(memory)
    changed[5 * PAGE : 5 * PAGE + 7] = b"changed"
    first = {"pages-1.img": memory, "core-1.img": b"core" * 100, "empty.img": b"", "one": b"1"}
    second = first | {"pages-1.img": noise(PAGE, 1) + bytes(changed)}
    return [first, second]


def layouts(image: dict[str, bytes]) -> dict[bytes, Layout]:
    """Which addresses the pages have."""
    size = len(image["pages-1.img"])
    extra = PAGE if size == len(images()[1]["pages-1.img"]) else 0
    return {b"pages-1.img": Layout("mm-1", [(0, size, ADDRESS - extra)])}


def write(root: Path) -> list[str]:
    """Save both images; returns the ids of the states."""
    store = StateStore(root, "ada")
    made: list[str] = []
    for image in images():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "node-local").mkdir(mode=0o750)
            for name, content in image.items():
                (folder / name).write_bytes(content)
                os.utime(folder / name, ns=(1_000_000_007, 1_000_000_007))
            (folder / "node-local" / "run.sh").write_bytes(b"#!/bin/sh\n")
            (folder / "node-local" / "run.sh").chmod(0o755)
            with store.begin(KERNEL) as writer:
                writer.add_tree(folder, layout=layouts(image).get)
                made.append(writer.commit(make_meta()).id)
    return made


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
