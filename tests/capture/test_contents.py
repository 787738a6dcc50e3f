"""What an image holds, as it is told to a user."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from jupyter_gpu_ckpt.capture.contents import Survey
from jupyter_gpu_ckpt.capture.pagemap import page_files
from jupyter_gpu_ckpt.capture.protocol import dump_result
from jupyter_gpu_ckpt.capture.python_heap import find_pools
from jupyter_gpu_ckpt.gpus.inventory import CudaProcess, GpuUse
from jupyter_gpu_ckpt.models import Contents, ContentsItem

from .conftest import RunningKernel

MIB = 1 << 20

SETUP = """
import ctypes, mmap, os
private = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
private[: 6 << 20] = b"p" * (6 << 20)
shared = mmap.mmap(-1, 2 << 20)
shared[: 1 << 20] = b"s" * (1 << 20)
objects = [object() for _ in range(500_000)]
deleted = open("deleted.bin", "w+b", buffering=0)
deleted.write(b"d" * 70_000)
os.unlink("deleted.bin")
there = open(f"/tmp/contents-{os.getpid()}.bin", "w+b", buffering=0)
there.write(b"t" * 50_000)
print(ctypes.addressof(ctypes.c_char.from_buffer(private)))
"""


def item(contents: Contents, **wanted: object) -> ContentsItem:
    (found,) = [
        item
        for item in contents.items
        if all(getattr(item, name) == value for name, value in wanted.items())
    ]
    return found


def test_everything_is_counted_once_by_kind_and_by_mapping(kernel: RunningKernel) -> None:
    private = int(kernel.run(SETUP))
    images_dir, node_local = kernel.save(["/tmp"])
    Path(f"/tmp/contents-{kernel.pid}.bin").unlink()
    pages = page_files(images_dir)
    survey = Survey(images_dir, pages, node_local)
    contents = survey.contents(None)

    on_disk = sum(path.stat().st_size for path in images_dir.rglob("*") if path.is_file())
    assert contents.size == on_disk
    assert sum(kind.size for kind in contents.kinds) == on_disk
    kinds = {kind.kind: kind.size for kind in contents.kinds}
    # An object takes 16 bytes of a pool; the list's 4 MB come from elsewhere.
    assert item(contents, kind="python", name="[small objects]").size > 500_000 * 16
    assert 6 * MIB < kinds["anon"] < 16 * MIB
    assert any(i.kind == "anon" and i.size >= 6 * MIB and i.start for i in contents.items)
    assert kinds["gpu"] == 0
    assert item(contents, kind="shared", size=MIB).pid == kernel.pid
    assert item(contents, kind="files", size=50_000).name == f"/tmp/contents-{kernel.pid}.bin"
    deleted = item(contents, name=f"{kernel.folder}/deleted.bin (deleted)")
    assert deleted.kind == "files"
    assert deleted.size >= 70_000
    assert any("/libc.so" in i.name and i.kind == "libraries" for i in contents.items)
    assert item(contents, name="[heap]").kind == "python"

    # What is stored anew is told apart by the place it has in the files.
    (name,) = [name for name, found in pages.items() if found.space == f"mm-{kernel.pid}"]
    (offset,) = [o + private - a for o, n, a in pages[name].segments if a <= private < a + n]
    copy = next(entry.source for entry in node_local if entry.size == 50_000)
    survey.count([(name.encode(), offset + MIB, MIB), (b"node-local/%d" % (copy or 0), 0, 53_248)])
    contents = survey.contents("before")
    assert contents.parent == "before"
    assert contents.new == MIB + 50_000
    assert {kind.kind: kind.new for kind in contents.kinds if kind.new} == {
        "anon": MIB,
        "files": 50_000,
    }
    assert item(contents, new=MIB).kind == "anon"


ON_GPU = """
import ctypes, mmap, struct
memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[: 6 << 20] = b"p" * (6 << 20)
# What looks like the header of a pool of small objects.
for at in range(0, 6 << 20, 4096):
    struct.pack_into("<I4xI", memory, at + 36, 0, 16384 - 16)
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
"""


def test_memory_of_a_gpu_is_told_apart_wherever_its_driver_put_it(kernel: RunningKernel) -> None:
    """Not by mapping: what a driver maps may become a part of one that was there before."""
    begin = int(kernel.run(ON_GPU))
    images_dir, node_local = kernel.save([])
    pages = page_files(images_dir)
    use = GpuUse(
        [
            CudaProcess(1, mappings=[f"{begin:x}-{begin + MIB:x}"]),
            CudaProcess(
                kernel.pid,
                mappings=[
                    f"{begin + 4 * MIB:x}-{begin + 5 * MIB:x}",
                    f"{begin + MIB:x}-{begin + 3 * MIB:x}",
                    f"{begin + 7 * MIB:x}-{begin + 8 * MIB:x}",  # nothing was written to it
                    "nonsense",
                    "5000-4000",
                ],
            ),
        ]
    )
    survey = Survey(images_dir, pages, node_local, use.in_memory)
    plain = Survey(images_dir, pages, node_local).contents(None)
    found = survey.contents(None)
    of_gpu = item(found, kind="gpu")
    assert (of_gpu.name, of_gpu.pid, of_gpu.size) == ("[GPU memory]", kernel.pid, 3 * MIB)
    assert found.size == plain.size == sum(kind.size for kind in found.kinds)
    before, after = ({kind.kind: kind.size for kind in c.kinds} for c in (plain, found))
    assert before["gpu"] == 0
    # The rest of it is still anonymous memory, or what it was taken for.
    host = ("anon", "python")
    assert sum(before[kind] for kind in host) - sum(after[kind] for kind in host) == 3 * MIB
    # A pool of which the beginning is a GPU's is not known for one.
    assert 0 <= before["python"] - after["python"] - 3 * MIB < MIB // 8
    assert all(before[kind] == after[kind] for kind in before.keys() - {*host, "gpu"})

    (name,) = [name for name, one in pages.items() if one.space == f"mm-{kernel.pid}"]
    (place,) = [o + begin - a for o, n, a in pages[name].segments if a <= begin < a + n]
    survey.count([(name.encode(), place + MIB // 2, MIB)])
    assert {kind.kind: kind.new for kind in survey.contents("before").kinds if kind.new} == {
        "python": MIB // 2,
        "gpu": MIB // 2,
    }


def test_where_a_park_has_put_memory_is_known_at_the_save_too() -> None:
    parked = [CudaProcess(1, parked=True, mappings=["1000-2000"]), CudaProcess(2, parked=True)]
    use = [
        {"pid": 1, "parked": True, "mappings": None},
        {"pid": 2, "parked": True, "mappings": None},
        {"pid": 3, "parked": False, "mappings": ["5000-6000"]},
        {"pid": 4, "parked": True},
    ]
    done = dump_result({"gpu": {"processes": use}}, parked)
    assert done.on_gpu == {1: [(0x1000, 0x2000)], 3: [(0x5000, 0x6000)]}
    # Of one that is not parked any more, an earlier park says nothing.
    use[0]["parked"] = False
    assert dump_result({"gpu": {"processes": use}}, parked).on_gpu == {3: [(0x5000, 0x6000)]}
    assert dump_result({"gpu": None}, parked).on_gpu == {}


def test_pools_are_found_where_they_are(tmp_path: Path) -> None:
    words = random.Random(1).randbytes(64 * 16384)
    content = bytearray(words)
    for pool, class_ in ((3, 0), (4, 31), (9, 7)):
        struct.pack_into("<I", content, pool * 16384 + 36, class_)
        struct.pack_into("<I", content, pool * 16384 + 44, 16384 - 16 * (class_ + 1))
    path = tmp_path / "pages-1.img"
    path.write_bytes(content)
    base = 0x7F0000000000
    whole = [(0, len(content), base)]
    pools = [(base + 3 * 16384, base + 5 * 16384), (base + 9 * 16384, base + 10 * 16384)]
    assert find_pools(path, whole, looks=1000) == pools
    # The second page of a pool is none of its own.
    assert find_pools(path, [(3 * 16384 + 4096, 12288, base + 4096)], looks=1000) == []
    assert find_pools(path, [], looks=1000) == []
    # A sample of every third: each stands for three.
    assert find_pools(path, whole, looks=22) == [
        (base + 3 * 16384, base + 6 * 16384),
        (base + 9 * 16384, base + 12 * 16384),
    ]
