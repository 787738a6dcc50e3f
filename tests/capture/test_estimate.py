"""What a save will need, said before it: never less than what it then writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capture.estimate import state_size

from .conftest import RunningKernel

MIB = 1 << 20

#: Private memory, and shared memory that a child maps too.
MEMORY = """
import mmap, os, signal
private = mmap.mmap(-1, {private}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
private.write(os.urandom({private}))
shared = mmap.mmap(-1, {shared})
shared.write(os.urandom({shared}))
if not os.fork():
    sum(shared[::4096])
    signal.pause()
while not any('S (sleep' in open(f'/proc/{{pid}}/status').read() for pid in
              open(f'/proc/{{os.getpid()}}/task/{{os.getpid()}}/children').read().split()):
    pass
"""
FILES = """
import os
deleted = open("deleted.bin", "w+b")
deleted.write(os.urandom({size}))
deleted.flush()
os.unlink("deleted.bin")
memfd = os.memfd_create("m")
os.write(memfd, os.urandom({size}))
there = open("/tmp/estimate-" + str(os.getpid()), "w+b")
there.write(os.urandom({size}))
there.flush()
"""


def on_disk(images_dir: Path) -> int:
    return sum(path.stat().st_size for path in images_dir.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "code",
    [
        MEMORY.format(private=20 * MIB, shared=40 * MIB),
        FILES.format(size=20 * MIB),
    ],
)
def test_it_is_enough_and_not_much_more(kernel: RunningKernel, code: str) -> None:
    kernel.run(code)
    estimate = state_size(kernel.pid, ["/tmp"])
    images_dir, _ = kernel.save(["/tmp"])
    Path(f"/tmp/estimate-{kernel.pid}").unlink(missing_ok=True)
    written = on_disk(images_dir)
    assert written > 60 * MIB
    assert written <= estimate <= 1.3 * written


def test_a_kernel_that_has_ended_needs_nothing(kernel: RunningKernel) -> None:
    kernel.kill()
    assert state_size(kernel.pid, ["/tmp"]) == 0
