"""The record of one node-local file, directory or FIFO in a state."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

#: Folder of an image directory that holds the copies, named 0, 1, 2, ...
FOLDER: Final = "node-local"


class NodeLocalEntry(msgspec.Struct, frozen=True):
    """Something below a node-local directory that a state needs.

    Attributes
    ----------
    path, base
        Where it belongs, and the node-local directory that this is below; both absolute.
    kind
        What it is.
    mode, uid, gid
        Permission bits and owner.
    mtime_ns
        Nanoseconds since the epoch.
    size
        Bytes (apparent size).
    source
        Number of the copy in the image directory; ``None`` where there is nothing to copy.
    same_as
        Path of an earlier entry that this one is a hard link to.
    device, inode
        What the file was on its node: tells whether the file that is there is the same one.
    link_remap
        CRIU's own link to a file whose name is gone; wanted only during the restore.
    shared
        Other kernels write to it too: one that is there is left as it is, whatever it holds.
    """

    path: str
    base: str
    kind: Literal["dir", "file", "fifo"]
    mode: int
    uid: int
    gid: int
    mtime_ns: int = 0
    size: int = 0
    source: int | None = None
    same_as: str | None = None
    link_remap: bool = False
    device: int = 0
    inode: int = 0
    shared: bool = False


def copy_path(images_dir: Path, number: int) -> Path:
    """Where an entry's copy lies."""
    return images_dir / FOLDER / str(number)
