"""Reads a state back: as files below a folder, or one file as a stream; every block verified."""

from __future__ import annotations

import os
import shutil
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..errors import CkptError
from .ahead import Ahead
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

_READING = "read from the state store"
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
    """A file being read back, and perhaps written."""

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


class StateReader:
    """One state opened for reading; made by :meth:`StateStore.open`.

    Thread-safe: several files may be streamed at once. A context manager.

    Raises
    ------
    CkptError
        Every method raises ``state_damaged`` (names the file) for a block that is missing or
        not what was written, ``store_unavailable`` for one that cannot be read, and
        ``cancelled``.
    """

    def __init__(self, chunks: Chunks, body: Body, *, level: int, workers: int) -> None:
        self._chunks = chunks
        self._body = body
        self._level = level
        self._workers = workers
        self._lock = threading.Lock()
        try:
            with translated(_READING):
                index = load_index(chunks, body.index, body.index_size, Scratch(level))
        except Damaged as error:
            raise damaged(body.id, str(error)) from error
        self._index = index
        self._streams = 0

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of what is open: nothing is, between two calls."""

    def files(self) -> list[tuple[bytes, int]]:
        """Relative paths and sizes, in bytes, of all files of the state."""
        return [(entry.path, entry.size) for entry in self._index.files]

    def extract(
        self,
        dest: Path,
        *,
        skip: Callable[[bytes], bool] | None = None,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Rebuild the state's image directory.

        Parameters
        ----------
        dest
            Folder that is empty or not there yet; made with mode 0700. Files get their saved
            mode and time, sparse ones stay sparse. Nothing stays behind on failure.
        skip
            Says of a file's relative path whether to leave it out.
        progress
            Called with (bytes done, bytes in all) from a worker thread, at most every 0.1 s.
        cancel
            Set it to stop.

        Raises
        ------
        CkptError
            ``no_space``, and what the class says.
        """
        with translated(_REBUILDING):
            existed = dest.exists()
            make_private_dir(dest)
            if any(dest.iterdir()):
                raise CkptError("internal", "The folder to restore from is not empty.")
        try:
            self._rebuild(dest, skip, progress, cancel)
        except BaseException:
            for left in dest.iterdir():
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)
            if not existed:
                shutil.rmtree(dest, ignore_errors=True)
            raise

    def verify(
        self,
        only: Callable[[bytes], bool],
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Read all blocks of some files and look whether they are as they were written.

        Parameters
        ----------
        only
            Says of a file's relative path whether it is looked at.
        progress, cancel
            As for :meth:`extract`.
        """
        files = [_Rebuilding(e, e.path) for e in self._index.files if only(e.path)]
        self._pool(files, self._check_block, progress, cancel).run(
            block for file in files for block in self._blocks(file)
        )

    @contextmanager
    def stream(
        self, path: bytes, *, cancel: threading.Event | None = None
    ) -> Iterator[Iterator[memoryview]]:
        """One file's content in order, holes as zeros, read ahead by threads.

        A piece is valid until the next but one is taken. Memory is bounded by about 2 MiB a
        thread and file; the more files are streamed at once, the fewer threads each gets.

        Parameters
        ----------
        path
            Relative path of the file.
        cancel
            Set it to have the iteration end with ``cancelled``.

        Raises
        ------
        KeyError
            The state has no such file.
        """
        entry = next((e for e in self._index.files if e.path == path), None)
        if entry is None:
            raise KeyError(path)
        file, step = _Rebuilding(entry, path), self._index.block_size
        zeros = memoryview(bytes(min(step, entry.size)))

        def read(number: int, scratch: Scratch) -> memoryview:
            name, offset = file.names[number], number * step
            size = min(step, entry.size - offset)
            if name == ZERO_NAME:
                return zeros[:size]
            return self._read(_Block(file, name, offset, size), scratch)

        with self._lock:
            self._streams += 1
            workers = max(2, self._workers // self._streams)
        try:
            ahead = Ahead(read, len(file.names), workers=workers, level=self._level, cancel=cancel)
            with ahead as pieces:
                yield pieces
        finally:
            with self._lock:
                self._streams -= 1

    def _rebuild(
        self,
        dest: Path,
        skip: Callable[[bytes], bool] | None,
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> None:
        root = os.fsencode(dest)
        files = [
            _Rebuilding(e, os.path.join(root, e.path))
            for e in self._index.files
            if skip is None or not skip(e.path)
        ]
        pool = self._pool(files, self._rebuild_block, progress, cancel)
        try:
            with translated(_REBUILDING):
                for entry in self._index.dirs:
                    os.mkdir(os.path.join(root, entry.path), 0o700)
                pool.run(self._created(files))
                # Children first: a folder may end up without write permission.
                for entry in reversed(self._index.dirs):
                    os.chmod(os.path.join(root, entry.path), entry.mode & 0o777)
        finally:
            for file in files:
                file.close()

    def _pool(
        self,
        files: list[_Rebuilding],
        work: Callable[[_Block, Scratch], int],
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> Pool[_Block]:
        return Pool(
            work,
            total=sum(file.data_size(self._index.block_size) for file in files),
            workers=self._workers,
            level=self._level,
            progress=progress,
            cancel=cancel,
        )

    def _created(self, files: list[_Rebuilding]) -> Iterator[_Block]:
        for file in files:
            file.create()
            if not file.left:
                file.finish()
            yield from self._blocks(file)

    def _blocks(self, file: _Rebuilding) -> Iterator[_Block]:
        for number, name in enumerate(file.names):
            if name != ZERO_NAME:
                offset = number * self._index.block_size
                size = min(self._index.block_size, file.entry.size - offset)
                yield _Block(file, name, offset, size)

    def _read(self, block: _Block, scratch: Scratch) -> memoryview:
        try:
            return self._chunks.read(block.name, block.size, scratch)
        except Damaged as error:
            where = f"{os.fsdecode(block.file.entry.path)} at byte {block.offset}: {error}"
            raise damaged(self._body.id, where) from error
        except OSError as error:
            raise store_error(error, _READING) from error

    def _check_block(self, block: _Block, scratch: Scratch) -> int:
        return len(self._read(block, scratch))

    def _rebuild_block(self, block: _Block, scratch: Scratch) -> int:
        file = block.file
        file.write(self._read(block, scratch), block.offset)
        with self._lock:
            file.left -= 1
            last = file.left == 0
        if last:
            file.finish()
        return block.size
