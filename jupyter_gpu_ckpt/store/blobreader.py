"""Reads a state's blobs out of its packs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from blake3 import blake3

from .codec import RAW, Scratch, decode
from .damage import Damaged
from .index import Index
from .owner import OwnerStore
from .packs import PackSource
from .seal import Sealer


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
