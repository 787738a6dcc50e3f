"""Reads a state's blobs out of its packs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from blake3 import blake3

from .codec import BLOB, BLOB_PAGES, PAGE, RAW, Scratch, decode
from .damage import Damaged, TooNew
from .index import Index
from .owner import OwnerStore
from .packs import NAME_SIZE, PackSource, read_footer
from .seal import Sealer


def check_pack(owner: OwnerStore, source: PackSource, pack: str) -> None:
    """Read all of a pack and look whether it is what was written, by what its footer says.

    Raises
    ------
    Damaged
        Missing, cut off or altered.
    CkptError
        ``key_missing``, ``wrong_key``.
    OSError
        Not readable.
    """
    try:
        footer = read_footer(source, pack, owner.footer_key, owner.sealing)
    except TooNew as error:
        raise Damaged(f"pack {pack} cannot be checked: {error}") from error
    sealer = owner.sealing.sealer(pack, footer.salt, footer.key_id)
    scratch = Scratch(level=1)
    at = 0
    for blob, (length, codec, pages) in enumerate(
        zip(footer.lengths, footer.codecs, footer.pages, strict=True)
    ):
        if length > BLOB + PAGE or pages > BLOB_PAGES:
            raise Damaged(f"a block of pack {pack} has an impossible size")
        stored = scratch.room(length)
        source.read_into(pack, at, stored)
        plain = memoryview(scratch.plain)[: pages * PAGE]
        decode(codec, sealer.open(blob, stored), plain, scratch)
        name = footer.names[blob * NAME_SIZE : (blob + 1) * NAME_SIZE]
        if blake3(plain, key=owner.name_key).digest() != name:
            raise Damaged(f"a block of pack {pack} does not match its checksum")
        at += length


class BlobReader:
    """The blobs of one state; used by many threads.

    Parameters
    ----------
    owner, index, source
        The state's store, the state, and where its packs are.
    on_damage
        Called with the id of a pack in which something is not as it was written.
    """

    def __init__(
        self,
        owner: OwnerStore,
        index: Index,
        source: PackSource,
        on_damage: Callable[[str], None] | None,
    ) -> None:
        self._owner = owner
        self._index = index
        self._source = source
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._sealers: dict[int, Sealer] = {}

    def load(self, blob: int, into: memoryview, scratch: Scratch) -> None:
        """Read, decrypt, decode and check a blob.

        Raises
        ------
        Damaged
            Missing, altered or cut off; says which bytes of which pack.
        CkptError
            ``key_missing``, ``wrong_key``, or out of reach.
        OSError
            Not readable.
        """
        blobs = self._index.blobs
        pack, at = blobs.pack[blob], blobs.offset[blob]
        name = self._index.packs[pack].id
        try:
            try:
                self._load(blob, into, scratch)
            except Damaged:
                if not self._source.discard(name):
                    raise
                self._load(blob, into, scratch)
        except Damaged as error:
            self.suspect(pack)
            where = f"pack {name}, bytes {at} to {at + blobs.length[blob]}"
            raise Damaged(f"{error} ({where})") from error

    def _load(self, blob: int, into: memoryview, scratch: Scratch) -> None:
        blobs = self._index.blobs
        pack, codec, length = blobs.pack[blob], blobs.codec[blob], blobs.length[blob]
        sealer = self._sealer(pack)
        name = self._index.packs[pack].id
        if codec == RAW and not sealer.overhead:
            if length != len(into):
                raise Damaged("a block has the wrong size")
            self._source.read_into(name, blobs.offset[blob], into)
        else:
            stored = scratch.room(length)
            self._source.read_into(name, blobs.offset[blob], stored)
            room = into if codec == RAW else memoryview(scratch.opened(length))
            payload = sealer.open(blobs.number[blob], stored, room)
            if codec != RAW or payload.obj is not into.obj:
                decode(codec, payload, into, scratch)
        if blake3(into, key=self._owner.name_key).digest() != blobs.name(blob):
            raise Damaged("a block does not match its checksum")

    def _sealer(self, pack: int) -> Sealer:
        with self._lock:
            sealer = self._sealers.get(pack)
            if sealer is None:
                entry = self._index.packs[pack]
                sealer = self._owner.sealing.sealer(entry.id, entry.salt, entry.key_id)
                self._sealers[pack] = sealer
            return sealer

    def suspect(self, pack: int) -> None:
        """Say that a pack (by its position) is damaged."""
        if self._on_damage is not None:
            self._on_damage(self._index.packs[pack].id)

    def want(self, blobs: Iterable[int]) -> None:
        """Say which blobs will be read, in order."""
        packs = dict.fromkeys(self._index.blobs.pack[blob] for blob in blobs)
        self._source.want([self._index.packs[pack].id for pack in packs])
