"""What a new state may share with its parent: which pages are where, and their hashes."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from .codec import PAGE
from .damage import Damaged, TooNew
from .index import FileEntry, Index, NewRun, Runs, Segment
from .owner import OwnerStore
from .packs import HASH_SIZE, Footer, PackSource, read_footer, state_of_pack

#: States whose packs one state may count on: more would scatter it over the disk.
GENERATIONS = 64
#: Below this share of its bytes that its parent uses, a pack is given up.
LIVE_SHARE = 0.25
_FOOTER_OVERHEAD = 4096


class Piece(NamedTuple):
    """Pages of a window that the parent has at the same address: a part of one of its runs."""

    at: int
    pages: int
    blob: int
    first: int


class Space:
    """The parent's pages of one file, in order of their addresses."""

    def __init__(self, runs: Runs) -> None:
        self._page, self._count = runs.page, runs.count
        self._blob, self._first = runs.blob, runs.first

    def pieces(self, page: int, count: int, at: int) -> Iterator[Piece]:
        """What is known of `count` pages from address `page` on, `at` being that of the first."""
        end = page + count
        position = bisect_right(self._page, page) - 1
        if position < 0 or self._page[position] + self._count[position] <= page:
            position += 1
        while position < len(self._page) and (start := self._page[position]) < end:
            stop = min(start + self._count[position], end)
            # Addresses that the parent has twice (which it should not) count once.
            begin = max(start, page)
            if begin < stop:
                first = self._first[position] + begin - start
                yield Piece(at + begin - page, stop - begin, self._blob[position], first)
                at, page = at + stop - page, stop
            position += 1


class Parent:
    """A state that a new one is made against.

    Parameters
    ----------
    state_id, index
        The state.
    owner, source
        Its store, and where its packs are.
    memory
        Bytes that lists of hashes may take.
    suspect
        Packs that were found damaged, of which nothing is used again.
    """

    def __init__(
        self,
        state_id: str,
        index: Index,
        owner: OwnerStore,
        source: PackSource,
        *,
        memory: int,
        suspect: Container[str] = (),
    ) -> None:
        self.state_id = state_id
        self.index = index
        self._owner = owner
        self._source = source
        self._files = {_space_of(file): file for file in reversed(index.files)}
        self._usable = _worth_keeping(index, owner.sealing.key_id, suspect)
        self._footers: OrderedDict[int, Footer] = OrderedDict()
        self._memory = memory
        self._held = 0
        self._by_name: dict[bytes, int] | None = None
        self._lock = threading.Lock()

    def space(self, name: str) -> Space | None:
        """Look up the pages that have addresses in a space."""
        file = self._files.get(name)
        return None if file is None else Space(_by_address(self.index, file))

    def hashes(self, blob: int, first: int, count: int) -> bytes | None:
        """Hashes of pages of a blob, one after the other; ``None`` if it is not to be used again.

        Raises
        ------
        CkptError
            The pack cannot be reached.
        OSError
            It cannot be read.
        """
        blobs = self.index.blobs
        pack = blobs.pack[blob]
        if not self._usable[pack]:
            return None
        with self._lock:
            footer = self._footers.get(pack)
            if footer is None:
                footer = self._load(pack)
                if footer is None:
                    return None
            else:
                self._footers.move_to_end(pack)
        return footer.hashes_of(blobs.number[blob], first, count)

    def shared(
        self, space: Space, addresses: Addresses, page: int, count: int, hashes: bytes
    ) -> list[NewRun]:
        """Find the pages that are as this state has them.

        Parameters
        ----------
        space, addresses
            Where this state has its pages, and the new file its own.
        page, count
            Pages of the new file, from `page` on.
        hashes
            Their hashes, one after the other.

        Returns
        -------
        list of NewRun
            With positions counted from `page`.
        """
        found: list[NewRun] = []
        for at, length, address in addresses.ranges(page, count):
            for piece in space.pieces(address, length, at):
                there = self.hashes(piece.blob, piece.first, piece.pages)
                if there is None:
                    continue
                here = hashes[piece.at * HASH_SIZE : (piece.at + piece.pages) * HASH_SIZE]
                changed: list[int] = []
                _compare(here, there, 0, piece.pages, changed)
                begin = 0
                for end in (*changed, piece.pages):
                    if begin < end:
                        found.append(
                            (piece.at + begin, end - begin, piece.blob, piece.first + begin)
                        )
                    begin = end + 1
        return found

    def blob_named(self, name: bytes) -> int | None:
        """Find a whole blob by its name, wherever its pages are in the parent."""
        with self._lock:
            if self._by_name is None:
                names = self.index.blobs.names
                self._by_name = {
                    bytes(names[at : at + 32]): at // 32 for at in range(0, len(names), 32)
                }
            blob = self._by_name.get(name)
        if blob is None or self.hashes(blob, 0, 0) is None:
            return None
        return blob

    def close(self) -> None:
        """Let go of what is open."""
        self._source.close()

    def _load(self, pack: int) -> Footer | None:
        entry = self.index.packs[pack]
        try:
            footer = read_footer(
                self._source, entry.id, self._owner.footer_key, self._owner.sealing
            )
            if footer.salt != entry.salt or footer.key_id != entry.key_id:
                raise Damaged("the footer is another pack's")
        except (Damaged, TooNew):
            # Missing or altered: what it holds is stored anew.
            self._usable[pack] = False
            return None
        self._footers[pack] = footer
        self._held += len(footer.hashes) + _FOOTER_OVERHEAD
        while self._held > self._memory and len(self._footers) > 1:
            _, old = self._footers.popitem(last=False)
            self._held -= len(old.hashes) + _FOOTER_OVERHEAD
        return footer


