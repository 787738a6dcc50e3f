"""What a kernel has on GPUs is told, or it is unknown: never a guess."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capture import gpu_use, procfs
from jupyter_gpu_ckpt.capture.gpu_use import memory_on_gpus, of_tree
from jupyter_gpu_ckpt.gpus import asking
from jupyter_gpu_ckpt.gpus.inventory import Gpu, GpuProcess
from tests.harness.gpus import here
from tests.harness.node import REPOSITORY
from tests.simgpu.simgpu import gpu

HOLDER = """
import sys
from tests.simgpu.api import Gpu
gpu = Gpu()
data = gpu.upload(bytes(3 << 20))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process with 3 MiB on a GPU of the machine on which this one is, too."""
    monkeypatch.setattr(gpu_use, "inventory", asking.Asker().inventory)
    with here(tmp_path, monkeypatch, gpu(0)):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == b"holds\n"
            yield process
        finally:
            process.kill()
            process.communicate()


def _in_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "namespaces", lambda _: (None,) * 8)


def test_memory_of_the_tree_and_of_nobody_else(holder: subprocess.Popen[bytes]) -> None:
    assert memory_on_gpus(holder.pid) == 3 << 20
    assert memory_on_gpus(os.getpid()) == 3 << 20  # its parent
    with subprocess.Popen(["sleep", "1000"]) as other:
        assert memory_on_gpus(other.pid) == 0
        other.kill()


def test_in_a_container_it_is_told_where_the_numbers_are_the_same_and_unknown_otherwise(
    holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_container(monkeypatch)
    assert memory_on_gpus(holder.pid) == 3 << 20
    tree = [holder.pid]

    def one(*processes: GpuProcess) -> list[Gpu]:
        return [Gpu(0, "NVIDIA L4", "GPU-0", 24 << 30, 20 << 30, processes=list(processes))]

    assert of_tree(tree, one()) is None  # in use, and by nobody that is named
    # Numbers of the machine: one is nobody's here, another one's process has no GPU.
    assert of_tree(tree, one(GpuProcess(2**22 - 1, 20 << 30))) is None
    assert of_tree(tree, one(GpuProcess(1, 20 << 30))) is None
    # It is known who it is, and not how much.
    assert of_tree(tree, one(GpuProcess(holder.pid))) is None


def test_a_driver_that_does_not_answer_leaves_it_unknown(
    holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "machine" / "faults").write_text(
        "nvmlInit * error 999\nnvmlInitWithFlags * error 999\n"
    )
    assert memory_on_gpus(holder.pid) is None
