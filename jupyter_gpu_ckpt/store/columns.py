"""Many numbers, close together in memory and on disk."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def to_column(kind: str, values: Iterable[int]) -> bytes:
    """Numbers of an ``array`` kind as little-endian bytes."""
    column = array(kind, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def from_column(kind: str, data: bytes) -> array[int]:
    """Undo :func:`to_column`.

    Raises
    ------
    ValueError
        Not a whole number of values.
    """
    column = array(kind)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
