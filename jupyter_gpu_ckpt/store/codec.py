"""How a blob is encoded: one zstd frame, or as it is where compression gains little."""

from __future__ import annotations

import mmap

import zstandard

from .damage import Damaged

#: Bytes of a page, the unit of change.
PAGE = 4096
#: Most pages in a blob.
BLOB_PAGES = 256
#: Most bytes of plain data in a blob.
BLOB = PAGE * BLOB_PAGES
RAW, ZSTD = 0, 1
_SAMPLES = 8


class Scratch:
    """Buffers and compression contexts of one worker thread, reused for every blob."""

    def __init__(self, level: int) -> None:
        self.plain = bytearray(BLOB)
        # A little more than a blob: a sealed one is longer.
        self.stored = bytearray(BLOB + PAGE)
        self.level = level
        self._opened = bytearray()
        self._aligned: memoryview | None = None
        self._compressor: zstandard.ZstdCompressor | None = None
        self._decompressor: zstandard.ZstdDecompressor | None = None

    def room(self, size: int) -> memoryview:
        """The buffer for encoded data, of `size` bytes at least."""
        if size > len(self.stored):
            self.stored = bytearray(size)
        return memoryview(self.stored)[:size]

    def opened(self, size: int) -> bytearray:
        """The buffer for decrypted data, of `size` bytes at least."""
        if size > len(self._opened):
            self._opened = bytearray(max(size, BLOB + PAGE))
        return self._opened

    @property
    def aligned(self) -> memoryview:
        """Another buffer for plain data, that begins at a page: a disk takes only such directly."""
        if self._aligned is None:
            self._aligned = memoryview(mmap.mmap(-1, BLOB))
        return self._aligned

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


def encode(plain: memoryview, scratch: Scratch) -> tuple[int, memoryview]:
    """Compress a blob if it is worth it; returns codec and payload (valid until the next call)."""
    packed = _compress(plain, scratch)
    return (RAW, plain) if packed is None else (ZSTD, packed)


def _compress(plain: memoryview, scratch: Scratch) -> memoryview | None:
    size = len(plain)
    if size > 2 * PAGE * _SAMPLES:
        # Noise is known by a few pages of it, at a thirtieth of the cost.
        step = size // _SAMPLES
        sample = b"".join([plain[at : at + PAGE] for at in range(0, step * _SAMPLES, step)])
        if len(scratch.compressor.compress(sample)) > 0.95 * len(sample):
            return None
    # All at once: as a stream it would be copied first, and compressed a sixth more slowly.
    packed = scratch.compressor.compress(plain)
    # Raw is quicker to read, so it takes more than a few per cent to give it up.
    return memoryview(packed) if len(packed) <= size - size // 16 else None


def decode(codec: int, payload: memoryview, into: memoryview, scratch: Scratch) -> None:
    """Get a blob of the size of `into` out of its payload.

    Raises
    ------
    Damaged
        Cut off or altered so that it cannot be decoded; other alteration is for the
        caller to find by the name.
    """
    if codec == RAW:
        if len(payload) != len(into):
            raise Damaged("a block has the wrong size")
        into[:] = payload
        return
    if codec != ZSTD:
        raise Damaged("a block is stored in an unknown way")
    try:
        with scratch.decompressor.stream_reader(payload) as reader:
            done = 0
            while done < len(into):
                got = reader.readinto(into[done:])
                if got == 0:
                    raise Damaged("a block is cut off")
                done += got
    except zstandard.ZstdError as error:
        raise Damaged("a block cannot be decompressed") from error
