"""A state's index: its files, and of which pages of which blobs each is made.

There may be a million runs of pages, so they and the blobs are kept in columns,
in memory as on disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add, gt, sub
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from .codec import BLOB, BLOB_PAGES, PAGE, Scratch, decode
from .columns import from_column, to_column
from .damage import Damaged, TooNew
from .manifest import NAME_SIZE, Body
from .packs import PackSource, is_pack_id
from .records import FORMAT
from .seal import Sealing

#: Most bytes of an index: of each page of the state (its blob, run, address), and of names.
_OF_A_PAGE, _NAMES = 96, 256 << 20
#: No place in a pack is beyond this.
_FARTHEST = 1 << 62

Segment = tuple[int, int, int]
#: Page (of a file, or of a part of it), pages, blob, first page of the blob.
NewRun = tuple[int, int, int, int]


class DirEntry(msgspec.Struct, kw_only=True, array_like=True):
    """A folder of an image directory; `path` is relative, as the file system spells it."""

    path: bytes
    mode: int


class FileEntry(msgspec.Struct, kw_only=True, array_like=True):
    """A file of an image directory.

    Its pages are the `runs` runs from `first_run` on; what they leave out is zeros.
    `space` names the addresses that its pages have for the next save, and `segments` has
    three columns (see :func:`.to_column`): file offset, length and address in bytes. Without,
    the address of a page is its offset, and the space is the path.
    """

    path: bytes
    mode: int
    mtime_ns: int
    size: int
    first_run: int
    runs: int
    space: str | None = None
    segments: tuple[bytes, bytes, bytes] | None = None

    def segment_list(self) -> list[Segment] | None:
        """The segments as (file offset, length, address)."""
        if self.segments is None:
            return None
        return list(zip(*(from_column("Q", data) for data in self.segments), strict=True))


class PackEntry(msgspec.Struct, array_like=True):
    """A pack that a state counts on; `stored` is the bytes of all blobs in it but indexes."""

    id: str
    salt: bytes
    key_id: str | None
    stored: int


class Run(NamedTuple):
    """Consecutive pages of a file that are consecutive pages of a blob."""

    page: int
    pages: int
    blob: int
    first: int


class Blobs:
    """Where blobs are, in columns: position in the state's list of packs, number in the pack..."""

    def __init__(self) -> None:
        self.pack = array("I")
        self.number = array("I")
        self.offset = array("Q")
        self.length = array("I")
        self.codec = bytearray()
        self.pages = array("H")
        self.names = bytearray()

    def __len__(self) -> int:
        return len(self.pack)

    def name(self, blob: int) -> bytes:
        """Keyed BLAKE3 of a blob."""
        return bytes(self.names[blob * NAME_SIZE : (blob + 1) * NAME_SIZE])

    def append(
        self, pack: int, number: int, offset: int, length: int, codec: int, pages: int, name: bytes
    ) -> int:
        """Add a blob; returns its position."""
        self.pack.append(pack)
        self.number.append(number)
        self.offset.append(offset)
        self.length.append(length)
        self.codec.append(codec)
        self.pages.append(pages)
        self.names += name
        return len(self.pack) - 1

    def put(
        self,
        blob: int,
        pack: int,
        number: int,
        offset: int,
        length: int,
        *,
        codec: int,
        pages: int,
        name: bytes,
    ) -> None:
        """Say of a blob what was not known when it was added."""
        self.pack[blob], self.number[blob] = pack, number
        self.offset[blob], self.length[blob] = offset, length
        self.codec[blob], self.pages[blob] = codec, pages
        self.names[blob * NAME_SIZE : (blob + 1) * NAME_SIZE] = name

    def copy(self, other: Blobs, blob: int, pack: int) -> int:
        """Add a blob of another list, whose pack has position `pack` in this one."""
        return self.append(
            pack,
            other.number[blob],
            other.offset[blob],
            other.length[blob],
            other.codec[blob],
            other.pages[blob],
            other.name(blob),
        )


