"""Writes one new state: pages that its parent lacks into packs first, the manifest last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from blake3 import blake3
from xxhash import xxh3_128_digest

from ..moments import read_moment
from ..progress import Progress
from .blobwriter import BlobWriter, Range
from .codec import BLOB, BLOB_PAGES, PAGE, Scratch, encode
from .incremental import Parent, default_space
from .index import DirEntry, Index, NewRun, encode_index
from .layout import create_file, move_into, sync_dir, translated
from .manifest import Body, IndexPlace, encode_manifest
from .owner import OwnerStore
from .packwriter import PackWriter
from .pool import Pool
from .presence import Presence
from .records import StateMeta, StateRecord, state_format
from .storing import Storing
from .tree import Layouts, Source, scan

_ZEROS = bytes(BLOB)
_PROBE = 64
_WRITING = "write to the state store"


class _Window(NamedTuple):
    """A mebibyte of a source, or what there is of it at the end."""

    reading: Storing
    position: int
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
    parent
        Id of the state that it shares pages with, if any.
    """

    def __init__(
        self,
        owner: OwnerStore,
        kernel_id: str,
        presence: Presence,
        parent: Parent | None,
        *,
        state_id: str,
        level: int,
        workers: int,
        after: str | None = None,
        on_pack: Callable[[str], None] | None = None,
        on_commit: Callable[[StateRecord], None] | None = None,
    ) -> None:
        self.state_id = state_id
        self._after = after
        self._on_commit = on_commit
        self.parent = None if parent is None else parent.state_id
        self._owner = owner
        self._kernel_id = kernel_id
        self._presence = presence
        self._known = parent
        self._level = level
        self._workers = workers
        self._packs = PackWriter(owner, state_id, presence.folder, on_pack)
        self._dirs: list[DirEntry] = []
        self._files: list[Storing] = []
        self._blobs = BlobWriter(owner, self._packs, parent)
        self._lock = threading.Lock()
        self._seed = owner.page_seed
        self._zero_page = xxh3_128_digest(_ZEROS[:PAGE], self._seed)
        self._over = False

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
        layout: Layouts | None = None,
        consume: bool = False,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """Store a folder: files of any depth with modes and times, empty ones, sparse ones.

        Parameters
        ----------
        source
            The image directory; must not change meanwhile.
        layout
            Gives the addresses of a file's pages, by its path relative to `source`.
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
        ValueError
            A layout that is none.
        """
        with translated("read the image to be stored"):
            found = list(scan(source, layouts=layout, consume=consume))
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
        readings = [Storing(source) for source in sources]
        pool: Pool[_Window] = Pool(
            self._store_window,
            total=sum(r.window_size(number) for r in readings for number in r.windows),
            workers=self._workers,
            level=self._level,
            progress=progress,
            cancel=cancel,
        )
        try:
            with translated(_WRITING):
                pool.run(self._windows(readings))
        finally:
            for reading in readings:
                reading.source.close()
        self._files += readings

    def added(self) -> Iterator[tuple[bytes, int, int]]:
        """Ranges of files that this save stored itself: (path, offset, length) in bytes."""
        for reading in self._files:
            runs = reading.runs
            for page, count, blob in zip(runs.page, runs.count, runs.blob, strict=True):
                if self._blobs.is_new(blob):
                    yield reading.source.path, page * PAGE, count * PAGE

    def _windows(self, readings: list[Storing]) -> Iterator[_Window]:
        for reading in readings:
            if not reading.windows:
                continue
            source = reading.source
            source.open()
            if self._known is not None:
                layout = source.layout
                name = default_space(source.path) if layout is None else layout.space
                reading.space = self._known.space(name)
            for position, number in enumerate(reading.windows):
                yield _Window(reading, position, number, reading.window_size(number))

    def _store_window(self, window: _Window, scratch: Scratch) -> int:
        reading, size = window.reading, window.size
        reading.source.read_into(memoryview(scratch.plain)[:size], window.number * BLOB)
        runs: list[NewRun] = []
        if not _is_zero(scratch.plain, size):
            if size % PAGE:
                scratch.plain[size : size + -size % PAGE] = bytes(-size % PAGE)
            runs = self._store_pages(reading, window.number * BLOB_PAGES, -(-size // PAGE), scratch)
        reading.source.done_with(window.number * BLOB, size)
        self._presence.touch()
        with self._lock:
            last = reading.add(window.position, runs)
        if last:
            reading.space = None
            reading.source.close()
        return size

    def _store_pages(
        self, reading: Storing, page: int, count: int, scratch: Scratch
    ) -> list[NewRun]:
        """Find `count` pages from `page` on in the parent or store them; returns their runs."""
        plain, seed = memoryview(scratch.plain), self._seed
        digests = [
            xxh3_128_digest(plain[at : at + PAGE], seed) for at in range(0, count * PAGE, PAGE)
        ]
        hashes = b"".join(digests)
        runs: list[NewRun] = []
        if self._known is not None and reading.space is not None:
            runs = self._known.shared(reading.space, reading.addresses, page, count, hashes)
        new = list(_between(runs, count))
        if self._zero_page in digests:
            new = [part for begin, end in new for part in self._filled(begin, end, digests, plain)]
        if new:
            runs += self._blobs.store(new, plain, hashes, scratch)
        return [(page + at, count, blob, first) for at, count, blob, first in sorted(runs)]

    def _filled(
        self, begin: int, end: int, digests: list[bytes], plain: memoryview
    ) -> Iterator[Range]:
        """What of a range of pages is not zero."""
        start = begin
        for page in range(begin, end):
            if (
                digests[page] == self._zero_page
                and plain[page * PAGE : (page + 1) * PAGE] == _ZEROS[:PAGE]
            ):
                if start < page:
                    yield start, page
                start = page + 1
        if start < end:
            yield start, end

    def commit(self, meta: StateMeta) -> StateRecord:
        """Make the state durable, then list it: flush all packs, write the manifest last.

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
            self._withdraw()
            raise
        self._over = True
        self._end()
        if self._on_commit is not None:
            self._on_commit(record)
        return record

    def _commit(self, meta: StateMeta) -> StateRecord:
        scratch = Scratch(self._level)
        self._blobs.finish(scratch)
        index = Index()
        index.dirs = self._dirs
        self._blobs.complete(index, self._files)
        plain = encode_index(index)
        name = blake3(plain, key=self._owner.name_key)
        codec, payload = encode(memoryview(plain), scratch)
        entry, placed = self._packs.add_index(payload)
        packs = {p.id: used for p, used in zip(index.packs, index.used(), strict=True)}
        packs[entry.id] = packs.get(entry.id, 0) + placed.length
        stored = self._packs.finish()
        body = Body(
            format=state_format(meta),
            id=self.state_id,
            created=_now(self._after),
            size=sum(file.size for file in index.files),
            stored_size=stored,
            parent=self.parent,
            key_id=self._owner.sealing.key_id,
            index=IndexPlace(
                pack=entry.id,
                number=placed.number,
                offset=placed.offset,
                length=placed.length,
                codec=codec,
                size=len(plain),
                salt=entry.salt.hex(),
                name=name.hexdigest(),
            ),
            packs=packs,
            meta=meta,
        )
        path = self._owner.manifest(self._kernel_id, self.state_id)
        temporary = self._presence.folder / "manifest"
        create_file(temporary, encode_manifest(body, self._owner.sealing))
        move_into(temporary, path)
        sync_dir(self._owner.kernels)
        return body.record()

    def abort(self) -> None:
        """Forget the state, and remove its packs.

        Does nothing after a commit or an earlier abort; never raises for files it cannot
        remove: those are left to the collector.
        """
        if self._over:
            return
        self._over = True
        self._packs.abort()
        self._end()

    def _withdraw(self) -> None:
        """Undo a commit that failed, also one whose manifest has its name already.

        That goes before its packs; where it cannot be removed they stay, or the state would be
        listed, and damaged.
        """
        manifest = self._owner.manifest(self._kernel_id, self.state_id)
        try:
            manifest.unlink(missing_ok=True)
        except OSError:
            self._over = True
            self._end()
        else:
            self.abort()

    def _end(self) -> None:
        self._presence.end()
        if self._known is not None:
            self._known.close()

    def _check_open(self) -> None:
        if self._over:
            raise RuntimeError("this state is already committed or aborted")


def _is_zero(buffer: bytearray, size: int) -> bool:
    if size >= _PROBE and not buffer.startswith(_ZEROS[:_PROBE]):
        return False
    if size == BLOB:
        return buffer == _ZEROS
    return buffer[:size] == _ZEROS[:size]


def _between(runs: list[NewRun], count: int) -> Iterator[Range]:
    """What of `count` pages is in none of the runs."""
    at = 0
    for begin, length, _, _ in sorted(runs):
        if at < begin:
            yield at, begin
        at = begin + length
    if at < count:
        yield at, count


def _now(after: str | None) -> str:
    """Time, but later than `after`: another node's clock, that of an older state, may be ahead."""
    now = datetime.now(timezone.utc)
    if after is not None:
        newest = read_moment(after)
        now = max(now, newest + timedelta(milliseconds=1))
    return now.isoformat(timespec="milliseconds")[:-6] + "Z"
