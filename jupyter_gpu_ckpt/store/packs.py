"""Packs: immutable files of blobs, each written by one save, with a footer of their pages."""

from __future__ import annotations

import os
import re
import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import msgspec
import zstandard
from blake3 import blake3

from .columns import from_column
from .damage import Damaged, TooNew
from .records import FORMAT
from .seal import Sealing

#: The number under which a pack's footer is sealed; its blobs have 0, 1, ...
FOOTER = 2**32 - 1
#: A pack is finished when it has so many bytes, or so many blobs.
PACK_SIZE = 32 << 20
PACK_BLOBS = 512
#: Bytes of a page's hash, and of a blob's name.
HASH_SIZE, NAME_SIZE = 16, 32

_PACK_ID = re.compile(r"([0-9]{8}T[0-9]{6}Z-[0-9a-f]{8})-[0-9]{4,8}\Z")
# Magic, format, length of the sealed footer, of the plain one, salt, key id.
_TRAILER = struct.Struct("<8sIIQ16s32s")
_CHECK_SIZE = 32
TRAILER_SIZE = _TRAILER.size + _CHECK_SIZE
_MAGIC = b"JGC pack"
_LARGEST_FOOTER = 64 << 20
# Bytes of the longest header of a zstd frame.
_LONGEST_HEADER = 18
_OPEN_FILES = 64


def pack_id(state_id: str, number: int) -> str:
    """Name of a pack: the state whose save writes it, and a number."""
    return f"{state_id}-{number:04d}"


def is_pack_id(name: str) -> bool:
    """Whether `name` has the form of a pack's id."""
    return _PACK_ID.match(name) is not None


def state_of_pack(pack: str) -> str:
    """Which state's save wrote a pack.

    Raises
    ------
    ValueError
        Not a pack's id.
    """
    match = _PACK_ID.match(pack)
    if match is None:
        raise ValueError("not the id of a pack")
    return match[1]


def pack_key(pack: str) -> str:
    """Where a pack is below the folder of packs, with slashes."""
    return f"{blake3(pack.encode()).hexdigest(length=1)}/{pack}.pack"


