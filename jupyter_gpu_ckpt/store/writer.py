"""Writes one new state: blocks first, the manifest last."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ..errors import CkptError
from .chunks import Chunks, Created
from .codec import BLOCK, Scratch
from .layout import create_file, move_into, sync_dir, translated
from .manifest import (
    NAME_SIZE,
    Body,
    DirEntry,
    FileEntry,
    Index,
    encode_index,
    encode_manifest,
)
from .owner import OwnerStore
from .pool import Pool, Progress
from .presence import Presence
from .records import FORMAT, StateMeta, StateRecord
from .tree import Source, scan

_ZEROS = bytes(BLOCK)
_PROBE = 64
_WRITING = "write to the state store"


class _Reading:
    """A source being read, and its entry in the index to be."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.names = bytearray(NAME_SIZE * -(-source.size // BLOCK))
        self.numbers = list(_data_blocks(source))
        self.left = len(self.numbers)

    def block_size(self, number: int) -> int:
        return min(BLOCK, self.source.size - number * BLOCK)

    def entry(self) -> FileEntry:
        source = self.source
        return FileEntry(
            path=source.path,
            mode=source.mode,
            mtime_ns=source.mtime_ns,
            size=source.size,
            blocks=bytes(self.names),
            extents=source.extents,
        )


class _Block(NamedTuple):
    reading: _Reading
    number: int
    size: int


