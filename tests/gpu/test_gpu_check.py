"""The check of a real GPU, on a simulated one at tiny sizes, so that it works when it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.gpu.work import TorchWork
from tests.native.gpu_node import GpuNode
from tests.simgpu.simgpu import gpu

RUN = Path(__file__).with_name("run.sh")


def check(folder: Path, *options: str, faults: Sequence[str] = ()) -> CompletedProcess[str]:
    """What the script says on a node with a simulated GPU; its rows are in `folder`, too."""
    node = GpuNode(folder / "node", gpu(0, name="NVIDIA L4", persistence=True), cuda=13040)
    node.machine.faults(*faults)
    try:
        return subprocess.run(
            [*node.enter, RUN, *options],
            env={
                **os.environ,
                "GPU_CHECK_PYTHON": sys.executable,
                "GPU_CHECK_WORK": "driver",
                "OUT": str(folder),
            },
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )
    finally:
        node.stop()


@pytest.mark.root
def test_every_row_passes_on_the_simulated_driver(tmp_path: Path) -> None:
    done = check(tmp_path, "--sizes", "0.001,0.2")
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
        "straight into files: save, kill, restore": "passed",
        "Jupyter: save in the middle of a cell, kill, restore": "passed",
    }, done.stdout
    assert rows[f"{cycle}0.2 GB"]["note"] == "the GPU has 0.1 GB free"
    assert rows["park, unpark"]["speed"] > 0
    lines = done.stdout.splitlines()
    assert len(lines) == len(rows) + 2 and all(line.startswith("|") for line in lines)


@pytest.mark.root
def test_a_driver_that_hangs_takes_no_row_away(tmp_path: Path) -> None:
    began = time.monotonic()
    hangs = ["cuCheckpointProcessCheckpoint * hang"]
    done = check(tmp_path, "--sizes", "0.001", "--seconds", "12", faults=hangs)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu-check.json").read_text())["rows"]
    assert [row["verdict"] for row in rows] == [
        *["passed"] * 3,
        "failed",
        *["not possible here"] * 4,
    ], done.stdout
    assert (rows[3]["note"], rows[4]["note"]) == ("it took too long", "no time was left")
    assert len(done.stdout.splitlines()) == len(rows) + 2
    assert time.monotonic() - began < 120


def test_the_training_is_the_same_each_time() -> None:
    """With PyTorch, which has no GPU here."""
    pytest.importorskip("torch")
    first, second = TorchWork("cpu"), None
    steps = [first.step() for _ in range(3)]
    second = TorchWork("cpu")
    assert [second.step() for _ in range(3)] == steps
    assert len(set(steps)) == 3
    # What is held beside it, and how much, makes no difference.
    third = TorchWork("cpu")
    third.hold(1 << 16)
    assert [third.step() for _ in range(3)] == steps
    second.hold(1 << 16)
    before = second.held()
    assert second.held() == before
    second.hold(1 << 16)
    assert second.held() != before