class PackSource(Protocol):
    """Reads packs, wherever they are; used by many threads."""

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from a pack.

        Raises
        ------
        Damaged
            The pack is missing or too short.
        CkptError
            It cannot be reached.
        OSError
            It cannot be read.
        """

    def want(self, packs: Sequence[str]) -> None:
        """Say which packs will be read, in order of need; only a hint."""

    def size(self, pack: str) -> int | None:
        """Bytes of a pack; ``None`` if there is none."""

    def discard(self, pack: str) -> bool:
        """Say that a pack is not what was written; whether another copy of it can be read now."""

    def close(self) -> None:
        """Let go of what is open; nothing is read afterwards."""


class LocalPacks:
    """The packs in a folder; keeps some of them open. Call :meth:`close` at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()

    def path(self, pack: str) -> Path:
        """Path of a pack."""
        return self.folder / pack_key(pack)

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        """See :class:`PackSource`."""
        file = self._file(pack)
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(file.fd, [buffer[done:]], offset + done)
                if got == 0:
                    raise Damaged(f"pack {pack} is cut off")
                done += got
        finally:
            self._let_go(file)

    def want(self, packs: Sequence[str]) -> None:
        """See :class:`PackSource`."""

    def size(self, pack: str) -> int | None:
        """See :class:`PackSource`."""
        try:
            return self.path(pack).stat().st_size
        except FileNotFoundError:
            return None

    def discard(self, pack: str) -> bool:
        """See :class:`PackSource`."""
        self.forget(pack)
        return False

    def forget(self, pack: str) -> None:
        """Let go of a pack's file, which may be another by now."""
        with self._lock:
            file = self._open.pop(pack, None)
            if file is not None:
                file.drop()

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            files, self._open = self._open, OrderedDict()
            for file in files.values():
                file.drop()

    def _file(self, pack: str) -> _OpenFile:
        with self._lock:
            file = self._open.get(pack)
            if file is None:
                try:
                    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                    file = _OpenFile(os.open(self.path(pack), flags))
                except FileNotFoundError as error:
                    raise Damaged(f"pack {pack} is missing") from error
                self._open[pack] = file
                if len(self._open) > _OPEN_FILES:
                    self._open.popitem(last=False)[1].drop()
            else:
                self._open.move_to_end(pack)
            file.users += 1
            return file

    def _let_go(self, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            file.close_if_unused()


class _OpenFile:
    """A descriptor that is closed when nobody uses it and it was dropped."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        self._dropped = False

    def drop(self) -> None:
        self._dropped = True
        self.close_if_unused()

    def close_if_unused(self) -> None:
        if self._dropped and self.users == 0 and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Footer:
    """What a pack holds, in columns: a blob's stored length, codec, pages, name and page hashes.

    Attributes
    ----------
    salt, key_id
        What the pack is sealed with.
    first_hash
        For each blob the number of its first page in `hashes`; the last entry is their count.
    """

    def __init__(self, salt: bytes, key_id: str | None, columns: Sequence[bytes]) -> None:
        self.salt = salt
        self.key_id = key_id
        self.lengths = from_column("I", columns[0])
        self.codecs = columns[1]
        self.pages = from_column("H", columns[2])
        self.names = columns[3]
        self.hashes = columns[4]
        count = len(self.lengths)
        self.first_hash = array("I", accumulate(self.pages, initial=0))
        if (
            {len(self.codecs), len(self.pages)} != {count}
            or len(self.names) != NAME_SIZE * count
            or len(self.hashes) != HASH_SIZE * self.first_hash[-1]
        ):
            raise ValueError("columns of different lengths")

    def hashes_of(self, blob: int, first: int, count: int) -> bytes:
        """Hashes of `count` pages of a blob from page `first` on, one after the other."""
        at = self.first_hash[blob] + first
        return self.hashes[at * HASH_SIZE : (at + count) * HASH_SIZE]


def encode_footer(
    pack: str,
    columns: Sequence[bytes],
    *,
    salt: bytes,
    footer_key: bytes,
    sealing: Sealing,
) -> bytes:
    """Make the end of a pack: its footer, and a trailer of :data:`TRAILER_SIZE` bytes."""
    plain = msgspec.msgpack.encode(list(columns))
    packed = zstandard.ZstdCompressor(level=1).compress(plain)
    sealer = sealing.sealer(pack, salt, sealing.key_id)
    sealed = sealer.seal(FOOTER, memoryview(packed))
    key = (sealing.key_id or "").encode("ascii")
    trailer = _TRAILER.pack(_MAGIC, FORMAT, len(sealed), len(plain), salt, key)
    return b"".join([sealed, trailer, _check(pack, sealed, trailer, footer_key)])


def _check(pack: str, sealed: bytes | memoryview, trailer: bytes, key: bytes) -> bytes:
    """Checksum of a footer and its trailer, which says too whose they are."""
    hasher = blake3(pack.encode(), key=key)
    hasher.update(sealed)
    hasher.update(trailer)
    return hasher.digest()


def read_footer(source: PackSource, pack: str, footer_key: bytes, sealing: Sealing) -> Footer:
    """Read and check a pack's footer.

    Raises
    ------
    Damaged
        The pack is missing or cut off, or its footer altered.
    TooNew
        Written by a newer version.
    CkptError
        ``key_missing``, ``wrong_key``.
    OSError
        Not readable.
    """
    size = source.size(pack)
    if size is None:
        raise Damaged(f"pack {pack} is missing")
    if size < TRAILER_SIZE:
        raise Damaged(f"pack {pack} is cut off")
    end = memoryview(bytearray(TRAILER_SIZE))
    source.read_into(pack, size - TRAILER_SIZE, end)
    trailer, check = bytes(end[: _TRAILER.size]), bytes(end[_TRAILER.size :])
    magic, version, length, plain_size, salt, key = _TRAILER.unpack(trailer)
    if (
        magic != _MAGIC
        or length > size - TRAILER_SIZE
        or length > _LARGEST_FOOTER
        or plain_size > _LARGEST_FOOTER
    ):
        raise Damaged(f"pack {pack} is cut off or its footer altered")
    if version > FORMAT:
        raise TooNew(f"format {version}")
    sealed = memoryview(bytearray(length))
    source.read_into(pack, size - TRAILER_SIZE - length, sealed)
    if _check(pack, sealed, trailer, footer_key) != check:
        raise Damaged(f"the footer of pack {pack} does not match its checksum")
    key_id = key.rstrip(b"\0").decode("ascii", "replace") or None
    packed = sealing.sealer(pack, salt, key_id).open(FOOTER, sealed)
    try:
        # What the frame itself says of its size would be believed, whatever it is.
        if zstandard.frame_content_size(bytes(packed[:_LONGEST_HEADER])) != plain_size:
            raise Damaged(f"the footer of pack {pack} has the wrong size")
        plain = zstandard.ZstdDecompressor().decompress(packed)
        return Footer(salt, key_id, msgspec.msgpack.decode(plain, type=list[bytes]))
    except (zstandard.ZstdError, msgspec.DecodeError, ValueError, IndexError) as error:
        raise Damaged(f"the footer of pack {pack} is unreadable") from error