def _space_of(file: FileEntry) -> str:
    return default_space(file.path) if file.space is None else file.space


def default_space(path: bytes) -> str:
    """Name of a file's addresses if it has no layout; no layout's name begins like it."""
    return "/" + path.decode("utf-8", "surrogateescape")


def _worth_keeping(index: Index, key_id: str | None, suspect: Container[str]) -> list[bool]:
    """Which packs a new state may count on; the others can die with the states that do."""
    used = index.used()
    usable = [
        pack.key_id == key_id and pack.id not in suspect and live >= LIVE_SHARE * pack.stored
        for pack, live in zip(index.packs, used, strict=True)
    ]
    live_of: dict[str, int] = {}
    for pack, live in zip(index.packs, used, strict=True):
        state = state_of_pack(pack.id)
        live_of[state] = live_of.get(state, 0) + live
    # The new state is a generation too.
    too_many = len(live_of) - (GENERATIONS - 1)
    given_up = set(sorted(live_of, key=live_of.__getitem__)[: max(0, too_many)])
    return [
        good and state_of_pack(pack.id) not in given_up
        for good, pack in zip(usable, index.packs, strict=True)
    ]


def _by_address(index: Index, file: FileEntry) -> Runs:
    """The runs of a file with addresses (in pages) instead of places in the file, in order."""
    runs, begin, end = index.runs, file.first_run, file.first_run + file.runs
    found = Runs()
    segments = file.segment_list()
    if segments is None:
        found.page, found.count = runs.page[begin:end], runs.count[begin:end]
        found.blob, found.first = runs.blob[begin:end], runs.first[begin:end]
        return found
    position = begin
    for offset, length, address in _in_pages(segments):
        while position < end and runs.page[position] + runs.count[position] <= offset:
            position += 1
        at = position
        while at < end and runs.page[at] < offset + length:
            start = max(runs.page[at], offset)
            stop = min(runs.page[at] + runs.count[at], offset + length)
            found.append(
                start - offset + address,
                stop - start,
                runs.blob[at],
                runs.first[at] + start - runs.page[at],
            )
            at += 1
    order = sorted(range(len(found)), key=found.page.__getitem__)
    if order != list(range(len(order))):
        found.page = array("Q", map(found.page.__getitem__, order))
        found.count = array("H", map(found.count.__getitem__, order))
        found.blob = array("I", map(found.blob.__getitem__, order))
        found.first = array("B", map(found.first.__getitem__, order))
    return found


def _in_pages(segments: Sequence[Segment]) -> Iterator[Segment]:
    for offset, length, address in segments:
        yield offset // PAGE, length // PAGE, address // PAGE


class Addresses:
    """Where the pages of a new file are in its space.

    Raises
    ------
    ValueError
        Segments that are not whole pages, not in order, or overlap.
    """

    def __init__(self, segments: Sequence[Segment] | None) -> None:
        self._segments: list[Segment] | None = None
        if segments is None:
            return
        end = 0
        for offset, length, address in segments:
            if offset < end or length < 0 or (offset | length | address) % PAGE:
                raise ValueError("segments are whole pages, in order and without overlap")
            end = offset + length
        self._segments = list(_in_pages(segments))
        self._starts = array("Q", [offset for offset, _, _ in self._segments])

    def ranges(self, page: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Addresses of `count` pages from `page` on: (position in them, count, address)."""
        if self._segments is None:
            yield 0, count, page
            return
        end = page + count
        position = max(0, bisect_right(self._starts, page) - 1)
        while position < len(self._segments):
            offset, length, address = self._segments[position]
            if offset >= end:
                break
            begin, stop = max(offset, page), min(offset + length, end)
            if begin < stop:
                yield begin - page, stop - begin, begin - offset + address
            position += 1


def _compare(here: bytes, there: bytes, begin: int, end: int, changed: list[int]) -> None:
    """Find the pages whose hashes differ: few, or nearly all."""
    if here[begin * HASH_SIZE : end * HASH_SIZE] == there[begin * HASH_SIZE : end * HASH_SIZE]:
        return
    if end - begin == 1:
        changed.append(begin)
        return
    middle = (begin + end) // 2
    _compare(here, there, begin, middle, changed)
    _compare(here, there, middle, end, changed)
