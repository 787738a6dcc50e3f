"""What is in an image directory, by kind and by mapping: whose memory, which files.

Bytes are counted where they are stored: memory that CRIU leaves out, such as a library's unchanged
code, is not in the state. Shared memory counts once, however many processes map it.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from ..models import Contents, ContentsItem, ContentsKind, ContentsSum
from .images_proto import REG, read_image
from .node_local import FOLDER, NodeLocalEntry
from .pagemap import PageFile
from .python_heap import find_pools

#: Status bits of a mapping, flags, protection.
_HEAP: Final = 1 << 5
_OF_FILE: Final = 1 << 6 | 1 << 7
_ANON_PRIVATE: Final = 1 << 9
_VDSO: Final = 1 << 3 | 1 << 12
_OF_PLUGIN: Final = 1 << 27
_GROWS_DOWN: Final = 0x100
_EXECUTABLE: Final = 4

_GPU: Final = re.compile(rb"/dev/(nvidia.*|kfd|dri/.*)", re.DOTALL)
_PYTHON: Final = re.compile(rb"(.*/)?(lib)?python3?(\.[0-9]+t?)?(\.so.*)?", re.DOTALL)
_LIBRARY: Final = re.compile(rb".*\.so(\.[^/]*)?", re.DOTALL)

#: Of one process's memory so many pools are looked at (1 GiB); of more, a sample.
_LOOKS: Final = 1 << 16
#: So many items are kept: a list of states reads them all.
_MOST_ITEMS: Final = 64
_LONGEST_NAME: Final = 200
_ON_GPU: Final = b"[GPU memory]"
_NONE: Final[Mapping[int, Sequence[tuple[int, int]]]] = {}


class Survey:
    """What each byte of an image directory belongs to.

    Parameters
    ----------
    images_dir
        A finished image directory, with all that goes into the state.
    pages
        Its files of pages, from :func:`.pagemap.page_files`.
    node_local
        What :func:`.files.collect` put into it.
    on_gpu
        Address ranges (begin, end) of processes, by their ids, that hold memory of a GPU.

    Raises
    ------
    CkptError
        ``state_damaged`` when an image cannot be read.
    """

    def __init__(
        self,
        images_dir: Path,
        pages: Mapping[str, PageFile],
        node_local: Sequence[NodeLocalEntry] = (),
        on_gpu: Mapping[int, Sequence[tuple[int, int]]] = _NONE,
    ) -> None:
        self._dir = images_dir
        self._on_gpu = on_gpu
        self._items: dict[tuple[ContentsKind, str, int | None, int | None], ContentsItem] = {}
        #: Of each file: where the part of an item begins, and the item; in order, without gaps.
        self._parts: dict[str, list[tuple[int, ContentsItem]]] = {}
        self._names: dict[int, bytes] = {
            entry.id: entry.reg.name
            for entry in read_image(images_dir / "files.img", "file_entry").messages
            if entry.type == REG
        }
        for name, found in pages.items():
            self._add_pages(name, found)
        self._add_files(node_local)

    def count(self, added: Iterable[tuple[bytes, int, int]]) -> None:
        """Count as new what the store did not have: ``(path, offset, length)``, bytes."""
        for path, offset, length in added:
            parts = self._parts.get(os.fsdecode(path))
            if not parts:
                continue
            end = offset + length
            number = bisect_right(parts, offset, key=lambda part: part[0]) - 1
            while offset < end:
                following = parts[number + 1][0] if number + 1 < len(parts) else end
                parts[number][1].new += min(end, following) - offset
                offset, number = following, number + 1

    def contents(self, parent: str | None) -> Contents:
        """The summary, bounded in size; `parent` is the state that was compared with."""
        items = [item for item in self._items.values() if item.size]
        items.sort(
            key=lambda item: (-item.size, item.kind, item.name, item.pid or 0, item.start or "")
        )
        sums = {kind: ContentsSum(kind) for kind in get_args(ContentsKind)}
        for item in items:
            # The store rounds the end of a file up to a page.
            item.new = min(item.new, item.size)
            sums[item.kind].size += item.size
            sums[item.kind].new += item.new
        return Contents(
            size=sum(item.size for item in items),
            new=sum(item.new for item in items),
            parent=parent,
            kinds=list(sums.values()),
            items=items[:_MOST_ITEMS],
            left_out=max(0, len(items) - _MOST_ITEMS),
        )

    def touched(self, ranges: Iterable[tuple[bytes, int, int]]) -> list[ContentsItem]:
        """What some ranges of the files belong to, largest first: ``size`` is theirs of each."""
        self.count(ranges)
        found = [
            ContentsItem(item.kind, item.name, item.pid, item.start, min(item.new, item.size))
            for item in self._items.values()
            if item.new
        ]
        return sorted(found, key=lambda item: -item.size)[:_MOST_ITEMS]

    # -- what there is -------------------------------------------------------------------

    def _item(
        self, kind: ContentsKind, name: bytes, pid: int | None = None, start: int | None = None
    ) -> ContentsItem:
        key = (kind, text := shown(name), pid, start)
        if key not in self._items:
            self._items[key] = ContentsItem(
                kind, text, pid, None if start is None else f"{start:x}"
            )
        return self._items[key]

    def _add(self, file: str, offset: int, length: int, item: ContentsItem) -> None:
        item.size += length
        parts = self._parts.setdefault(file, [])
        if not parts or parts[-1][1] is not item:
            parts.append((offset, item))

    def _add_pages(self, name: str, found: PageFile) -> None:
        if found.space.startswith("mm-") and found.pid is not None:
            self._add_process(name, found.pid, found.segments)
            return
        if found.space.startswith("gpu-"):
            memory = self._item("gpu", _ON_GPU, found.pid)
            for offset, length, _ in found.segments:
                self._add(name, offset, length, memory)
            return
        anonymous = found.name in (b"", b"/dev/zero")
        called = b"[shared memory]" if anonymous else b"memfd:" + found.name
        item = self._item("shared", called, found.pid, found.start)
        for offset, length, _ in found.segments:
            self._add(name, offset, length, item)

    def _add_process(self, name: str, pid: int, segments: list[tuple[int, int, int]]) -> None:
        (mm,) = read_image(self._dir / f"mm-{pid}.img", "mm_entry").messages[:1] or [None]
        mappings = sorted(mm.vmas, key=lambda vma: int(vma.start)) if mm else []
        code = {vma.shmid for vma in mappings if vma.prot & _EXECUTABLE and vma.status & _OF_FILE}
        python = any(_PYTHON.fullmatch(self._names.get(id_, b"")) for id_ in code)
        on_gpu = _Ranges(self._on_gpu.get(pid, ()))
        pieces = [
            (offset + begin - address, end - begin, begin, vma, is_gpu)
            for offset, length, address, vma in _cut(segments, mappings)
            for begin, end, is_gpu in on_gpu.split(address, address + length)
        ]
        plain = [one[:3] for one in pieces if python and not one[4] and _is_plain(one[3])]
        pools = _Ranges(find_pools(self._dir / name, plain, looks=_LOOKS))
        for offset, length, address, vma, is_gpu in pieces:
            if is_gpu:
                self._add(name, offset, length, self._item("gpu", _ON_GPU, pid))
                continue
            if vma is None:
                self._add(name, offset, length, self._item("other", b"[unknown]", pid))
                continue
            kind, called, start = self._kind(vma, code, python)
            item = self._item(kind, called, pid, start)
            if kind != "anon" or not _is_plain(vma):
                self._add(name, offset, length, item)
                continue
            objects = self._item("python", b"[small objects]", pid)
            for begin, end, inside in pools.split(address, address + length):
                place = offset + begin - address
                self._add(name, place, end - begin, objects if inside else item)

    def _kind(
        self, vma: Any, code: set[int], python: bool
    ) -> tuple[ContentsKind, bytes, int | None]:
        """Kind, name, and address where that tells mappings of one name apart."""
        status = vma.status
        if status & _OF_FILE:
            called = self._names.get(vma.shmid, b"[file]")
            if status & _OF_PLUGIN or _GPU.fullmatch(called):
                return "gpu", called, None
            is_code = vma.shmid in code or is_library(called)
            return "libraries" if is_code else "files", called, None
        if status & _OF_PLUGIN:
            return "gpu", b"[gpu]", vma.start
        if status & _HEAP:
            return "python" if python else "anon", b"[heap]", None
        if status & _VDSO:
            return "other", b"[vdso]", None
        if vma.flags & _GROWS_DOWN:
            return "anon", b"[stack]", None
        return "anon" if status & _ANON_PRIVATE else "other", b"[anonymous]", vma.start

    def _add_files(self, node_local: Sequence[NodeLocalEntry]) -> None:
        own = {f"{FOLDER}/{entry.source}": entry.path for entry in node_local}
        ghosts = self._ghosts()
        for path in sorted(self._dir.rglob("*")):
            name = str(path.relative_to(self._dir))
            if name in self._parts or not path.is_file() or path.is_symlink():
                continue
            size = path.stat().st_size
            if name in own:
                item = self._item("files", os.fsencode(own[name]))
            elif name.startswith("gpu-memory-") and not name.endswith(".parts"):
                item = self._item("gpu", _ON_GPU)
            elif name in ghosts:
                item = self._item("files", ghosts[name] + b" (deleted)")
            else:
                item = self._item("other", b"[records of the processes]")
            self._add(name, 0, size, item)

    def _ghosts(self) -> dict[str, bytes]:
        """Open files whose last name is gone: the image that holds each, and the name it had."""
        path = self._dir / "remap-fpath.img"
        if not path.exists():
            return {}
        return {
            f"ghost-file-{entry.remap_id:x}.img": self._names.get(entry.orig_id, b"[file]")
            for entry in read_image(path, "remap_file_path_entry").messages
        }


class _Ranges:
    """Address ranges, sorted, that do not overlap."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._ranges = ranges

    def split(self, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """Cut a range at these ones' ends; whether a piece is in one of them."""
        number = max(0, bisect_right(self._ranges, begin, key=lambda found: found[0]) - 1)
        while number < len(self._ranges) and self._ranges[number][0] < end:
            first, last = self._ranges[number]
            number += 1
            if last <= begin:
                continue
            if first > begin:
                yield begin, first, False
            stop = min(last, end)
            yield max(first, begin), stop, True
            begin = stop
        if begin < end:
            yield begin, end, False


def _cut(
    segments: Iterable[tuple[int, int, int]], mappings: Sequence[Any]
) -> Iterator[tuple[int, int, int, Any]]:
    """Segments cut at the ends of the mappings they are in: offset, length, address, mapping.

    The mapping is ``None`` for what is in none.
    """
    starts = [vma.start for vma in mappings]
    for offset, length, address in segments:
        end = address + length
        while address < end:
            number = bisect_right(starts, address)
            vma = mappings[number - 1] if number and address < mappings[number - 1].end else None
            stop = min(end, starts[number] if number < len(starts) else end)
            if vma is not None:
                stop = min(stop, vma.end)
            yield offset, stop - address, address, vma
            offset, address = offset + stop - address, stop


def _is_plain(vma: Any) -> bool:
    """Whether a mapping is memory of its own without a name: where an allocator may be at work."""
    if vma is None:
        return False
    named = vma.status & (_OF_FILE | _HEAP | _VDSO | _OF_PLUGIN) or vma.flags & _GROWS_DOWN
    return bool(vma.status & _ANON_PRIVATE and not named)


def is_library(name: bytes) -> bool:
    """Whether a file is a shared library, by its path."""
    return _LIBRARY.fullmatch(name) is not None


def shown(name: bytes) -> str:
    """A path or other name as text, of bounded length: of a long one the end."""
    text = name.decode("utf-8", "replace")
    return text if len(text) <= _LONGEST_NAME else "..." + text[3 - _LONGEST_NAME :]
