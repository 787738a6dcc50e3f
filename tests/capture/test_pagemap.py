"""Which page of an image belongs where in memory, from real images and from garbage."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpu_ckpt.capture.images_proto import COMMON_MAGIC
from jupyter_gpu_ckpt.capture.pagemap import PageFile, page_files
from jupyter_gpu_ckpt.errors import CkptError

from .conftest import RunningKernel

PAGE = os.sysconf("SC_PAGE_SIZE")
MAGIC = struct.pack("<II", COMMON_MAGIC, 0x56084025)
PRESENT = 4

SETUP = """
import ctypes, mmap, os, signal
private = mmap.mmap(-1, 256 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
shared = mmap.mmap(-1, 64 * 4096)
unmapped = os.memfd_create("unmapped")
os.write(unmapped, b"u" * 4096)
private[100 * 4096 : 102 * 4096] = b"p" * 8192
shared[7 * 4096 : 8 * 4096] = b"s" * 4096
child = os.fork()
if not child:
    signal.pause()
for memory in (private, shared):
    print(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
print(child)
"""


def at(images_dir: Path, space: str, address: int) -> bytes:
    """A page of the image; empty when it is not in there."""
    for name, found in page_files(images_dir).items():
        if found.space == space:
            for offset, length, start in found.segments:
                if start <= address < start + length:
                    with (images_dir / name).open("rb") as file:
                        file.seek(offset + address - start)
                        return file.read(PAGE)
    return b""


def by_space(images_dir: Path) -> dict[str, dict[int, bytes]]:
    """Every page of an image by memory and address."""
    result: dict[str, dict[int, bytes]] = {}
    for name, found in page_files(images_dir).items():
        data = (images_dir / name).read_bytes()
        result[found.space] = {
            start + inside: data[offset + inside : offset + inside + PAGE]
            for offset, length, start in found.segments
            for inside in range(0, length, PAGE)
        }
    return result


def test_every_page_is_found_by_its_address_in_save_after_save(kernel: RunningKernel) -> None:
    printed = kernel.run(SETUP).split()[-3:]  # Python 3.12 warns of the fork first
    private, shared, child = map(int, printed)
    first, _ = kernel.dump()
    mine, childs = f"mm-{kernel.pid}", f"mm-{child}"
    spaces = {found.space for found in page_files(first).values()}
    together = f"shmem-{min(kernel.pid, child)}-{shared:x}"
    (other,) = spaces - {mine, childs, together}
    assert at(first, other, 0) == b"u" * PAGE
    for space in (mine, childs):
        assert at(first, space, private + 100 * PAGE) == b"p" * PAGE
        assert at(first, space, private + 101 * PAGE) == b"p" * PAGE
        assert at(first, space, private + 102 * PAGE) == b""
    assert at(first, together, 7 * PAGE) == b"s" * PAGE

    # A page before those that are there, and a shared one: everything else stays where it was.
    kernel.run("private[:4096] = b'q' * 4096; shared[:4096] = b't' * 4096")
    second, _ = kernel.dump()
    assert at(second, mine, private) == b"q" * PAGE
    assert at(second, childs, private) == b""
    assert at(second, together, 0) == b"t" * PAGE
    before, after = by_space(first), by_space(second)
    assert set(before) == set(after)
    # The system notes which CPU a thread runs on in the thread's own memory.
    for space, most in ((mine, 0.1), (childs, 0.01)):
        other_now = {a for a, page in before[space].items() if after[space].get(a) != page}
        assert len(other_now) < most * len(before[space])


def test_a_restored_kernel_has_the_same_memories(kernel: RunningKernel) -> None:
    kernel.run("import mmap; shared = mmap.mmap(-1, 8192); shared[:2] = b'hi'")
    first, _ = kernel.dump()
    kernel.kill()
    kernel.restore(first)
    second, _ = kernel.dump()
    assert {found.space for found in page_files(first).values()} == {
        found.space for found in page_files(second).values()
    }


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def entry(**fields: int) -> bytes:
    numbers = {"vaddr": 1, "compat_nr_pages": 2, "in_parent": 3, "flags": 4, "nr_pages": 5}
    body = b"".join(varint(numbers[name] << 3) + varint(value) for name, value in fields.items())
    return struct.pack("<I", len(body)) + body


def written(folder: Path, *entries: bytes, pages: int) -> PageFile:
    head = b"\x08\x01"
    image = MAGIC + struct.pack("<I", len(head)) + head + b"".join(entries)
    (folder / "pagemap-5.img").write_bytes(image)
    with (folder / "pages-1.img").open("wb") as file:
        file.truncate(pages * PAGE)
    return page_files(folder)["pages-1.img"]


def test_entries_of_older_and_newer_images(tmp_path: Path) -> None:
    found = written(
        tmp_path,
        entry(vaddr=16 * PAGE, compat_nr_pages=2),
        entry(vaddr=18 * PAGE, compat_nr_pages=1, in_parent=1),
        entry(vaddr=19 * PAGE, compat_nr_pages=0, flags=PRESENT, nr_pages=1),
        entry(vaddr=20 * PAGE, compat_nr_pages=0, flags=PRESENT | 2, nr_pages=3),
        entry(vaddr=30 * PAGE, compat_nr_pages=0, flags=2, nr_pages=9),
        entry(vaddr=1 << 47, compat_nr_pages=0, flags=PRESENT, nr_pages=1 << 31),
        pages=6 + (1 << 31),
    )
    assert found.space == "mm-5"
    assert found.segments == [
        (0, 2 * PAGE, 16 * PAGE),
        (2 * PAGE, 4 * PAGE, 19 * PAGE),
        (6 * PAGE, PAGE << 31, 1 << 47),
    ]


@pytest.mark.parametrize(
    ("entries", "pages"),
    [
        ([entry(vaddr=PAGE, nr_pages=2)], 1),
        ([entry(vaddr=PAGE, nr_pages=2)], 3),
        ([entry(vaddr=PAGE, nr_pages=(1 << 64) - 1)], 1),
        ([entry(vaddr=PAGE + 1, nr_pages=1)], 1),
        ([entry(vaddr=(1 << 64) - PAGE, nr_pages=2)], 2),
        ([entry(vaddr=PAGE, nr_pages=2), entry(vaddr=2 * PAGE, nr_pages=1)], 3),
    ],
)
def test_images_that_do_not_fit_together(tmp_path: Path, entries: list[bytes], pages: int) -> None:
    with pytest.raises(CkptError) as caught:
        written(tmp_path, *entries, pages=pages)
    assert caught.value.reason == "state_damaged"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_one_clear_error_or_nothing(garbage: bytes, framed: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        body = struct.pack("<I", len(garbage)) + garbage if framed else garbage
        (folder / "pagemap-5.img").write_bytes(MAGIC + body)
        try:
            page_files(folder)
        except CkptError as error:
            assert error.reason == "state_damaged"


def with_gpu_memory(folder: Path, parts: str, size: int) -> Path:
    (folder / "gpu-memory-42.parts").write_text(parts)
    with (folder / "gpu-memory-42").open("wb") as file:
        file.truncate(size)
    return folder


def test_memory_of_each_gpu_has_addresses_of_its_own(tmp_path: Path) -> None:
    """What grows on one GPU does not shift what is on the next."""
    first = with_gpu_memory(tmp_path, f"GPU-a {PAGE}\nGPU-b {2 * PAGE}\n", 3 * PAGE)
    before = page_files(first)["gpu-memory-42"]
    assert (before.space, before.pid) == ("gpu-42", 42)
    later = with_gpu_memory(tmp_path, f"GPU-a {2 * PAGE}\nGPU-b {2 * PAGE}\n", 4 * PAGE)
    after = page_files(later)["gpu-memory-42"]
    assert [segment[2] for segment in before.segments] == [segment[2] for segment in after.segments]
    assert [segment[:2] for segment in after.segments] == [(0, 2 * PAGE), (2 * PAGE, 2 * PAGE)]
    # What is not in whole pages is stored as any other file.
    assert page_files(with_gpu_memory(tmp_path, "GPU-a 5\n", 5)) == {}


@pytest.mark.parametrize("parts", ["GPU-a", "GPU-a x\n", "GPU-a -4096\n", "GPU-a 8192\n", ""])
def test_a_list_of_gpu_memory_that_does_not_fit_is_damage(tmp_path: Path, parts: str) -> None:
    with pytest.raises(CkptError) as caught:
        page_files(with_gpu_memory(tmp_path, parts, PAGE))
    assert caught.value.reason == "state_damaged"
