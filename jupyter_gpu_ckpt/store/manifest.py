"""A state's manifest: small, all that a list of states and a collection of garbage need."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..moments import read_moment
from .damage import Damaged, TooNew
from .packs import is_pack_id
from .records import NEWEST_STATE, StateMeta, StateRecord
from .seal import Sealing

#: Bytes of a blob's name.
NAME_SIZE = 32

# What says more is forged, and larger than what adds such numbers up can hold.
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class IndexPlace(msgspec.Struct, kw_only=True):
    """Where a state's index is: a blob of a pack, of `size` plain bytes.

    `salt` (of the pack) and `name` (of the plain index) are hex.
    """

    pack: str
    number: int
    offset: int
    length: int
    codec: int
    size: int
    salt: str
    name: str


class Body(msgspec.Struct, kw_only=True):
    """What a manifest says.

    `packs` has the bytes that the state uses of each pack it counts on, `parent` the state
    that it shares them with, and `key_id` the key that its own packs are sealed with.
    """

    format: int
    id: str
    created: str
    size: _Bytes
    stored_size: _Bytes
    parent: str | None
    key_id: str | None
    index: IndexPlace
    packs: dict[str, _Bytes]
    meta: StateMeta

    def record(self) -> StateRecord:
        """The public part."""
        return StateRecord(
            id=self.id,
            created=self.created,
            size=self.size,
            stored_size=self.stored_size,
            meta=self.meta,
            format=self.format,
            parent=self.parent,
            key_id=self.key_id,
        )


class _Version(msgspec.Struct):
    format: int


def encode_manifest(body: Body, sealing: Sealing) -> bytes:
    """Make a manifest's file."""
    return sealing.seal_manifest(msgspec.json.encode(body), _context(body.meta.kernel_id, body.id))


def decode_manifest(data: bytes, sealing: Sealing, kernel_id: str, state_id: str) -> Body:
    """Check and parse a manifest's file.

    Parameters
    ----------
    data
        The file's content.
    sealing
        The owner's keys.
    kernel_id, state_id
        Whose manifest the file's place says that it is.

    Raises
    ------
    Damaged
        Altered, cut off, or of another state.
    TooNew
        Intact, of a later format.
    CkptError
        ``key_missing``, ``wrong_key``.
    """
    raw = sealing.open_manifest(data, _context(kernel_id, state_id))
    try:
        version = msgspec.json.decode(raw, type=_Version).format
        if version > NEWEST_STATE:
            raise TooNew(f"format {version}")
        body = msgspec.json.decode(raw, type=Body)
        named = bytes.fromhex(body.index.name)
        bytes.fromhex(body.index.salt)
        read_moment(body.created)
    except (msgspec.DecodeError, ValueError) as error:
        raise Damaged("its manifest is incomplete") from error
    if len(named) != NAME_SIZE or body.index.pack not in body.packs:
        raise Damaged("its manifest names no index")
    if not all(map(is_pack_id, body.packs)):
        raise Damaged("its manifest names impossible packs")  # they are parts of paths
    if body.id != state_id or body.meta.kernel_id != kernel_id:
        raise Damaged("its manifest belongs to another state")
    return body


def _context(kernel_id: str, state_id: str) -> bytes:
    return f"{kernel_id}/{state_id}".encode()
