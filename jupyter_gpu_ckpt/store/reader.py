"""Rebuilds an image directory from a state, every block verified."""

from __future__ import annotations

import os
import shutil
import threading
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import CkptError
from .chunks import Chunks
from .codec import Scratch
from .layout import make_private_dir, store_error, translated
from .manifest import (
    NAME_SIZE,
    ZERO_NAME,
    Body,
    Damaged,
    FileEntry,
    Index,
    damaged,
    decode_index,
)
from .pool import Pool, Progress

_REBUILDING = "write the files to restore from"


def load_index(chunks: Chunks, name: str, size: int, scratch: Scratch) -> Index:
    """Read a state's index.

    Raises
    ------
    Damaged
        Missing or altered.
    OSError
        Not readable.
    """
    try:
        data = chunks.read(bytes.fromhex(name), size, scratch)
    except Damaged as error:
        raise Damaged(f"its list of blocks cannot be read ({error})") from error
    return decode_index(data)


class _Rebuilding:
    """A file being written."""

    def __init__(self, entry: FileEntry, path: bytes) -> None:
        self.entry = entry
        self.path = path
        self.names = [
            entry.blocks[at : at + NAME_SIZE] for at in range(0, len(entry.blocks), NAME_SIZE)
        ]
        self.left = sum(name != ZERO_NAME for name in self.names)
        self.fd = -1
        self._writing = threading.Lock()
        self._starts = [offset for offset, _ in entry.extents or []]

    def data_size(self, block_size: int) -> int:
        """Bytes to write, in whole blocks but for the end of the file."""
        size = self.left * block_size
        if self.names and self.names[-1] != ZERO_NAME:
            size -= len(self.names) * block_size - self.entry.size
        return size

    def create(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(self.path, flags, 0o600)
        if self.entry.size:
            os.ftruncate(self.fd, self.entry.size)

    def write(self, plain: memoryview, offset: int) -> None:
        """Write a block, leaving out what was a hole."""
        extents = self.entry.extents
        if extents is None:
            self._pwrite(plain, offset)
            return
        end = offset + len(plain)
        for start, length in extents[max(0, bisect_right(self._starts, offset) - 1) :]:
            if start >= end:
                break
            first, last = max(start, offset), min(start + length, end)
            if first < last:
                self._pwrite(plain[first - offset : last - offset], first)

    def _pwrite(self, data: memoryview, offset: int) -> None:
        # The kernel lets one thread at a time write to a file, and the others spin:
        # waiting here leaves the processor to those that decompress.
        with self._writing:
            while data:
                done = os.pwrite(self.fd, data, offset)
                data, offset = data[done:], offset + done

    def finish(self) -> None:
        os.fchmod(self.fd, self.entry.mode & 0o777)
        os.utime(self.fd, ns=(self.entry.mtime_ns, self.entry.mtime_ns))
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Block(NamedTuple):
    file: _Rebuilding
    name: bytes
    offset: int
    size: int


class Reader:
    """Reads one state back; see :meth:`StateStore.materialise`."""

    def __init__(self, chunks: Chunks, body: Body, *, level: int, workers: int) -> None:
        self._chunks = chunks
        self._body = body
        self._level = level
        self._workers = workers
        self._lock = threading.Lock()

    def run(self, dest: Path, progress: Progress | None, cancel: threading.Event | None) -> None:
        """Rebuild below `dest`; on failure everything written there is removed."""
        try:
            with translated("read from the state store"):
                index = load_index(
                    self._chunks, self._body.index, self._body.index_size, Scratch(self._level)
                )
        except Damaged as error:
            raise damaged(self._body.id, str(error)) from error
        with translated(_REBUILDING):
            existed = dest.exists()
            make_private_dir(dest)
            if any(dest.iterdir()):
                raise CkptError("internal", "The folder to restore from is not empty.")
        try:
            self._rebuild(index, dest, progress, cancel)
        except BaseException:
            for left in dest.iterdir():
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)
            if not existed:
                shutil.rmtree(dest, ignore_errors=True)
            raise

    def _rebuild(
        self,
        index: Index,
        dest: Path,
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> None:
        root = os.fsencode(dest)
        files = [_Rebuilding(e, os.path.join(root, e.path)) for e in index.files]
        pool: Pool[_Block] = Pool(
            self._rebuild_block,
            total=sum(file.data_size(index.block_size) for file in files),
            workers=self._workers,
            level=self._level,
            progress=progress,
            cancel=cancel,
        )
        try:
            with translated(_REBUILDING):
                for entry in index.dirs:
                    os.mkdir(os.path.join(root, entry.path), 0o700)
                pool.run(self._blocks(files, index.block_size))
                # Children first: a folder may end up without write permission.
                for entry in reversed(index.dirs):
                    os.chmod(os.path.join(root, entry.path), entry.mode & 0o777)
        finally:
            for file in files:
                file.close()

    def _blocks(self, files: list[_Rebuilding], block_size: int) -> Iterator[_Block]:
        for file in files:
            file.create()
            if not file.left:
                file.finish()
                continue
            for number, name in enumerate(file.names):
                if name != ZERO_NAME:
                    offset = number * block_size
                    yield _Block(file, name, offset, min(block_size, file.entry.size - offset))

    def _rebuild_block(self, block: _Block, scratch: Scratch) -> int:
        file = block.file
        try:
            plain = self._chunks.read(block.name, block.size, scratch)
        except Damaged as error:
            where = f"{os.fsdecode(file.entry.path)} at byte {block.offset}: {error}"
            raise damaged(self._body.id, where) from error
        except OSError as error:
            raise store_error(error, "read from the state store") from error
        file.write(plain, block.offset)
        with self._lock:
            file.left -= 1
            last = file.left == 0
        if last:
            file.finish()
        return block.size
