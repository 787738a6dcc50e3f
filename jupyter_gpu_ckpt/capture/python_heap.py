"""Which memory of an image holds CPython's small objects."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_POOL: Final = 16 << 10
#: The header as words of 32 bits: the class of the blocks' size, the place of the last block.
_CLASS: Final = 36 // 4
_LAST: Final = 44 // 4
_CLASSES: Final = 32
_QUANTUM: Final = 16


def find_pools(
    pages: Path, segments: Sequence[tuple[int, int, int]], *, looks: int
) -> list[tuple[int, int]]:
    """Address ranges in which CPython (3.10 and newer) keeps objects of up to 512 bytes.

    It takes them from pools of 16 KiB, each with a header in which one number follows from
    another: where the last block lies, from the size of the blocks. Other data hardly ever looks
    like that, so pools are told by it, wherever the allocator put them.

    Parameters
    ----------
    pages
        A file of pages of an image.
    segments
        What of it to look at: (offset in the file, length, address), bytes, whole pages.
    looks
        At about how many places to look at most; in more memory than that, at a sample of them,
        each of which stands for what follows it.

    Returns
    -------
    list of (int, int)
        Begin and end of each range, sorted; neighbours are put together.
    """
    total = sum(length for _, length, _ in segments)
    if not total:
        return []
    step = _POOL * max(1, -(-total // (_POOL * looks)))
    found: list[tuple[int, int]] = []
    with (
        pages.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as data,
        data.cast("I") as words,
    ):
        for offset, length, address in sorted(segments, key=lambda segment: segment[2]):
            first = -(-address // _POOL) * _POOL
            for at in range(first, address + length, step):
                word = (offset + at - address) // 4
                class_ = words[word + _CLASS]
                if class_ >= _CLASSES or words[word + _LAST] != _POOL - (class_ + 1) * _QUANTUM:
                    continue
                if found and found[-1][0] <= at <= found[-1][1]:
                    found[-1] = (found[-1][0], at + step)
                else:
                    found.append((at, at + step))
    return found
