"""Reads a state back: as files below a folder, or one file as a stream; every blob verified."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CkptError
from ..progress import Progress
from .ahead import Ahead
from .blobcache import BlobCache
from .blobreader import BlobReader
from .codec import BLOB, PAGE, Scratch
from .damage import Damaged, TooNew, damaged, too_new
from .index import FileEntry, load_index
from .layout import make_private_dir, store_error, translated
from .manifest import Body
from .owner import OwnerStore
from .packs import PackSource, read_footer
from .pool import Pool
from .rebuilding import Reading
from .records import LostRange, StateRecord, VerifyResult

_READING = "read from the state store"
_REBUILDING = "write the files to restore from"


class _Window(NamedTuple):
    reading: Reading
    number: int


class StateReader:
    """One state opened for reading; made by :meth:`StateStore.open`.

    Thread-safe: several files may be streamed at once. A context manager.

    Attributes
    ----------
    record
        The state.
    index
        What it is made of.

    Raises
    ------
    CkptError
        Every method raises ``state_damaged`` (names the file) for a blob that is missing or
        not what was written, ``store_unavailable`` for one that cannot be read,
        ``key_missing`` and ``wrong_key`` for one that cannot be decrypted, and ``cancelled``.
    """

    def __init__(
        self,
        owner: OwnerStore,
        body: Body,
        source: PackSource,
        *,
        level: int,
        workers: int,
        memory: int,
        on_damage: Callable[[str], None] | None = None,
    ) -> None:
        self.record: StateRecord = body.record()
        self._owner = owner
        self._source = source
        self._level = level
        self._workers = workers
        self._lock = threading.Lock()
        try:
            with translated(_READING):
                self.index = load_index(source, owner.sealing, owner.name_key, body)
        except Damaged as error:
            raise damaged(body.id, str(error)) from error
        except TooNew as error:
            raise too_new(body.id, str(error)) from error
        self._at_close = ExitStack()
        self._blobs = BlobReader(owner, self.index, source, on_damage)
        self._cache = BlobCache(self.index.blobs.pages, self._blobs.load, memory)
        self._streams = 0

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of what is open."""
        self.close()

    def close(self) -> None:
        """Let go of what is open."""
        self._at_close.close()

    def at_close(self, stack: ExitStack) -> None:
        """Have a stack closed with the reader."""
        self._at_close.push(stack)

    def files(self) -> list[tuple[bytes, int]]:
        """Relative paths and sizes, in bytes, of all files of the state."""
        return [(entry.path, entry.size) for entry in self.index.files]

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
            mode and time, zeros are holes. Nothing stays behind on failure.
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
                raise CkptError(
                    "internal", "The folder to restore from is not empty.", hint="Restore again."
                )
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
        """Read all blobs of some files and look whether they are as they were written.

        Parameters
        ----------
        only
            Says of a file's relative path whether it is looked at.
        progress, cancel
            As for :meth:`extract`.
        """
        result = self.check(only, progress=progress, cancel=cancel)
        for lost in result.lost:
            where = f"{os.fsdecode(lost.path)} at byte {lost.offset}: {lost.why}"
            raise damaged(self.record.id, where)

    def check(
        self,
        only: Callable[[bytes], bool] | None = None,
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> VerifyResult:
        """Read all blobs and say which ranges of which files are lost.

        Parameters
        ----------
        only
            Says of a file's relative path whether it is looked at; ``None`` for all.
        progress, cancel
            As for :meth:`extract`.
        """
        files = [entry for entry in self.index.files if only is None or only(entry.path)]
        blobs = self.index.blobs
        used = {run.blob for entry in files for run in self.index.runs_of(entry)}
        order = sorted(used, key=lambda blob: (blobs.pack[blob], blobs.offset[blob]))
        bad: dict[int, str] = {}

        def look(blob: int, scratch: Scratch) -> int:
            try:
                self._blobs.load(
                    blob, memoryview(scratch.plain)[: blobs.pages[blob] * PAGE], scratch
                )
            except Damaged as error:
                bad[blob] = str(error)
            except OSError as error:
                bad[blob] = error.strerror or str(error)
            return blobs.length[blob]

        total = sum(blobs.length[blob] for blob in used)
        self._blobs.want(order)
        self._pool(look, total, progress, cancel).run(iter(order))
        footers: list[str] = []
        for pack in sorted({blobs.pack[blob] for blob in used}):
            entry = self.index.packs[pack]
            try:
                with translated(_READING):
                    read_footer(self._source, entry.id, self._owner.footer_key, self._owner.sealing)
            except (Damaged, TooNew):
                footers.append(entry.id)
                self._blobs.suspect(pack)
        lost = list(self._lost(files, bad))
        return VerifyResult(self.record.id, len(order), total, lost, footers)

    def _lost(self, files: list[FileEntry], bad: dict[int, str]) -> Iterator[LostRange]:
        for entry in files if bad else []:
            last: LostRange | None = None
            for run in self.index.runs_of(entry):
                why = bad.get(run.blob)
                if why is None:
                    continue
                offset = run.page * PAGE
                length = min(run.pages * PAGE, entry.size - offset)
                if last is not None and last.why == why and last.offset + last.length == offset:
                    last = last._replace(length=last.length + length)
                    continue
                if last is not None:
                    yield last
                last = LostRange(entry.path, offset, length, why)
            if last is not None:
                yield last

    @contextmanager
    def stream(
        self, path: bytes, *, cancel: threading.Event | None = None
    ) -> Iterator[Iterator[memoryview]]:
        """One file's content in order, holes as zeros, read ahead by threads.

        A piece is valid until the next but one is taken. Memory is bounded by about 3 MiB a
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
        entry = next((e for e in self.index.files if e.path == path), None)
        if entry is None:
            raise KeyError(path)
        reading = Reading(self.index, entry, path)
        zeros = memoryview(bytes(min(BLOB, entry.size)))
        begun: set[int] = set()

        def read(number: int, scratch: Scratch) -> memoryview:
            buffer = memoryview(scratch.plain)
            plain = buffer[: reading.window_size(number)]
            begun.add(number)
            at = 0
            for begin, end in self._fill(reading, number, buffer, scratch):
                plain[at:begin] = zeros[: max(0, min(begin, len(plain)) - at)]
                at = min(end, len(plain))
            plain[at:] = zeros[: len(plain) - at]
            return plain

        with self._lock:
            self._streams += 1
            workers = max(2, self._workers // self._streams)
        count = -(-entry.size // BLOB)
        self._blobs.want(reading.blobs())
        self._cache.expect(reading.blobs())
        try:
            ahead = Ahead(read, count, workers=workers, level=self._level, cancel=cancel)
            with ahead as pieces:
                yield pieces
        finally:
            # Windows are begun in order.
            self._cache.forget(reading.blobs(len(begun)))
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
        readings = [
            Reading(self.index, entry, os.path.join(root, entry.path))
            for entry in self.index.files
            if skip is None or not skip(entry.path)
        ]
        total = 0
        for reading in readings:
            for window in reading.windows():
                reading.left += 1
                total += reading.window_size(window)
            self._cache.expect(reading.blobs())
        self._blobs.want(blob for reading in readings for blob in reading.blobs())
        try:
            with translated(_REBUILDING):
                for folder in self.index.dirs:
                    os.mkdir(os.path.join(root, folder.path), 0o700)
                pool = self._pool(self._rebuild_window, total, progress, cancel)
                pool.run(_created(readings))
                # Children first: a folder may end up without write permission.
                for folder in reversed(self.index.dirs):
                    os.chmod(os.path.join(root, folder.path), folder.mode & 0o777)
        finally:
            for reading in readings:
                reading.close()

    def _rebuild_window(self, window: _Window, scratch: Scratch) -> int:
        reading = window.reading
        plain = scratch.aligned
        for begin, end in self._fill(reading, window.number, plain, scratch):
            reading.write(plain[begin:end], window.number * BLOB + begin)
        with self._lock:
            reading.left -= 1
            last = reading.left == 0
        if last:
            reading.finish()
        return reading.window_size(window.number)

    def _fill(
        self, reading: Reading, window: int, plain: memoryview, scratch: Scratch
    ) -> list[tuple[int, int]]:
        """Read the pages of a window into `plain`; returns where in it data is, not zeros."""
        filled: list[tuple[int, int]] = []
        for page, count, blob, first in reading.pieces(window):
            begin, end = page * PAGE, (page + count) * PAGE
            try:
                whole = count == self.index.blobs.pages[blob]
                if whole and self._cache.only_use(blob):
                    self._blobs.load(blob, plain[begin:end], scratch)
                else:
                    with self._cache.use(blob, scratch) as found:
                        plain[begin:end] = found[first * PAGE : (first + count) * PAGE]
            except Damaged as error:
                offset = window * BLOB + begin
                where = f"{os.fsdecode(reading.entry.path)} at byte {offset}: {error}"
                raise damaged(self.record.id, where) from error
            except OSError as error:
                raise store_error(error, _READING) from error
            if filled and filled[-1][1] == begin:
                filled[-1] = (filled[-1][0], end)
            else:
                filled.append((begin, end))
        return filled

    def _pool(
        self,
        work: Callable[..., int],
        total: int,
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> Pool[Any]:
        return Pool(
            work,
            total=total,
            workers=self._workers,
            level=self._level,
            progress=progress,
            cancel=cancel,
        )


def _created(readings: list[Reading]) -> Iterator[_Window]:
    for reading in readings:
        reading.create()
        if not reading.left:
            reading.finish()
        for number in reading.windows():
            yield _Window(reading, number)
