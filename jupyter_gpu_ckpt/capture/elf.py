"""The build id of an ELF file: what tells two builds of one library apart."""

from __future__ import annotations

import os
import struct
from typing import Final

_NOTE_SEGMENT: Final = 4
_GNU_BUILD_ID: Final = 3
_MAX_NOTES: Final = 1 << 16


def build_id(path: str | bytes) -> str | None:
    """Hexadecimal GNU build id of a 64-bit ELF file, or ``None`` where there is none.

    Never raises: a file that cannot be read or is not ELF has no build id.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _read(fd)
    except (OSError, struct.error):
        return None
    finally:
        os.close(fd)


def _read(fd: int) -> str | None:
    header = os.pread(fd, 64, 0)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return None
    order = "<" if header[5] == 1 else ">"
    (table,) = struct.unpack_from(order + "Q", header, 32)
    entry_size, count = struct.unpack_from(order + "HH", header, 54)
    if entry_size < 56 or not 0 < count <= 1024:
        return None
    entries = os.pread(fd, entry_size * count, table)
    for index in range(len(entries) // entry_size):
        base = index * entry_size
        kind, _flags, offset = struct.unpack_from(order + "IIQ", entries, base)
        (size,) = struct.unpack_from(order + "Q", entries, base + 32)
        if kind == _NOTE_SEGMENT and size <= _MAX_NOTES:
            found = _search(os.pread(fd, size, offset), order)
            if found:
                return found
    return None


def _search(notes: bytes, order: str) -> str | None:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from(order + "III", notes, at)
        name = at + 12
        value = name + (name_size + 3 & ~3)
        if kind == _GNU_BUILD_ID and notes[name : name + name_size] == b"GNU\0":
            return notes[value : value + size].hex() or None
        at = value + (size + 3 & ~3)
    return None