class Runs:
    """Runs of all files, one file after the other, in columns."""

    def __init__(self) -> None:
        self.page = array("Q")
        self.count = array("H")
        self.blob = array("I")
        self.first = array("B")

    def __len__(self) -> int:
        return len(self.page)

    def append(self, page: int, count: int, blob: int, first: int) -> None:
        """Add a run."""
        self.page.append(page)
        self.count.append(count)
        self.blob.append(blob)
        self.first.append(first)

    def extend(self, other: Runs) -> None:
        """Add all runs of another list."""
        self.page.extend(other.page)
        self.count.extend(other.count)
        self.blob.extend(other.blob)
        self.first.extend(other.first)

    def join(self, begin: int, page: int, count: int, blob: int, first: int) -> None:
        """Add a run, as part of the one before (but none before `begin`) if it goes on there."""
        last = len(self.page) - 1
        if (
            last >= begin
            and self.blob[last] == blob
            and self.first[last] + self.count[last] == first
            and self.page[last] + self.count[last] == page
        ):
            self.count[last] += count
        else:
            self.append(page, count, blob, first)


class Index:
    """Everything in an image directory."""

    def __init__(self) -> None:
        self.dirs: list[DirEntry] = []
        self.files: list[FileEntry] = []
        self.packs: list[PackEntry] = []
        self.blobs = Blobs()
        self.runs = Runs()

    def runs_of(self, file: FileEntry) -> Iterator[Run]:
        """The runs of a file, in its order."""
        runs, begin, end = self.runs, file.first_run, file.first_run + file.runs
        columns = (runs.page, runs.count, runs.blob, runs.first)
        return map(Run, *(column[begin:end] for column in columns))

    def used(self) -> list[int]:
        """Bytes that the state uses of each pack: of a blob the share of its pages, rounded up."""
        pages = [0] * len(self.blobs)
        for blob, count in zip(self.runs.blob, self.runs.count, strict=True):
            pages[blob] += count
        found = [0] * len(self.packs)
        blobs = self.blobs
        for blob, count in enumerate(pages):
            there = blobs.pages[blob]
            found[blobs.pack[blob]] += -(-blobs.length[blob] * min(count, there) // there)
        return found


def encode_index(index: Index) -> bytes:
    """Serialise an index."""
    blobs, runs = index.blobs, index.runs
    gaps: list[int] = []
    for file in index.files:
        begin, end = file.first_run, file.first_run + file.runs
        ends = map(add, runs.page[begin:end], runs.count[begin:end])
        gaps += map(sub, runs.page[begin:end], [0, *ends])
    return msgspec.msgpack.encode(
        [
            FORMAT,
            PAGE,
            index.dirs,
            index.files,
            index.packs,
            [
                to_column("I", blobs.pack),
                to_column("I", blobs.number),
                to_column("Q", blobs.offset),
                to_column("I", blobs.length),
                bytes(blobs.codec),
                to_column("H", blobs.pages),
                bytes(blobs.names),
            ],
            [
                to_column("Q", gaps),
                to_column("H", runs.count),
                to_column("I", runs.blob),
                to_column("B", runs.first),
            ],
        ]
    )


class _Wire(msgspec.Struct, array_like=True):
    format: int
    page: int
    dirs: list[DirEntry]
    files: list[FileEntry]
    packs: list[PackEntry]
    blobs: tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]
    runs: tuple[bytes, bytes, bytes, bytes]


def decode_index(data: bytes | memoryview) -> Index:
    """Parse an index and check that it makes sense.

    Raises
    ------
    Damaged
        Nonsense, or names that would lead out of the folder or the store.
    TooNew
        Of a later format.
    """
    try:
        version: list[Any] = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
        number = msgspec.msgpack.decode(version[0], type=int)
        if number > FORMAT:
            raise TooNew(f"format {number}")
        wire = msgspec.msgpack.decode(data, type=_Wire)
        if wire.page != PAGE:
            raise Damaged("its list of blocks is of an unknown kind")
        index = Index()
        index.dirs, index.files, index.packs = wire.dirs, wire.files, wire.packs
        _take_blobs(index, wire.blobs)
        _take_runs(index, wire.runs)
    except (msgspec.DecodeError, ValueError, IndexError, OverflowError) as error:
        raise Damaged("its list of blocks is unreadable") from error
    for folder in index.dirs:
        _check_path(folder.path)
    for file in index.files:
        _check_path(file.path)
    # A pack's id is part of a path.
    if not all(is_pack_id(pack.id) and pack.stored >= 0 for pack in index.packs):
        raise Damaged("its list of packs holds an impossible name")
    return index


