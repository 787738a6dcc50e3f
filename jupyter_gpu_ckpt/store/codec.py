"""How a block is kept in a chunk file: payload, then a 16-byte trailer.

The payload comes first so that a raw block stays page-aligned in its file. It is one
zstd frame, or the block itself where compression gains little.
"""

from __future__ import annotations

import os
import struct

import zstandard

from .manifest import Damaged

#: Bytes of plain data in a block; the last block of a file may be shorter.
BLOCK = 1 << 20
_TRAILER = struct.Struct("<4sB3xI4x")
#: Bytes that a chunk file has beyond its payload.
TRAILER_SIZE = _TRAILER.size
_MAGIC = b"JGC1"
_RAW, _ZSTD = 0, 1
_SAMPLE = 4096
_SAMPLES = 8


class Scratch:
    """Buffers and compression contexts of one worker thread, reused for every block."""

    def __init__(self, level: int) -> None:
        self.plain = bytearray(BLOCK)
        self.stored = bytearray(BLOCK + TRAILER_SIZE)
        self.level = level
        self._compressor: zstandard.ZstdCompressor | None = None
        self._decompressor: zstandard.ZstdDecompressor | None = None

    @property
    def compressor(self) -> zstandard.ZstdCompressor:
        """This thread's compression context."""
        if self._compressor is None:
            self._compressor = zstandard.ZstdCompressor(level=self.level)
        return self._compressor

    @property
    def decompressor(self) -> zstandard.ZstdDecompressor:
        """This thread's decompression context."""
        if self._decompressor is None:
            self._decompressor = zstandard.ZstdDecompressor()
        return self._decompressor


def encode(plain: memoryview, scratch: Scratch) -> tuple[memoryview, bytes]:
    """Compress a block if it is worth it; returns payload (valid until the next call), trailer."""
    packed = _compress(plain, scratch)
    if packed is None:
        return plain, _TRAILER.pack(_MAGIC, _RAW, len(plain))
    return packed, _TRAILER.pack(_MAGIC, _ZSTD, len(plain))


def _compress(plain: memoryview, scratch: Scratch) -> memoryview | None:
    size = len(plain)
    if size > 2 * _SAMPLE * _SAMPLES:
        # Noise is known by a few pages of it, at a thirtieth of the cost.
        step = size // _SAMPLES
        sample = b"".join([plain[at : at + _SAMPLE] for at in range(0, step * _SAMPLES, step)])
        if len(scratch.compressor.compress(sample)) > 0.95 * len(sample):
            return None
    # Raw is quicker to read, so it takes more than a few per cent to give it up.
    room = size - size // 16
    if room > len(scratch.stored):
        scratch.stored = bytearray(room)
    packed = memoryview(scratch.stored)[:room]
    done = 0
    with scratch.compressor.stream_reader(plain, size=size) as reader:
        while done < room:
            got = reader.readinto(packed[done:])
            if got == 0:
                return packed[:done]
            done += got
    return None


def decode(stored: memoryview, size: int, scratch: Scratch) -> memoryview:
    """Get a block of `size` bytes out of a chunk file's content.

    The result lies in `stored` or in the thread's buffer.

    Raises
    ------
    Damaged
        Truncated or altered so that it cannot be decoded; other alteration is for the
        caller to find by the checksum.
    """
    if len(stored) < TRAILER_SIZE:
        raise Damaged("a block is cut off")
    payload, trailer = stored[:-TRAILER_SIZE], stored[-TRAILER_SIZE:]
    magic, codec, plain_size = _TRAILER.unpack(trailer)
    if magic != _MAGIC or plain_size != size:
        raise Damaged("a block is cut off")
    if trailer != _TRAILER.pack(magic, codec, plain_size):
        raise Damaged("a block is stored in an unknown way")
    if codec == _RAW and len(payload) == size:
        return payload
    if codec != _ZSTD:
        raise Damaged("a block is stored in an unknown way")
    if size > len(scratch.plain):
        scratch.plain = bytearray(size)
    plain = memoryview(scratch.plain)[:size]
    try:
        with scratch.decompressor.stream_reader(payload) as reader:
            done = 0
            while done < size:
                got = reader.readinto(plain[done:])
                if got == 0:
                    raise Damaged("a block is cut off")
                done += got
    except zstandard.ZstdError as error:
        raise Damaged("a block cannot be decompressed") from error
    return plain


def is_whole(fd: int, size: int) -> bool:
    """Whether an open chunk file of `size` bytes has its trailer, so was written to its end."""
    return size >= TRAILER_SIZE and os.pread(fd, 4, size - TRAILER_SIZE) == _MAGIC