class StateWriter:
    """One new state, made by :meth:`StateStore.begin`; the keeper's save operation uses it.

    Call :meth:`add_tree` (from one thread), then :meth:`commit`; or :meth:`abort`. As a
    context manager it aborts when left without a commit. Until the commit nothing of it
    is listed, and when the process is killed what it wrote is garbage for the collector.

    Attributes
    ----------
    state_id
        The id the state will have.
    """

    def __init__(
        self, owner: OwnerStore, kernel_id: str, state_id: str, *, level: int, workers: int
    ) -> None:
        self.state_id = state_id
        self._owner = owner
        self._kernel_id = kernel_id
        self._level = level
        self._workers = workers
        self._chunks = Chunks(owner)
        self._dirs: list[DirEntry] = []
        self._files: list[FileEntry] = []
        self._size = 0
        self._lock = threading.Lock()
        self._counted_on: set[bytes] = set()
        self._created: list[Created] = []
        self._serial = 0
        self._over = False
        self._presence = Presence(owner.writers, state_id)

    def __enter__(self) -> StateWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def add_tree(
        self,
        source: Path,
        *,
        consume: bool = False,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Store a folder: files of any depth with modes and times, empty ones, sparse ones.

        Parameters
        ----------
        source
            The image directory; must not change meanwhile.
        consume
            Free the disk space of `source` while reading it (its files keep their size and
            read as zeros), so that image and state are never on disk both whole. Whatever
            the outcome, `source` is of no use afterwards.
        progress
            Called with (bytes done, bytes in all) from a worker thread, at most every 0.1 s.
        cancel
            Set it to stop.

        Raises
        ------
        CkptError
            ``no_space``, ``store_unavailable``, ``cancelled``; ``internal`` for an image
            that changes or holds something other than files and folders. The state can
            then only be aborted.
        """
        with translated("read the image to be stored"):
            found = list(scan(source, consume=consume))
        self._dirs += [entry for entry in found if isinstance(entry, DirEntry)]
        self.add([s for s in found if not isinstance(s, DirEntry)], progress, cancel)

    def add(
        self,
        sources: Iterable[Source],
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Store files from any kind of source; see :meth:`add_tree`."""
        self._check_open()
        readings = [_Reading(source) for source in sources]
        pool: Pool[_Block] = Pool(
            self._store_block,
            total=sum(r.block_size(number) for r in readings for number in r.numbers),
            workers=self._workers,
            level=self._level,
            progress=progress,
            cancel=cancel,
        )
        try:
            with translated(_WRITING):
                pool.run(self._blocks(readings))
        finally:
            for reading in readings:
                reading.source.close()
        self._files += [reading.entry() for reading in readings]
        self._size += sum(reading.source.size for reading in readings)

    def _blocks(self, readings: list[_Reading]) -> Iterator[_Block]:
        for reading in readings:
            if reading.numbers:
                reading.source.open()
            for number in reading.numbers:
                yield _Block(reading, number, reading.block_size(number))

    def _store_block(self, block: _Block, scratch: Scratch) -> int:
        reading = block.reading
        plain = memoryview(scratch.plain)[: block.size]
        reading.source.read_into(plain, block.number * BLOCK)
        if not _is_zero(scratch.plain, block.size):
            at = block.number * NAME_SIZE
            reading.names[at : at + NAME_SIZE] = self._put(plain, scratch)
        reading.source.done_with(block.number * BLOCK, block.size)
        self._presence.touch()
        with self._lock:
            reading.left -= 1
            last = reading.left == 0
        if last:
            reading.source.close()
        return block.size

    def _put(self, plain: memoryview, scratch: Scratch) -> bytes:
        name = self._chunks.name(plain)
        with self._lock:
            if name in self._counted_on:
                return name
            self._counted_on.add(name)
            self._serial += 1
            temporary = f"{self._presence.folder}/{self._serial}"
        created = self._chunks.write(name, plain, temporary, scratch, self._presence.now_ns())
        if created is not None:
            with self._lock:
                self._created.append(created)
        return name

    def commit(self, meta: StateMeta) -> StateRecord:
        """Make the state durable, then list it: flush all blocks, write the manifest last.

        Raises
        ------
        CkptError
            ``no_space``, ``store_unavailable``; nothing is listed then, and the writer aborted.
        """
        self._check_open()
        if meta.kernel_id != self._kernel_id:
            raise ValueError("the state was begun for another kernel")
        try:
            with translated(_WRITING):
                record = self._commit(meta)
        except BaseException:
            self.abort()
            raise
        self._over = True
        self._presence.end()
        return record

    def _commit(self, meta: StateMeta) -> StateRecord:
        index = encode_index(
            Index(format=FORMAT, block_size=BLOCK, dirs=self._dirs, files=self._files)
        )
        index_name = self._put(memoryview(index), Scratch(self._level))
        self._sync()
        body = Body(
            format=FORMAT,
            id=self.state_id,
            created=datetime.now(timezone.utc).isoformat(timespec="milliseconds")[:-6] + "Z",
            size=self._size,
            stored_size=sum(created.size for created in self._created),
            index=index_name.hex(),
            index_size=len(index),
            meta=meta,
        )
        path = self._owner.manifest(self._kernel_id, self.state_id)
        temporary = self._presence.folder / "manifest"
        create_file(temporary, encode_manifest(body, self._owner.manifest_key))
        move_into(temporary, path)
        sync_dir(self._owner.kernels)
        return body.record()

    def _sync(self) -> None:
        """Make every block of the state durable, also reused ones: who wrote them may not have."""
        names = iter(self._counted_on)
        pool: Pool[bytes] = Pool(
            self._sync_chunk,
            total=0,
            workers=self._workers,
            level=self._level,
            progress=None,
            cancel=None,
        )
        pool.run(names)
        for folder in sorted({self._chunks.folder(name) for name in self._counted_on}):
            sync_dir(Path(folder))
        sync_dir(self._owner.chunks)

    def _sync_chunk(self, name: bytes, _scratch: Scratch) -> int:
        if not self._chunks.sync(name):
            raise CkptError(
                "store_unavailable",
                "A block vanished from the state store while the state was written.",
                hint="Save the kernel again; do not remove files from the store by hand.",
            )
        self._presence.touch()
        return 0

    def abort(self) -> None:
        """Forget the state, and remove the blocks that only this writer brought.

        Does nothing after a commit or an earlier abort; never raises for files it cannot
        remove: those are left to the collector.
        """
        if self._over:
            return
        self._over = True
        for created in self._created:
            with suppress(OSError):
                self._chunks.remove(created.name, inode=created.inode, mtime_ns=created.mtime_ns)
        self._presence.end()

    def _check_open(self) -> None:
        if self._over:
            raise RuntimeError("this state is already committed or aborted")


def _data_blocks(source: Source) -> Iterator[int]:
    """Numbers of the blocks that may hold something other than zeros."""
    if source.extents is None:
        yield from range(-(-source.size // BLOCK))
        return
    done = 0
    for offset, length in source.extents:
        first, end = max(done, offset // BLOCK), -(-(offset + length) // BLOCK)
        yield from range(first, end)
        done = max(done, end)


def _is_zero(buffer: bytearray, size: int) -> bool:
    if size >= _PROBE and not buffer.startswith(_ZEROS[:_PROBE]):
        return False
    if size == BLOCK:
        return buffer == _ZEROS
    return buffer[:size] == _ZEROS[:size]