def _take_blobs(index: Index, columns: Sequence[bytes]) -> None:
    blobs = index.blobs
    blobs.pack, blobs.number = from_column("I", columns[0]), from_column("I", columns[1])
    blobs.offset, blobs.length = from_column("Q", columns[2]), from_column("I", columns[3])
    blobs.codec, blobs.pages = bytearray(columns[4]), from_column("H", columns[5])
    blobs.names = bytearray(columns[6])
    count = len(blobs.pack)
    lengths = {len(blobs.number), len(blobs.offset), len(blobs.length), len(blobs.codec)}
    if lengths | {len(blobs.pages)} != {count} or len(blobs.names) != NAME_SIZE * count:
        raise ValueError("columns of different lengths")
    if count and (
        max(blobs.pack) >= len(index.packs)
        or max(blobs.pages) > BLOB_PAGES
        or min(blobs.pages) == 0
        or max(blobs.length) > BLOB + PAGE  # each is read into memory as a whole
        or max(blobs.offset) > _FARTHEST
    ):
        raise ValueError("blobs of no pack, or of an impossible size")


def _take_runs(index: Index, columns: Sequence[bytes]) -> None:
    runs = index.runs
    gaps, runs.count = from_column("Q", columns[0]), from_column("H", columns[1])
    runs.blob, runs.first = from_column("I", columns[2]), from_column("B", columns[3])
    count = len(gaps)
    if {len(runs.count), len(runs.blob), len(runs.first)} != {count}:
        raise ValueError("columns of different lengths")
    if count and max(runs.blob) >= len(index.blobs):
        raise ValueError("runs of no blob")
    beyond = map(
        gt, map(add, runs.first, runs.count), map(index.blobs.pages.__getitem__, runs.blob)
    )
    if any(beyond):
        raise ValueError("runs beyond their blobs")
    at = 0
    for file in index.files:
        if file.size < 0 or file.first_run != at or file.runs < 0 or at + file.runs > count:
            raise ValueError("files that do not fit the runs")
        counts = runs.count[at : at + file.runs]
        ends = array("Q", accumulate(map(add, gaps[at : at + file.runs], counts)))
        if ends and ends[-1] > -(-file.size // PAGE):
            raise ValueError("runs beyond their file")
        runs.page.extend(map(sub, ends, counts))
        if file.segments is not None:
            file.segment_list()
        at += file.runs
    if at != count:
        raise ValueError("runs of no file")


def load_index(source: PackSource, sealing: Sealing, name_key: bytes, body: Body) -> Index:
    """Read a state's index.

    Raises
    ------
    Damaged
        Missing or altered.
    TooNew
        Of a later format.
    CkptError
        ``key_missing``, ``wrong_key``.
    OSError
        Not readable.
    """
    try:
        try:
            plain = _read_index(source, sealing, name_key, body)
        except Damaged:
            if not source.discard(body.index.pack):
                raise
            plain = _read_index(source, sealing, name_key, body)
    except Damaged as error:
        raise Damaged(f"its list of blocks cannot be read ({error})") from error
    return decode_index(plain)


def _read_index(source: PackSource, sealing: Sealing, name_key: bytes, body: Body) -> memoryview:
    place = body.index
    # Not read into memory, nor asked for, before it is known to be possible.
    largest = _NAMES + _OF_A_PAGE * (max(0, body.size) // PAGE)
    if (
        not 0 <= place.size <= largest
        or not 0 <= place.length <= place.size + PAGE
        or not 0 <= place.offset <= _FARTHEST
        or not 0 <= place.number < 1 << 32
    ):
        raise Damaged("a block has the wrong size")
    stored = memoryview(bytearray(place.length))
    source.read_into(place.pack, place.offset, stored)
    sealer = sealing.sealer(place.pack, bytes.fromhex(place.salt), body.key_id)
    plain = memoryview(bytearray(place.size))
    decode(place.codec, sealer.open(place.number, stored), plain, Scratch(level=1))
    if blake3(plain, key=name_key).hexdigest() != place.name:
        raise Damaged("a block does not match its checksum")
    return plain


def _check_path(path: bytes) -> None:
    text = path.decode("utf-8", "surrogateescape")
    pure = PurePosixPath(text)
    if not text or "\0" in text or pure.is_absolute() or ".." in pure.parts or str(pure) != text:
        raise Damaged("its list of files holds an impossible name")
