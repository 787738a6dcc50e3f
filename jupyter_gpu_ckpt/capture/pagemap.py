"""Where the pages of an image directory come from: which address each has in which memory.

CRIU writes the pages of a memory one after the other, without gaps, into ``pages-N.img``, and
where they belong into ``pagemap-*.img``. A page more shifts all that follow it in the file, but
none in memory: so the store compares pages of one save and the next by address.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from .images_proto import damaged, read_image

#: Flag of a pagemap entry: its pages are in the file.
_PRESENT: Final = 1 << 2
_ADDRESSES: Final = 1 << 64
_MOST_BYTES: Final = 256 << 20
_ANON_SHARED: Final = 1 << 8
_MEMFD: Final = 1 << 14
#: Each memory has a pagemap: a process's own, named by its PID, and each shared one.
_NAME: Final = re.compile(r"pagemap-(shmem-)?([0-9]+)\.img")
#: What kernel-capture writes of a process's GPU memory: which GPU has how much of the file, in
#: the order of the file, whose name is the same without the end.
_PARTS: Final = re.compile(r"(gpu-memory-([0-9]+))\.parts")
#: Addresses between two GPUs' memory, which has none of its own.
_APART: Final = 1 << 44
_MOST_PARTS: Final = 64


class PageFile(NamedTuple):
    """One file of pages.

    Attributes
    ----------
    space
        Name of the memory they belong to; the same from save to save of a kernel, as far as
        that can be told: ``mm-<pid>``, ``shmem-<pid>-<address of the first mapping>``,
        ``gpu-<pid>``.
    segments
        ``(offset in the file, length, address)``, bytes, in the order of the file. They cover
        it without gaps. Addresses of a shared memory count from its own begin.
    pid
        Whose memory it is; of a shared one the first process that maps it, if one does.
    start
        Where that process maps a shared one; ``None`` for a process's own memory.
    name
        What a shared memory was called when it was made, for people.
    """

    space: str
    segments: list[tuple[int, int, int]]
    pid: int | None = None
    start: int | None = None
    name: bytes = b""


def page_files(images_dir: Path) -> dict[str, PageFile]:
    """The files of pages in an image directory, by name (``pages-1.img``).

    Raises
    ------
    CkptError
        ``state_damaged`` when the images do not fit together.
    """
    found: dict[str, PageFile] = {}
    shared = _shared(images_dir)
    for path in sorted(images_dir.glob("pagemap-*.img")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        is_shared, number = match.groups()
        if path.stat().st_size > _MOST_BYTES:
            raise damaged(path, "it is too long")
        head, *entries = read_image(path, "pagemap_entry", first="pagemap_head").messages or [None]
        if head is None:
            raise damaged(path, "it is empty")
        pages = images_dir / f"pages-{head.pages_id}.img"
        if pages.name in found:
            raise damaged(path, f"{pages.name} has another one")
        if is_shared:
            of = shared.get(int(number), PageFile(f"shmem-{number}", []))
        else:
            of = PageFile(f"mm-{number}", [], int(number))
        try:
            size = pages.stat().st_size
        except FileNotFoundError:
            size = 0
        found[pages.name] = of._replace(segments=_segments(path, entries, size))
    for path in images_dir.glob("gpu-memory-*.parts"):
        match = _PARTS.fullmatch(path.name)
        if match is not None:
            name, pid = match.groups()
            parts = _parts(path, images_dir / name)
            if parts is not None:
                found[name] = PageFile(f"gpu-{pid}", parts, int(pid))
    return found


def _parts(path: Path, file: Path) -> list[tuple[int, int, int]] | None:
    """The memory of each GPU in a process's file; ``None`` where it is not in whole pages."""
    page = os.sysconf("SC_PAGE_SIZE")
    segments: list[tuple[int, int, int]] = []
    at = 0
    try:
        sizes = [int(line.split()[1]) for line in path.read_text("ascii").splitlines()]
        whole = file.stat().st_size
    except (OSError, ValueError, IndexError) as error:
        raise damaged(path, "it is no list of GPU memory") from error
    for number, size in enumerate(sizes):
        if not 0 <= size <= min(_APART, whole - at) or number >= _MOST_PARTS:
            raise damaged(path, "the GPU memory is less or more than it says")
        if size:
            segments.append((at, size, number * _APART))
        at += size
    if at != whole:
        raise damaged(path, "the GPU memory is less or more than it says")
    return None if any(size % page for size in sizes) else segments


def _segments(path: Path, entries: list[Any], size: int) -> list[tuple[int, int, int]]:
    """What of the file of pages, which has `size` bytes, is where in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    segments: list[tuple[int, int, int]] = []
    at = end = 0  # in the file; the address after the last segment
    for entry in entries:
        flags = entry.flags
        if not flags and not entry.HasField("flags"):
            flags = 0 if entry.in_parent else _PRESENT
        # Newer CRIUs set the old field to 0.
        length = (entry.nr_pages or entry.compat_nr_pages) * page
        if not flags & _PRESENT or not length:
            continue
        address = entry.vaddr
        if address % page or length > size - at or address + length > _ADDRESSES:
            raise damaged(path, "an entry is out of bounds")
        if segments and address == end:
            begin, before, start = segments[-1]
            segments[-1] = (begin, before + length, start)
        else:
            segments.append((at, length, address))
        at += length
        end = address + length
    if at != size:
        raise damaged(path, "the pages are fewer or more than it says")
    by_address = sorted(segments, key=lambda segment: segment[2])
    for (_, length, address), (_, _, following) in itertools.pairwise(by_address):
        if address + length > following:
            raise damaged(path, "a page is there twice")
    return segments


def _shared(images_dir: Path) -> dict[int, PageFile]:
    """The shared memories by their number, which another restore changes; without segments.

    The place of the first mapping does not change; what is mapped nowhere keeps the name and
    the number that CRIU gave it.
    """
    found: dict[int, PageFile] = {}
    numbers: dict[int, int] = {}
    path = images_dir / "memfd.img"
    if path.exists():
        inodes: dict[int, int] = {}
        for inode in read_image(path, "memfd_inode_entry").messages:
            inodes[inode.inode_id] = inode.shmid
            space = f"memfd-{inode.name.hex()}-{inode.inode_id}"
            found[inode.shmid] = PageFile(space, [], name=inode.name)
        for entry in read_image(images_dir / "files.img", "file_entry").messages:
            if entry.HasField("memfd") and entry.memfd.inode_id in inodes:
                numbers[entry.id] = inodes[entry.memfd.inode_id]
    for pid, vma in _shared_mappings(images_dir):
        number = numbers.get(vma.shmid, vma.shmid) if vma.status & _MEMFD else vma.shmid
        before = found.get(number, PageFile("", []))
        if before.pid is None:
            space = f"shmem-{pid}-{vma.start:x}"
            found[number] = before._replace(space=space, pid=pid, start=vma.start)
    return found


def _shared_mappings(images_dir: Path) -> Iterator[tuple[int, Any]]:
    """Mappings of shared memory, by process and address."""
    paths = images_dir.glob("mm-*.img")
    pids = sorted(int(m[1]) for path in paths if (m := re.fullmatch(r"mm-(\d+)\.img", path.name)))
    for pid in pids:
        for entry in read_image(images_dir / f"mm-{pid}.img", "mm_entry").messages:
            for vma in entry.vmas:
                if vma.status & (_ANON_SHARED | _MEMFD):
                    yield pid, vma
