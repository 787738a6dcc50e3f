"""A file while it is stored: which pages are where, and what its entry in the index will be."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from .codec import BLOB
from .columns import to_column
from .incremental import Addresses, Space
from .index import FileEntry, NewRun, Runs
from .tree import Source


class Storing:
    """A source being read, and its entry in the index to be."""

    def __init__(self, source: Source) -> None:
        self.source = source
        layout = source.layout
        self.addresses = Addresses(None if layout is None else layout.segments)
        self.space: Space | None = None
        self.windows = array("Q", _data_windows(source))
        self.left = len(self.windows)
        self.runs = Runs()
        self._next = 0
        self._waiting: dict[int, list[NewRun]] = {}

    def window_size(self, number: int) -> int:
        return min(BLOB, self.source.size - number * BLOB)

    def add(self, position: int, runs: list[NewRun]) -> bool:
        """Take the runs of a window; whether it was the last one that was missing."""
        self._waiting[position] = runs
        while (ready := self._waiting.pop(self._next, None)) is not None:
            for run in ready:
                self.runs.join(0, *run)
            self._next += 1
        self.left -= 1
        return self.left == 0

    def entry(self, first_run: int) -> FileEntry:
        source, layout = self.source, self.source.layout
        return FileEntry(
            path=source.path,
            mode=source.mode,
            mtime_ns=source.mtime_ns,
            size=source.size,
            first_run=first_run,
            runs=len(self.runs),
            space=None if layout is None else layout.space,
            segments=None
            if layout is None
            else (
                to_column("Q", [offset for offset, _, _ in layout.segments]),
                to_column("Q", [length for _, length, _ in layout.segments]),
                to_column("Q", [address for _, _, address in layout.segments]),
            ),
        )


def _data_windows(source: Source) -> Iterator[int]:
    """Numbers of the windows that may hold something other than zeros."""
    if source.extents is None:
        yield from range(-(-source.size // BLOB))
        return
    done = 0
    for offset, length in source.extents:
        first, end = max(done, offset // BLOB), -(-(offset + length) // BLOB)
        yield from range(first, end)
        done = max(done, end)
