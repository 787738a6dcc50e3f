"""What the driver says of this node, asked by a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capture.node import node_info
from jupyter_gpu_ckpt.gpus import asking
from jupyter_gpu_ckpt.gpus.asking import Asker
from jupyter_gpu_ckpt.gpus.checks import checks
from jupyter_gpu_ckpt.gpus.inventory import Inventory
from tests.harness.gpus import here
from tests.simgpu.simgpu import SimulatedMachine, gpu


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedMachine]:
    """A machine on which this process is."""
    gpus = [
        gpu(0, name="NVIDIA L4", memory=24 << 20, persistence=True),
        gpu(1, name="NVIDIA A100", memory=64 << 20, mig=True),
    ]
    with here(tmp_path, monkeypatch, *gpus, driver="580.95.05") as one:
        yield one


def test_gpus_of_the_node(machine: SimulatedMachine) -> None:
    found = Asker().inventory()
    assert (found.driver, found.cuda, found.broken, found.error) == ("580.95.05", 13000, [], None)
    first, second = found.gpus
    assert (first.index, first.name, first.uuid) == (0, "NVIDIA L4", machine.gpus[0]["uuid"])
    assert (first.memory, first.mig, first.persistence) == (24 << 20, False, True)
    assert (second.memory, second.mig, second.persistence) == (64 << 20, True, False)
    node = node_info(None, found)
    assert (node.driver, [one.name for one in node.gpus]) == (
        "580.95.05",
        ["NVIDIA L4", "NVIDIA A100"],
    )


def test_doctor_says_what_gpus_lack(machine: SimulatedMachine) -> None:
    source = "from jupyter_gpu_ckpt.cli import main; main()"
    command = [sys.executable, "-c", source, "doctor", "--local", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [
        (check["name"], check["status"], check["message"])
        for check in json.loads(done.stdout)["checks"]
        if "GPU" in check["name"] or "NVIDIA" in check["name"]
    ]
    uuids = [one["uuid"] for one in machine.gpus]
    assert [line[:2] for line in said] == [
        ("NVIDIA driver", "ok"),
        ("GPU 0", "ok"),
        ("GPU 1", "ok"),
        ("GPU 1", "warning"),
        ("GPU 1", "warning"),
    ], done.stderr
    assert said[0][2] == "Version 580.95.05, CUDA 13.0."
    assert said[1][2] == f"NVIDIA L4, {uuids[0]}: 0 MB of 25 MB in use."
    assert "MIG is on" in said[3][2] and "Persistence mode is off" in said[4][2]


def test_a_driver_that_is_too_old_is_said() -> None:
    (check,) = checks(Inventory("550.54.14", 12040))
    assert check.status == "warning" and "cannot give GPU memory" in check.message
    (check,) = checks(Inventory("570.1", 12080))
    assert check.status == "warning" and "same GPU only" in check.message


def test_a_lost_gpu_does_not_hide_the_others(machine: SimulatedMachine) -> None:
    machine.xid(79, gpu=0, lost=True)
    found = Asker().inventory()
    assert [one.name for one in found.gpus] == ["NVIDIA A100"]
    assert len(found.broken) == 1 and found.broken[0].startswith("GPU 0: ")


def test_a_driver_that_hangs_holds_nobody_up(machine: SimulatedMachine) -> None:
    machine.faults("nvmlInit * hang", "nvmlInitWithFlags * hang")
    asker = Asker(deadline=1.0)
    began = time.monotonic()
    found = asker.inventory()
    assert found.error == "The NVIDIA driver did not answer within 1 s." and found.gpus == []
    assert time.monotonic() - began < 30
    machine.faults()
    assert asker.inventory() is found  # believed for a while: nobody else waits for it
    assert [(one.name, one.status) for one in checks(found)] == [("NVIDIA driver", "warning")]


def test_an_answer_is_kept_for_as_long_as_the_caller_allows(machine: SimulatedMachine) -> None:
    asker = Asker()
    first = asker.inventory()
    assert asker.inventory(600.0) is first
    assert asker.inventory(0.0) is not first


def test_nothing_is_started_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    if asking.driver_present():
        pytest.fail("these tests are for machines without NVIDIA's driver")

    def start(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    assert Asker().inventory() == Inventory()
    assert checks(Inventory()) == []


def test_the_server_imports_no_library_of_nvidia() -> None:
    source = """
import sys, warnings
warnings.simplefilter("error", FutureWarning)
import jupyter_gpu_ckpt.app, jupyter_gpu_ckpt.ability
from jupyter_gpu_ckpt.gpus.asking import inventory
inventory()
print([name for name in sys.modules if name.startswith(("pynvml", "cuda", "nvidia"))])
print([line for line in open("/proc/self/maps") if "libnvidia" in line or "libcuda" in line])
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=dict(os.environ),
    )
    assert done.stdout == "[]\n[]\n"
