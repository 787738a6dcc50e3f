"""The check of a real GPU, on a simulated one at tiny sizes, so that it works when it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.work import TorchWork
from tests.native.gpu_node import GpuNode
from tests.simgpu.simgpu import gpu

RUN = Path(__file__).with_name("run.sh")


@pytest.mark.root
def test_every_row_passes_on_the_simulated_driver(tmp_path: Path) -> None:
    node = GpuNode(tmp_path / "node", gpu(0, name="NVIDIA L4", persistence=True))
    try:
        done = subprocess.run(
            [*node.enter, RUN, "--sizes", "0.001,0.2"],
            env={
                **os.environ,
                "GPU_CHECK_PYTHON": sys.executable,
                "GPU_CHECK_WORK": "driver",
                "OUT": str(tmp_path),
            },
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )
    finally:
        node.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["gpu"]["name"] == "NVIDIA L4" and found["probe"]["gpu"]["checkpoint"]
    rows = {row["name"]: row for row in found["rows"]}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    cycle = "lock, checkpoint, restore, unlock: "
    assert verdicts == {
        "probe": "passed",
        "plain copy, device to host": "passed",
        "plain write to the disk": "passed",
        f"{cycle}0.001 GB": "passed",
        f"{cycle}0.2 GB": "not possible here",
        "training: save, kill, restore": "passed",
        "park, unpark": "passed",
        "Jupyter: save in the middle of a cell, kill, restore": "passed",
    }, done.stdout
    assert rows[f"{cycle}0.2 GB"]["note"] == "the GPU has 0.1 GB free"
    assert rows["park, unpark"]["speed"] > 0
    lines = done.stdout.splitlines()
    assert len(lines) == len(rows) + 2 and all(line.startswith("|") for line in lines)


def test_the_training_is_the_same_each_time() -> None:
    """With PyTorch, which has no GPU here."""
    pytest.importorskip("torch")
    first, second = TorchWork("cpu"), None
    steps = [first.step() for _ in range(3)]
    second = TorchWork("cpu")
    assert [second.step() for _ in range(3)] == steps
    assert len(set(steps)) == 3
    second.hold(1 << 16)
    before = second.held()
    assert second.held() == before
    second.hold(1 << 16)
    assert second.held() != before
