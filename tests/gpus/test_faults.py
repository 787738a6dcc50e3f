"""Errors that GPUs report are heard while kernels use them, and are the reason for deaths."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from jupyter_gpu_ckpt.gpus.faults import GpuFaults
from jupyter_gpu_ckpt.gpus.inventory import CudaGpu, CudaProcess, GpuUse
from jupyter_gpu_ckpt.keeper import Keeper
from jupyter_gpu_ckpt.lost_gpus import LostGpus
from tests.harness.client import wait_for
from tests.harness.gpus import here
from tests.simgpu.simgpu import SimulatedMachine, gpu

UUIDS = [gpu(number)["uuid"] for number in range(2)]
#: A code that no test looks for.
LAST = 998


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedMachine]:
    """A machine on which this process is."""
    with here(tmp_path, monkeypatch, gpu(0), gpu(1)) as one:
        yield one


@pytest.fixture
def lost() -> list[str]:
    """The kernels whose GPU is lost, as they are told."""
    return []


@pytest.fixture
def faults(lost: list[str]) -> Iterator[GpuFaults]:
    one = GpuFaults(logging.getLogger("test"), lost.append)
    yield one
    one.close()
    wait_for("nobody listens", lambda: not listeners(), 30)


def listeners() -> list[psutil.Process]:
    """Programs of this process that listen."""
    found = []
    for child in psutil.Process().children():
        try:
            if any(part.endswith("xids.py") for part in child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]


def use(first: int | None = 1 << 20, second: int | None = 0) -> GpuUse:
    sizes = zip(UUIDS, (first, second), strict=True)
    gpus = [CudaGpu(uuid, "NVIDIA L4", 24 << 30, size) for uuid, size in sizes]
    return GpuUse([CudaProcess(7, memory_bytes=1 << 20)], gpus)


def heard(machine: SimulatedMachine, faults: GpuFaults, code: int, number: int, kernel: str) -> str:
    """Let a GPU report errors until one is heard: what came before the program listened is not."""

    def told() -> str | None:
        machine.xid(code, gpu=number)
        reason = faults.reason(kernel)
        return reason.words if reason is not None else None

    return str(wait_for(f"Xid {code}", told, 30))


def all_heard(machine: SimulatedMachine, log: pytest.LogCaptureFixture, number: int) -> None:
    """Wait until nothing that a GPU has reported is still on its way."""
    log.clear()
    machine.xid(LAST, gpu=number)
    wait_for("the last of it", lambda: f": Xid {LAST}" in log.text, 30)


def test_an_error_is_the_reason_for_those_that_use_the_gpu(
    machine: SimulatedMachine, faults: GpuFaults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.saved("one", use(), time.monotonic())
    faults.saved("other", use(0, 1 << 20), time.monotonic())
    assert heard(machine, faults, 31, 0, "one") == (
        "The kernel's GPU (NVIDIA L4) had reported an error "
        "(Xid 31: its program used memory there that it has no right to)"
    )
    assert faults.reason("other") is None and faults.reason("unknown") is None
    assert "(Xid 999)" in heard(machine, faults, 999, 1, "other")
    assert len(listeners()) == 1
    all_heard(machine, caplog, 1)
    # Restored since, onto the other GPU: what happened before is no reason any more.
    assert faults.restored("one", use(), {UUIDS[0]: UUIDS[1]}) == []
    assert faults.reason("one") is None
    assert "(Xid 48: " in heard(machine, faults, 48, 1, "one")


def test_a_lost_gpu_is_the_first_reason_and_told_at_once(
    machine: SimulatedMachine, faults: GpuFaults, lost: list[str]
) -> None:
    began = time.monotonic()
    faults.saved("one", use(None, None), began)
    faults.saved("other", use(0, 1 << 20), began)
    heard(machine, faults, 45, 0, "one")
    assert lost == []
    machine.xid(79, gpu=0, lost=True)
    words = "The kernel's GPU (NVIDIA L4) fell off the bus (Xid 79)"
    wait_for("it is told", lambda: lost == ["one"], 30)
    reason = faults.reason("one")
    assert reason is not None and (reason.words, reason.lost) == (words, UUIDS[0])
    # Of one whose first save was under way it is told when that is done.
    faults.saved("late", use(), began)
    assert lost[1:] == ["late"]
    faults.saved("new", use(), time.monotonic())
    assert len(lost) == 2


def test_a_driver_that_says_it_of_all_gpus_at_once(
    machine: SimulatedMachine, faults: GpuFaults
) -> None:
    faults.saved("one", use(), time.monotonic())
    heard(machine, faults, 45, 0, "one")
    machine.xid(31, gpu=0, lost=True)
    machine.faults("nvmlEventSetWait * error 15")
    machine.xid(31, gpu=1)  # so that the one that waits asks again
    wait_for("it is lost", lambda: (reason := faults.reason("one")) and reason.lost, 30)


def test_a_gpu_that_falls_off_during_a_save_is_told_with_the_restore(
    machine: SimulatedMachine, faults: GpuFaults
) -> None:
    """Also with the first save, which is heard of when another kernel is listened for."""
    faults.saved("other", use(0, 1 << 20), time.monotonic())
    heard(machine, faults, 48, 1, "other")
    faults.saved("again", use(), time.monotonic())
    began = time.monotonic()
    machine.xid(79, gpu=0, lost=True)
    wait_for("it is lost", lambda: (reason := faults.reason("again")) and reason.lost, 30)
    words = "The kernel's GPU (NVIDIA L4) fell off the bus (Xid 79)"
    elsewhere = [f"{words}: restored on another GPU."]
    for kernel, pairs, told in (
        ("again", {UUIDS[0]: UUIDS[1]}, elsewhere),
        ("first", {UUIDS[0]: UUIDS[1]}, elsewhere),
        ("same", {}, [f"{words}."]),
    ):
        faults.saved(kernel, use(), began)
        assert faults.restored(kernel, use(), pairs) == told
        assert faults.restored(kernel, use()) == [], "that process has not seen it"
    faults.saved("none", use(), began)
    assert faults.restored("none", None) == [f"{words}."], "a state from before it used a GPU"


@pytest.mark.parametrize("state_id", ["20200101T000000Z-00000000", None])
async def test_what_is_heard_late_is_not_said_of_a_process_that_came_since(
    machine: SimulatedMachine, caplog: pytest.LogCaptureFixture, state_id: str | None
) -> None:
    """While the event loop is busy, a kernel is restored on another GPU, or ends."""
    announced: list[Any] = []
    tasks: list[asyncio.Task[None]] = []

    async def paths() -> dict[str, str]:
        return {"one": "book.ipynb"}

    def in_background(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(work))

    async def all_told() -> list[Any]:
        for _ in range(3):  # what was asked of the loop, and what that began
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return announced

    policy = SimpleNamespace(latest=state_id)
    kernel = SimpleNamespace(pid=1, gpu_lost=None, policy=policy)
    keeper = SimpleNamespace(
        tracker={"one": kernel},
        sessions=SimpleNamespace(paths=paths),
        announce=SimpleNamespace(gpu_lost=lambda *said: announced.append(said)),
        in_background=in_background,
    )
    lost_gpus = LostGpus(cast(Keeper, keeper))
    faults = GpuFaults(logging.getLogger("test"), lost_gpus.heard)
    keeper.ability = SimpleNamespace(faults=faults)
    lost_gpus.start()
    try:
        faults.saved("one", use(), time.monotonic())
        heard(machine, faults, 79, 0, "one")
        all_heard(machine, caplog, 0)
        assert faults.restored("one", use(), {UUIDS[0]: UUIDS[1]})
        assert await all_told() == [] and kernel.gpu_lost is None
        # The GPU that it left reports again.
        heard(machine, faults, 31, 1, "one")
        machine.xid(79, gpu=0)
        all_heard(machine, caplog, 0)
        assert await all_told() == [] and kernel.gpu_lost is None
        # And then the one that it is on now.
        machine.xid(79, gpu=1)
        all_heard(machine, caplog, 1)
        todo = "Restart it." if state_id is None else "Restore its last saved state."
        words = f"The kernel's GPU (NVIDIA L4) fell off the bus (Xid 79). {todo}"
        await all_told()
        assert announced == [("one", "book.ipynb", state_id, words)] and kernel.gpu_lost == words
        kernel.gpu_lost = None
        machine.xid(79, gpu=1)
        all_heard(machine, caplog, 1)
        faults.gone("one")
        await all_told()
        assert len(announced) == 1 and kernel.gpu_lost is None
    finally:
        faults.close()
        wait_for("nobody listens", lambda: not listeners(), 30)


def test_a_program_that_is_stuck_is_not_joined_by_another(
    machine: SimulatedMachine, faults: GpuFaults
) -> None:
    faults.saved("one", use(), time.monotonic())
    (stuck,) = wait_for("it listens", listeners, 30)
    threads = Path(f"/proc/{stuck.pid}/task").glob
    stuck.suspend()
    try:
        wait_for(
            "it is stuck",
            lambda: all("\tT (stopped)" in one.read_text() for one in threads("*/status")),
            30,
        )
        for _ in range(3):
            faults.gone("one")
            faults.saved("one", use(), time.monotonic())
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert listeners() == [stuck]
    finally:
        stuck.resume()
    heard(machine, faults, 45, 0, "one")
    wait_for("another listens", lambda: len(found := listeners()) == 1 and found != [stuck], 30)


def test_nothing_listens_where_no_kernel_uses_a_gpu(
    machine: SimulatedMachine, faults: GpuFaults
) -> None:
    faults.saved("one", None, time.monotonic())
    faults.saved("two", GpuUse(), time.monotonic())
    assert listeners() == []
    faults.saved("one", use(), time.monotonic())
    faults.saved("two", use(), time.monotonic())
    wait_for("it listens", listeners, 30)
    faults.gone("one")
    assert len(listeners()) == 1
    faults.saved("two", None, time.monotonic())
    wait_for("it ends", lambda: not listeners(), 30)


def test_a_driver_that_hangs_holds_nobody_up(machine: SimulatedMachine, faults: GpuFaults) -> None:
    machine.faults("nvmlInit * hang", "nvmlInitWithFlags * hang")
    faults.saved("one", use(), time.monotonic())
    wait_for("it listens", listeners, 30)
    assert faults.reason("one") is None
    faults.gone("one")
    wait_for("it ends", lambda: not listeners(), 30)
