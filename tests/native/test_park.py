"""GPU memory moves to host memory while the process stays, and back: with a simulated driver."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.native.driver import Capture, Event, Kernel, empty, state, wait_until
from tests.native.gpu_node import PAIR, GpuNode, held, intact, reached
from tests.simgpu.simgpu import gpu

pytestmark = pytest.mark.root

Nodes = Callable[..., GpuNode]
Kernels = Callable[..., Kernel]
Pair = tuple[GpuNode, Kernel, list[str]]


@pytest.fixture
def move(request: pytest.FixtureRequest) -> Callable[..., Capture]:
    """Start ``park`` or ``unpark`` for a kernel on a node; ended after the test."""

    def start(here: GpuNode, what: str, one: Kernel, *extra: str) -> Capture:
        capture = here.capture(what, "--pid", str(one.pid), *extra)
        request.addfinalizer(capture.close)
        return capture

    return start


Move = Callable[..., Capture]


def done(capture: Capture) -> Any:
    event = capture.finish()
    assert event["event"] == "done", event
    return event["gpu"]


def failed(capture: Capture) -> Event:
    event = capture.finish()
    assert event["event"] == "error", event
    return event


def give_up(capture: Capture, how: str) -> None:
    """Give it up by ``cancel``, ``hang up`` or the name of a signal."""
    if how == "cancel":
        capture.send("cancel")
    elif how == "hang up":
        capture.hang_up()
    else:
        capture.process.send_signal(signal.Signals[how])


def stands_still(here: GpuNode, one: Kernel) -> None:
    """Assert that the GPU is free, and that the kernel lives and waits for it."""
    assert here.machine.used() == 0
    count = len(one.lines())
    time.sleep(0.3)  # 15 lines for each process that runs
    assert len(one.lines()) <= count + 2
    assert state(one.pid) == "S"


def test_a_parked_kernel_frees_its_gpu_and_goes_on_when_it_is_unparked(
    pair: Pair, move: Move
) -> None:
    here, one, sums = pair
    record = done(move(here, "park", one))
    assert [entry["parked"] for entry in record["processes"]] == [False, False]
    assert record["gpus"][0]["released_bytes"] >= 2 << 20
    stands_still(here, one)
    assert done(move(here, "park", one))["processes"][0]["parked"]  # it stays as it is
    stands_still(here, one)
    record = done(move(here, "unpark", one))
    assert [entry["parked"] for entry in record["processes"]] == [True, True]
    intact(one, sums)
    assert here.machine.used() > 0
    assert not done(move(here, "unpark", one))["processes"][0]["parked"]
    intact(one, sums)


def test_a_parked_kernel_comes_back_on_another_gpu(
    node: Nodes, program: Kernels, move: Move
) -> None:
    here = node(gpu(0), gpu(1))
    one = program(here)
    sums = held(one)
    done(move(here, "park", one))
    first, second = (gpu(number)["uuid"] for number in (0, 1))
    pairs = [f"--gpu-map={first}={second}", f"--gpu-map={second}={first}"]
    done(move(here, "unpark", one, *pairs))
    intact(one, sums)
    assert here.machine.used(0) == 0
    assert here.machine.used(1) > 0


def test_a_parked_kernel_is_saved_as_it_is_and_comes_back_with_its_gpu(
    node: Nodes, program: Kernels, move: Move
) -> None:
    here = node()
    one = program(here)
    sums = held(one)
    done(move(here, "park", one))
    # What nobody says was parked may as well have lost it.
    error = failed(one.dump())
    assert error["reason"] == "gpu_failed" and "may be lost" in error["message"], error
    stands_still(here, one)
    empty(one.images)
    record = one.save("--parked")["gpu"]
    assert record["processes"][0]["parked"]
    stands_still(here, one)
    one.kill()
    one.restore().expect("restored")
    intact(one, sums)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_process_that_begins_with_cuda_while_others_are_halted_is_parked_too(
    node: Nodes, program: Kernels, move: Move, tmp_path: Path, loaded: bool
) -> None:
    gate = tmp_path / "gate"
    late = f"""
import sys
if sys.argv[0] == "-c":
    {"Driver()" if loaded else "pass"}
    print("waits", flush=True)
    while not os.path.exists({str(gate)!r}):
        time.sleep(0.01)
