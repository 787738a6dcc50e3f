"""Makes blobs of new pages and adds them to packs; numbers them for the index to be."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable

from blake3 import blake3

from .codec import BLOB, BLOB_PAGES, PAGE, Scratch, encode
from .incremental import Parent
from .index import Blobs, Index, NewRun
from .owner import OwnerStore
from .packs import HASH_SIZE
from .packwriter import PackWriter
from .storing import Storing

# So many new pages of a window are a blob of their own; fewer are gathered.
_OWN_BLOB = BLOB_PAGES // 2

Range = tuple[int, int]


class _Gathered:
    """Pages of several windows that become a blob together."""

    def __init__(self, blob: int, buffer: bytearray) -> None:
        self.blob = blob
        self.buffer = buffer
        self.hashes = bytearray()

    @property
    def pages(self) -> int:
        return len(self.hashes) // HASH_SIZE


class BlobWriter:
    """The blobs of one new state; used by many threads.

    Blobs have numbers: first those of the parent, then the new ones in the order in which
    they began.
    """

    def __init__(self, owner: OwnerStore, packs: PackWriter, parent: Parent | None) -> None:
        self._name_key = owner.name_key
        self._packs = packs
        self._parent = parent
        self._inherited = 0 if parent is None else len(parent.index.blobs)
        self._lock = threading.Lock()
        self._blobs = Blobs()
        self._by_name: dict[bytes, int] = {}
        self._alias: dict[int, int] = {}
        self._gathering: _Gathered | None = None
        self._buffers: list[bytearray] = []

    def is_new(self, blob: int) -> bool:
        """Whether a blob is not the parent's."""
        return self._alias.get(blob, blob) >= self._inherited

    def store(
        self, new: list[Range], plain: memoryview, hashes: bytes, scratch: Scratch
    ) -> list[NewRun]:
        """Store pages.

        Parameters
        ----------
        new
            Which pages: (begin, end) in `plain`.
        plain
            A window of a file; altered.
        hashes
            The hashes of its pages, one after the other.
        scratch
            The thread's buffers, of which `plain` may be one.
        """
        if sum(end - begin for begin, end in new) >= _OWN_BLOB:
            return self._own(new, plain, hashes, scratch)
        return self._gather(new, plain, hashes, scratch)

    def finish(self, scratch: Scratch) -> None:
        """Store what was gathered last."""
        if self._gathering is not None:
            self._put_gathered(self._gathering, scratch)
            self._gathering = None

    def _own(
        self, new: list[Range], plain: memoryview, hashes: bytes, scratch: Scratch
    ) -> list[NewRun]:
        with self._lock:
            blob = self._new_blob()
        runs: list[NewRun] = []
        if len(new) == 1:
            plain = plain[new[0][0] * PAGE :]
        first = 0
        for begin, end in new:
            if begin != first and len(new) > 1:
                plain[first * PAGE : (first + end - begin) * PAGE] = plain[
                    begin * PAGE : end * PAGE
                ]
            runs.append((begin, end - begin, blob, first))
            first += end - begin
        parts = [hashes[begin * HASH_SIZE : end * HASH_SIZE] for begin, end in new]
        self._put(blob, plain[: first * PAGE], b"".join(parts), scratch)
        return runs

    def _gather(
        self, new: list[Range], plain: memoryview, hashes: bytes, scratch: Scratch
    ) -> list[NewRun]:
        runs: list[NewRun] = []
        full: list[_Gathered] = []
        with self._lock:
            for begin, end in new:
                while begin < end:
                    into = self._gathering
                    if into is None:
                        buffer = self._buffers.pop() if self._buffers else bytearray(BLOB)
                        into = self._gathering = _Gathered(self._new_blob(), buffer)
                    at = into.pages
                    count = min(end - begin, BLOB_PAGES - at)
                    stop = begin + count
                    into.buffer[at * PAGE : (at + count) * PAGE] = plain[begin * PAGE : stop * PAGE]
                    into.hashes += hashes[begin * HASH_SIZE : stop * HASH_SIZE]
                    runs.append((begin, count, into.blob, at))
                    begin = stop
                    if into.pages == BLOB_PAGES:
                        full.append(into)
                        self._gathering = None
        for gathered in full:
            self._put_gathered(gathered, scratch)
        return runs

    def _put_gathered(self, gathered: _Gathered, scratch: Scratch) -> None:
        plain = memoryview(gathered.buffer)[: gathered.pages * PAGE]
        self._put(gathered.blob, plain, bytes(gathered.hashes), scratch)
        with self._lock:
            self._buffers.append(gathered.buffer)

    def _new_blob(self) -> int:
        """Begin a blob, whose place is not known yet; the lock is held."""
        return self._inherited + self._blobs.append(0, 0, 0, 0, 0, 1, bytes(32))

    def _put(self, blob: int, plain: memoryview, hashes: bytes, scratch: Scratch) -> None:
        """Store a blob, unless there is an equal one."""
        name = blake3(plain, key=self._name_key).digest()
        equal = None if self._parent is None else self._parent.blob_named(name)
        with self._lock:
            equal = self._by_name.setdefault(name, blob) if equal is None else equal
            if equal != blob:
                self._alias[blob] = equal
                return
        codec, payload = encode(plain, scratch)
        placed = self._packs.add(name, hashes, codec, payload)
        with self._lock:
            own = blob - self._inherited
            self._blobs.put(own, *placed, codec=codec, pages=len(plain) // PAGE, name=name)

    def complete(self, index: Index, files: Iterable[Storing]) -> None:
        """Put files into an index, with those blobs and packs only that they use."""
        own, alias = self._blobs, self._alias
        for file in files:
            index.files.append(file.entry(len(index.runs)))
            index.runs.extend(file.runs)
        used = sorted({alias.get(blob, blob) for blob in set(index.runs.blob)})
        inherited: dict[int, int] = {}
        written: dict[int, int] = {}
        position: dict[int, int] = {}
        for blob in used:
            if self._parent is not None and blob < self._inherited:
                old = self._parent.index
                pack = old.blobs.pack[blob]
                if pack not in inherited:
                    inherited[pack] = len(index.packs)
                    index.packs.append(old.packs[pack])
                position[blob] = index.blobs.copy(old.blobs, blob, inherited[pack])
            else:
                pack = own.pack[blob - self._inherited]
                if pack not in written:
                    written[pack] = len(index.packs)
                    index.packs.append(self._packs.entries[pack])
                position[blob] = index.blobs.copy(own, blob - self._inherited, written[pack])
        for blob, equal in alias.items():
            if equal in position:
                position[blob] = position[equal]
        index.runs.blob = array("I", map(position.__getitem__, index.runs.blob))
