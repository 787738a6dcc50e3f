"""A state's two descriptions: the manifest (small, JSON) and the index (which blocks).

The manifest is read for every list of states; the index only to read a state
back or to collect garbage, so it is an object of its own among the chunks.
"""

from __future__ import annotations

import hmac
from pathlib import PurePosixPath

import msgspec
from blake3 import blake3

from ..errors import CkptError
from .records import FORMAT, StateMeta, StateRecord

#: Bytes of a chunk's name.
NAME_SIZE = 32
#: Stands for a block of zeros in an index.
ZERO_NAME = bytes(NAME_SIZE)


class DirEntry(msgspec.Struct, kw_only=True, array_like=True):
    """A folder of an image directory; `path` is relative, as the file system spells it."""

    path: bytes
    mode: int


class FileEntry(msgspec.Struct, kw_only=True, array_like=True):
    """A file of an image directory.

    `blocks` holds the chunk names one after the other; `extents` the (offset, length)
    of what is data in a sparse file, in bytes, or ``None`` if all of it is.
    """

    path: bytes
    mode: int
    mtime_ns: int
    size: int
    blocks: bytes
    extents: list[tuple[int, int]] | None = None


class Index(msgspec.Struct, kw_only=True, array_like=True):
    """Everything in an image directory."""

    format: int
    block_size: int
    dirs: list[DirEntry]
    files: list[FileEntry]


class Body(msgspec.Struct, kw_only=True):
    """What a manifest says; `index` is the chunk name of the index, in hex."""

    format: int
    id: str
    created: str
    size: int
    stored_size: int
    index: str
    index_size: int
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
        )


class _Envelope(msgspec.Struct):
    blake3: str
    body: msgspec.Raw


class _Version(msgspec.Struct):
    format: int


class Damaged(Exception):
    """A manifest, index or chunk is not what was written; the message says how."""


class TooNew(Exception):
    """A manifest was written by a newer version; the message says which format."""


def encode_manifest(body: Body, key: bytes) -> bytes:
    """Serialise a manifest with its checksum."""
    raw = msgspec.json.encode(body)
    digest = blake3(raw, key=key).hexdigest()
    return msgspec.json.encode(_Envelope(blake3=digest, body=msgspec.Raw(raw))) + b"\n"


def decode_manifest(data: bytes, key: bytes) -> Body:
    """Check and parse a manifest.

    Raises
    ------
    Damaged
        Altered or truncated.
    TooNew
        Intact, of a later format.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged("its manifest is cut off or unreadable") from error
    raw = bytes(envelope.body)
    if not hmac.compare_digest(blake3(raw, key=key).hexdigest().encode(), envelope.blake3.encode()):
        raise Damaged("its manifest does not match its checksum")
    try:
        version = msgspec.json.decode(raw, type=_Version).format
        if version > FORMAT:
            raise TooNew(f"format {version}")
        body = msgspec.json.decode(raw, type=Body)
        if len(bytes.fromhex(body.index)) != NAME_SIZE:
            raise Damaged("its manifest names no index")
    except (msgspec.DecodeError, ValueError) as error:
        raise Damaged("its manifest is incomplete") from error
    return body


def encode_index(index: Index) -> bytes:
    """Serialise an index."""
    return msgspec.msgpack.encode(index)


def decode_index(data: bytes | memoryview) -> Index:
    """Parse an index and check that it makes sense.

    Raises
    ------
    Damaged
        Nonsense, or paths that would lead out of the folder.
    """
    try:
        index = msgspec.msgpack.decode(data, type=Index)
    except msgspec.DecodeError as error:
        raise Damaged("its list of blocks is unreadable") from error
    if index.format > FORMAT or index.block_size < 4096:
        raise Damaged("its list of blocks is of an unknown kind")
    for folder in index.dirs:
        _check_path(folder.path)
    for file in index.files:
        _check_path(file.path)
        if file.size < 0 or len(file.blocks) != NAME_SIZE * -(-file.size // index.block_size):
            raise Damaged("its list of blocks has the wrong length")
    return index


def _check_path(path: bytes) -> None:
    text = path.decode("utf-8", "surrogateescape")
    pure = PurePosixPath(text)
    if not text or "\0" in text or pure.is_absolute() or ".." in pure.parts or str(pure) != text:
        raise Damaged("its list of files holds an impossible name")


def damaged(state_id: str, why: str) -> CkptError:
    """Build the error for a state that cannot be read back whole."""
    return CkptError(
        "state_damaged",
        f"The saved state {state_id} is damaged: {why}.",
        hint="Restore an older state of this kernel; this one cannot be used.",
    )


def too_new(state_id: str, why: str) -> CkptError:
    """Build the error for a state of a later format."""
    return CkptError(
        "not_restorable",
        f"The saved state {state_id} was written by a newer version ({why}).",
        hint="Upgrade jupyter-gpu-ckpt to restore it.",
    )
