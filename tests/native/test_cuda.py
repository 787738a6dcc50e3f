"""Kernels whose memory is on a GPU: saved, killed, restored, with CRIU and a simulated driver."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.native.driver import Event, Kernel, empty, wait_until
from tests.native.gpu_node import HOLDER, PAIR, GpuNode, held, intact, reached
from tests.simgpu.simgpu import gpu

pytestmark = pytest.mark.root

Nodes = Callable[..., GpuNode]
Kernels = Callable[..., Kernel]
Pair = tuple[GpuNode, Kernel, list[str]]


def saved(kernel: Kernel, *extra: str) -> Event:
    done = kernel.save(*extra)
    record: Event = done["gpu"]
    return record


def restored(kernel: Kernel, *extra: str) -> Event:
    kernel.kill()
    return kernel.restore(*extra).expect("restored")


def test_a_kernel_with_device_memory_is_saved_runs_on_and_is_restored(
    node: Nodes, program: Kernels
) -> None:
    here = node()
    one = program(here)
    sums = held(one)
    capture = one.dump()
    record = capture.finish()["gpu"]
    assert [entry["pid"] for entry in record["processes"]] == [one.pid]
    assert record["processes"][0]["memory_bytes"] >= 1 << 20
    assert record["gpus"][0]["uuid"] == here.machine.gpus[0]["uuid"]
    assert record["gpus"][0]["memory_bytes"] == 64 << 20
    assert record["gpus"][0]["released_bytes"] >= 1 << 20
    assert (record["driver"], record["cuda_version"]) == ("580.95.05", 13000)
    assert record["problem"] is None
    steps = [event["step"] for event in capture.events if event["event"] == "gpu"]
    assert [steps.index(step) for step in ("lock", "checkpoint", "restore", "unlock")] == sorted(
        steps.index(step) for step in ("lock", "checkpoint", "restore", "unlock")
    )
    intact(one, sums)
    one.kill()
    wait_until(lambda: here.machine.used() == 0, "device memory is free")
    assert one.restore().expect("restored")["gpu_s"] > 0
    intact(one, sums)
    assert here.machine.used() > 0


def test_the_main_thread_is_held_until_the_gpu_is_back(node: Nodes, program: Kernels) -> None:
    here = node()
    one = program(here)
    sums = held(one)
    saved(one)
    one.kill()
    here.machine.faults("cuCheckpointProcessRestore * delay 300")
    capture = one.restore("--hold", "--hold-timeout", "30")
    capture.expect("held")
    assert here.machine.used() > 0
    seen = len(one.lines())
    capture.send("release")
    intact(one, sums)
    assert all(line.startswith("sum") for line in one.lines()[seen:])


def test_a_restore_maps_gpus(node: Nodes, program: Kernels) -> None:
    one = program(node(gpu(0), gpu(1)), ORDINAL="1")
    sums = held(one)
    saved(one)
    there = node(gpu(2), gpu(3))
    there.take(one)
    old, new = [gpu(number)["uuid"] for number in (0, 1)], [gpu(n)["uuid"] for n in (2, 3)]
    restored(one, "--gpu-map", f"{old[0]}={new[1]}", "--gpu-map", f"{old[1]}={new[0]}")
    intact(one, sums, f"on {new[0]}")


def test_all_processes_of_a_tree_are_saved(node: Nodes, program: Kernels) -> None:
    here = node(gpu(0, persistence=False))  # a restore starts the driver by itself
    one = program(here, PAIR)
    sums = held(one, 2)
    record = saved(one)
    assert len(record["processes"]) == 2
    assert record["processes"][0]["pid"] == one.pid  # parents first
    intact(one, sums)
    restored(one)
    intact(one, sums)


def test_a_gpu_kernel_in_a_pid_namespace_is_saved_again(node: Nodes, program: Kernels) -> None:
    here = node()
    one = program(here)
    sums = held(one)
    saved(one)
    pid = restored(one, "--pid-namespace", "always")["pid"]
    intact(one, sums)
    empty(one.images)
    assert one.dump(pid=pid).finish()["gpu"]["problem"] is None
    intact(one, sums)
    for what in ("park", "unpark"):
        capture = here.capture(what, "--pid", str(pid))
        assert capture.finish()["event"] == "done"
        capture.close()
        assert (here.machine.used() == 0) == (what == "park")
    intact(one, sums)


def test_without_cuda_state_no_gpu_is_touched(node: Nodes, program: Kernels) -> None:
    here = node()
    here.machine.faults("cuInit * error 999")
    loaded = program(here, "Driver()\nprint('holds', 'nothing', flush=True)\ntime.sleep(100)")
    held(loaded)
    assert loaded.save()["gpu"] is None
    assert restored(loaded)["gpu_s"] is None


def test_a_saved_kernel_is_ended_without_its_gpu(node: Nodes, program: Kernels) -> None:
    here = node()
    one = program(here)
    sums = held(one)
    assert one.dump("--leave", "stopped").finish()["reason"] == "usage"
    intact(one, sums)
    saved(one, "--leave", "killed")
    one.supervisor.wait()
    wait_until(lambda: here.machine.used() == 0, "device memory is free")
    one.restore().expect("restored")
    intact(one, sums)


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("cuInit * error 3", "gpu_unsupported", "does not start"),
        ("cuCheckpointProcessLock 2 error 801", "gpu_unsupported", "NOT_SUPPORTED"),
        ("cuCheckpointProcessCheckpoint 2 error 999", "gpu_failed", "CUDA_ERROR_UNKNOWN"),
        ("cuCheckpointProcessLock * error 600", "gpu_busy", "did not finish its work"),
        ("cuCheckpointProcessCheckpoint 2 hang", "gpu_failed", "did not answer"),
        ("cuCheckpointProcessCheckpoint 2 kill", "gpu_failed", "did not answer"),
    ],
)
def test_a_fault_undoes_the_save(pair: Pair, fault: str, reason: str, words: str) -> None:
    here, one, sums = pair
    here.machine.faults(fault)
    error = one.dump("--gpu-timeout", "0.5", "--timeout", "1.5").finish()
    assert (error["event"], error["reason"]) == ("error", reason), error
    assert re.search(words, error["message"])
    here.machine.faults()
    intact(one, sums)


def test_long_work_on_the_gpu_is_waited_for_and_then_left_alone(
    node: Nodes, program: Kernels
) -> None:
    spin = "print('spins', flush=True); gpu.launch('spin', ms=2500)\nwhile True:"
    one = program(node(), HOLDER.replace("while True:", spin))
    sums = held(one)
    one.wait_line("spins")
    capture = one.dump("--gpu-timeout", "0.2")
    error = capture.finish()
    assert error["reason"] == "gpu_busy", error
    assert any(event.get("step") == "lock" for event in capture.events)
    saved(one, "--gpu-timeout", "60")
    intact(one, sums)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_a_save_that_is_given_up_unlocks_the_gpu(pair: Pair, reason: str) -> None:
    here, one, sums = pair
    here.machine.faults("cuCheckpointProcessLock * error 600")
    capture = one.dump("--gpu-timeout", "60", "--timeout", "1" if reason == "timeout" else "60")
    capture.expect("gpu")
    if reason == "cancelled":
        capture.send("cancel")
    assert capture.finish()["reason"] == reason
    here.machine.faults()
    intact(one, sums)


def test_a_save_that_is_cancelled_while_memory_is_copied_goes_no_further(pair: Pair) -> None:
    here, one, sums = pair
    here.machine.faults("cuCheckpointProcessCheckpoint * delay 500")
    capture = one.dump()
    reached(capture, "checkpoint")
    capture.send("cancel")
    assert capture.finish()["reason"] == "cancelled"
    assert not any(event["event"] == "dumping" for event in capture.events)
    here.machine.faults()
    intact(one, sums)


def test_a_dump_that_criu_fails_gives_the_gpu_back(
    node: Nodes, program: Kernels, tmp_path: Path
) -> None:
    path = tmp_path / "outside.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        connect = f"import socket\ns = socket.socket(1); s.connect({str(path)!r})\n"
        one = program(node(), connect + HOLDER)
        sums = held(one)
        peer, _ = server.accept()
        with peer:
            assert one.dump().finish()["reason"] == "criu_failed"
            intact(one, sums)


def test_a_killed_save_gives_the_gpu_back(pair: Pair) -> None:
    here, one, sums = pair
    here.machine.faults("cuCheckpointProcessCheckpoint * delay 500")
    capture = one.dump()
    reached(capture, "checkpoint")
    capture.process.kill()
    capture.wait()
    here.machine.faults()
    intact(one, sums)


def test_faults_end_restores_and_the_state_stays(node: Nodes, program: Kernels) -> None:
    here = node()
    one = program(here)
    sums = held(one)
    saved(one)
    one.kill()
    for fault, reason in (
        ("cuInit * error 100", "gpu_unsupported"),
        ("cuCheckpointProcessRestore * error 2", "gpu_full"),
        ("cuCheckpointProcessRestore * hang", "timeout"),
        ("cuCheckpointProcessRestore * kill", "gpu_failed"),
        ("cuCheckpointProcessUnlock * error 999", "gpu_stuck"),
    ):
        here.machine.faults(fault)
        error = one.restore("--gpu-timeout", "0.3", "--timeout", "2.5").finish()
        assert (error["event"], error["reason"]) == ("error", reason), error
        wait_until(lambda: here.machine.used() == 0, f"device memory is free after {fault}")
    here.machine.faults()
    one.restore().expect("restored")
    intact(one, sums)


def test_a_gpu_that_does_not_come_back_is_told_and_the_state_is_whole(
    node: Nodes, program: Kernels
) -> None:
    here = node()
    one = program(here)
    sums = held(one)
    here.machine.faults("cuCheckpointProcessRestore * error 2")
    record = saved(one, "--gpu-timeout", "0.3")
    assert record["problem"]["reason"] == "gpu_full"
    assert "OUT_OF_MEMORY" in record["problem"]["message"]
    here.machine.faults()
    restored(one)
    intact(one, sums)


@pytest.mark.parametrize(
    ("settings", "source", "words"),
    [
        ({"mps": True}, "", "through MPS"),
        ({"mig": True}, "", "in MIG mode"),
        ({}, "gpu.driver.cuMemAllocManaged(ctypes.byref(ctypes.c_uint64()), 9, 1)", "unified"),
    ],
)
def test_what_the_driver_cannot_save_is_said(
    node: Nodes, program: Kernels, settings: dict[str, Any], source: str, words: str
) -> None:
    one = program(node(gpu(0, **settings)), HOLDER.replace("while True", f"{source}\nwhile True"))
    sums = held(one)
    capture = one.dump()
    error = capture.finish()
    assert error["reason"] == "gpu_unsupported", error
    assert words in error["message"]
    touched = any(event.get("step") == "lock" for event in capture.events)
    assert touched == (not settings)  # unified memory is seen by the driver alone
    intact(one, sums)


def test_a_child_that_was_forked_after_cuda_began_is_saved_too(
    node: Nodes, program: Kernels
) -> None:
    one = program(node(), HOLDER.replace("while True", "os.fork() or time.sleep(1000)\nwhile True"))
    sums = held(one)
    assert len(saved(one)["processes"]) == 1
    restored(one)
    intact(one, sums)


def test_an_old_driver_saves_only_what_does_not_use_it(node: Nodes, program: Kernels) -> None:
    here = node(variant="r550", cuda=12040)
    one = program(here)
    sums = held(one)
    error = one.dump().finish()
    assert error["reason"] == "gpu_unsupported", error
    assert "too old" in error["message"]
    intact(one, sums)
    loaded = program(here, "Driver()\nprint('holds', 'nothing', flush=True)\ntime.sleep(100)")
    held(loaded)
    assert loaded.save()["gpu"] is None


def test_room_on_the_gpu_is_waited_for(node: Nodes, program: Kernels, tmp_path: Path) -> None:
    here = node(gpu(0, memory=4 << 20))
    local = tmp_path / "local"
    local.mkdir()
    keep = f"keep = open({str(local / 'file')!r}, 'w')\n"
    one = program(here, keep + HOLDER)
    sums = held(one)
    capture = one.dump("--window-dir", str(local), "--gpu-timeout", "60")
    capture.expect("window")
    other = program(
        here, "gpu = Gpu(); gpu.allocate(4 << 20); print('full', flush=True); time.sleep(100)"
    )
    other.wait_line("full")
    capture.send("resume")
    capture.expect("gpu")
    other.kill()
    assert capture.finish()["gpu"]["problem"] is None
    intact(one, sums)


def test_a_node_with_an_old_driver_says_so(node: Nodes, program: Kernels) -> None:
    here = node(variant="r550", cuda=12040)
    capture = here.capture("probe")
    probe = capture.finish()
    capture.close()
    assert probe["gpu"] == {
        "driver": None,
        "cuda_version": 12040,
        "checkpoint": False,
        "gpu_map": False,
        "custom_storage": False,
    }
    assert [note["reason"] for note in probe["notes"]].count("gpu_unsupported") == 1
    assert probe["can_capture"]


def test_probe_tells_what_the_driver_can(node: Nodes) -> None:
    capture = node(cuda=13040).capture("probe")
    probe = capture.finish()
    capture.close()
    assert probe["gpu"] == {
        "driver": "580.95.05",
        "cuda_version": 13040,
        "checkpoint": True,
        "gpu_map": True,
        "custom_storage": True,
    }
    assert probe["notes"] == []


def test_what_does_not_fit_into_the_host_is_not_touched(node: Nodes, program: Kernels) -> None:
    here = node(gpu(0, memory=1 << 50))
    # Never touched, so that it takes no memory here.
    much = "[gpu.allocate(os.sysconf('SC_PHYS_PAGES') * 2048) for _ in range(4)]"
    one = program(here, HOLDER.replace("while True", f"{much}\nwhile True"))
    sums = held(one)
    capture = one.dump()
    error = capture.finish()
    assert error["reason"] == "no_memory", error
    assert not any(event.get("step") == "lock" for event in capture.events)
    intact(one, sums)