gpu = Gpu()
"""
    here = node()
    one = program(here, PAIR.replace("gpu = Gpu()\n", late))
    one.wait_line("waits")
    held(one)
    here.machine.faults("cuCheckpointProcessLock * error 600")
    capture = move(here, "park", one, "--gpu-timeout", "60")
    reached(capture, "lock")
    gate.touch()
    sums = held(one, 2)
    here.machine.faults()
    assert len(done(capture)["processes"]) == 2
    stands_still(here, one)
    done(move(here, "unpark", one))
    intact(one, sums)


@pytest.mark.parametrize("what", ["park", "unpark"])
def test_all_processes_together_have_one_deadline(pair: Pair, move: Move, what: str) -> None:
    here, one, sums = pair
    if what == "unpark":
        done(move(here, "park", one))
    function = "Checkpoint" if what == "park" else "Restore"
    here.machine.faults(f"cuCheckpointProcess{function} * delay 2500")
    error = failed(move(here, what, one, "--timeout", "2"))  # the second is not begun with
    assert error["reason"] == "timeout", error
    here.machine.faults()
    if what == "unpark":
        stands_still(here, one)
        done(move(here, "unpark", one))
    intact(one, sums)


def test_what_has_no_gpu_is_not_parked(node: Nodes, program: Kernels, move: Move) -> None:
    here = node()
    one = program(here, "print('holds', 'nothing', flush=True)\ntime.sleep(100)")
    held(one)
    assert done(move(here, "park", one)) is None
    assert done(move(here, "unpark", one)) is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cuCheckpointProcessLock * error 600", "gpu_busy"),
        ("cuCheckpointProcessCheckpoint 2 error 999", "gpu_failed"),
        ("cuCheckpointProcessCheckpoint 2 kill", "gpu_failed"),
    ],
)
def test_a_park_that_fails_leaves_the_kernel_running(
    pair: Pair, move: Move, fault: str, reason: str
) -> None:
    here, one, sums = pair
    here.machine.faults(fault)
    assert failed(move(here, "park", one, "--gpu-timeout", "0.3"))["reason"] == reason
    here.machine.faults()
    intact(one, sums)


@pytest.mark.parametrize("how", ["cancel", "hang up", "SIGTERM", "SIGKILL", "late"])
def test_a_park_that_is_given_up_leaves_the_kernel_running(
    pair: Pair, move: Move, how: str
) -> None:
    here, one, sums = pair
    here.machine.faults("cuCheckpointProcessLock * error 600")
    limit = "1" if how == "late" else "60"
    capture = move(here, "park", one, "--gpu-timeout", "60", "--timeout", limit)
    reached(capture, "lock")
    if how != "late":
        give_up(capture, how)
    if how == "SIGKILL":
        capture.wait()
    else:
        assert failed(capture)["reason"] == ("timeout" if how == "late" else "cancelled")
    here.machine.faults()
    intact(one, sums)


@pytest.mark.parametrize("how", ["cancel", "hang up", "SIGTERM"])
def test_a_park_that_is_given_up_while_the_last_memory_is_copied_is_undone(
    pair: Pair, move: Move, how: str
) -> None:
    here, one, sums = pair
    here.machine.faults("cuCheckpointProcessCheckpoint 2 delay 500")
    capture = move(here, "park", one)
    while reached(capture, "checkpoint")["pid"] == one.pid:
        pass
    give_up(capture, how)
    assert failed(capture)["reason"] == "cancelled"
    here.machine.faults()
    intact(one, sums)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cuCheckpointProcessRestore 2 error 999", "gpu_failed"),
        ("cuCheckpointProcessRestore * error 2", "gpu_full"),
    ],
)
def test_an_unpark_that_fails_leaves_the_kernel_parked(
    pair: Pair, move: Move, fault: str, reason: str
) -> None:
    here, one, sums = pair
    done(move(here, "park", one))
    here.machine.faults(fault)
    assert failed(move(here, "unpark", one, "--gpu-timeout", "0.3"))["reason"] == reason
    here.machine.faults()
    wait_until(lambda: here.machine.used() == 0, "the GPU is free again")
    stands_still(here, one)
    done(move(here, "unpark", one))
    intact(one, sums)


def test_room_for_a_parked_kernel_is_waited_for_and_nothing_is_tried_without(
    node: Nodes, program: Kernels, move: Move
) -> None:
    here = node(gpu(0, memory=4 << 20))
    one = program(here)
    sums = held(one)
    [entry] = done(move(here, "park", one))["gpus"]
    need = f"--gpu-need={entry['uuid']}={entry['released_bytes']}"
    other = program(here, "gpu = Gpu(); gpu.allocate(4 << 20); print('full')\ntime.sleep(100)")
    other.wait_line("full")
    assert failed(move(here, "unpark", one, need, "--gpu-timeout", "0.3"))["reason"] == "gpu_full"
    capture = move(here, "unpark", one, need, "--gpu-timeout", "60")
    reached(capture, "restore")
    other.kill()
    done(capture)
    intact(one, sums)
