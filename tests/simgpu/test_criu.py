"""The simulated driver under real CRIU: device memory is saved only if the GPU is dealt with."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.driver import wait_until
from tests.simgpu.conftest import Outside, Program
from tests.simgpu.simgpu import SimulatedMachine, gpu
from tests.simgpu.test_driver import HOLDER, holder

Machines = Callable[..., SimulatedMachine]
Programs = Callable[..., Program]
Outsides = Callable[..., Outside]

CRIU = "/opt/jupyter-gpu-ckpt/criu/criu"


class Images:
    """A folder of images, and CRIU with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)

    def criu(self, *arguments: str) -> str:
        """The lines of CRIU's log that tell of errors; empty when it did its work."""
        command = [CRIU, *arguments, "-D", str(self.folder), "-o", "log", "--ext-unix-sk"]
        done = subprocess.run(command, timeout=60, check=False, capture_output=True)
        if done.returncode == 0:
            return ""
        log = (self.folder / "log").read_text(errors="replace")
        return "\n".join(line for line in log.splitlines() if "Error" in line)

    def dump(self, program: Program) -> str:
        return self.criu("dump", "-t", str(program.pid))

    def restore(self, program: Program) -> None:
        assert program.process.wait(30) == -signal.SIGKILL
        pids = [path.name[5:-4] for path in self.folder.glob("core-*.img")]
        gone = [Path("/proc", pid) for pid in pids]
        wait_until(lambda: not any(path.exists() for path in gone), "they are reaped", 30)
        assert self.criu("restore", "-d") == ""


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path / "images")


def test_a_process_that_uses_a_gpu_is_not_saved(
    machine: Machines, program: Programs, images: Images
) -> None:
    one, intact = holder(program, machine())
    assert "nvidiactl" in images.dump(one)
    one.wait_line(intact, after=len(one.lines()))


def test_a_forked_child_keeps_device_files_where_the_machine_is_so(
    machine: Machines, program: Programs, outside: Outsides, images: Images
) -> None:
    here = machine(children_keep_devices=True)
    one = program(here, "if os.fork() == 0: time.sleep(1000)\n" + HOLDER)
    one.wait_line("sum")
    other = outside(here)
    other.save(one.pid)
    assert here.used() == 0
    assert "nvidiactl" in images.dump(one)


def test_device_memory_comes_back_on_another_machine(
    machine: Machines, program: Programs, outside: Outsides, images: Images
) -> None:
    here, there = machine(gpu(0), gpu(1)), machine(gpu(2), gpu(3))
    one, intact = holder(program, here, CUDA_VISIBLE_DEVICES="1")
    outside(here).save(one.pid)
    assert images.dump(one) == ""
    here.stop()
    images.restore(one)
    try:
        other = outside(there)
        old = [each["uuid"] for each in here.gpus]
        new = [each["uuid"] for each in there.gpus]
        other.call("restore", one.pid, {old[0]: new[1], old[1]: new[0]})
        assert (there.pids(0), there.pids(1)) == ([one.pid], [])
        count = len(one.lines())
        other.call("unlock", one.pid)
        assert one.wait_line(intact, after=count).endswith(new[0])
        # And once more, from there.
        other.save(one.pid)
        assert there.used(0) == 0
        other.call("restore", one.pid)
        other.call("unlock", one.pid)
        one.wait_line(intact, after=len(one.lines()))
    finally:
        os.kill(one.pid, signal.SIGKILL)
    wait_until(lambda: there.used(0) == 0, "the memory of a dead process is free")


def test_a_tree_of_two_processes_on_two_gpus(
    machine: Machines, program: Programs, outside: Outsides, images: Images
) -> None:
    here = machine(gpu(0), gpu(1))
    source = """
def work(ordinal):
    own = Gpu(ordinal)
    data = own.upload(os.urandom(1 << 16))
    first = own.checksum(data, 1 << 16)
    say("pid", ordinal, os.getpid())
    while True:
        say("intact", ordinal, own.checksum(data, 1 << 16) == first, own.uuid)
        time.sleep(0.01)
work(1 if os.fork() == 0 else 0)  # the child is there before its parent has CUDA
"""
    one = program(here, source, prelude=Program.IMPORTS)
    pids = [int(one.wait_line(f"pid {i}").split()[2]) for i in (0, 1)]
    other = outside(here)
    for step in ("lock", "checkpoint"):
        for pid in pids:
            other.call(step, pid)
    assert (here.used(0), here.used(1)) == (0, 0)
    assert images.dump(one) == ""
    images.restore(one)
    try:
        a, b = (each["uuid"] for each in here.gpus)
        for step, arguments in (("restore", [{a: b, b: a}]), ("unlock", [])):
            for pid in pids:
                other.call(step, pid, *arguments)
        count = len(one.lines())
        for ordinal, uuid in enumerate((b, a)):
            one.wait_line(f"intact {ordinal} True {uuid}", after=count)
    finally:
        os.killpg(one.pid, signal.SIGKILL)


def test_a_call_that_waits_while_it_is_saved_goes_on_after_the_restore(
    machine: Machines, program: Programs, outside: Outsides, images: Images
) -> None:
    here = machine()
    source = """
data = gpu.upload(b"kept")
say("asking")
while not os.path.exists(os.environ["LOCKED"]): time.sleep(0.01)
say("got", gpu.read(data, 4))
time.sleep(1000)
"""
    locked = images.folder / "locked"
    one = program(here, source, LOCKED=str(locked))
    one.wait_line("asking")
    other = outside(here)
    other.save(one.pid)
    locked.touch()
    waits = Path(f"/proc/{one.pid}/wchan")
    wait_until(lambda: "futex" in waits.read_text(), "the call waits at the lock")
    assert images.dump(one) == ""
    images.restore(one)
    try:
        other.call("restore", one.pid)
        other.call("unlock", one.pid)
        one.wait_line("got b'kept'")
    finally:
        os.kill(one.pid, signal.SIGKILL)


@pytest.mark.root
def test_a_process_in_another_pid_namespace(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    here = machine()
    starter = """
import ctypes, subprocess, sys
assert ctypes.CDLL(None).unshare(0x20000000) == 0  # CLONE_NEWPID, for the children
child = subprocess.Popen([sys.executable, "-u", "-c", os.environ["SOURCE"]])
say("child", child.pid)
child.wait()
"""
    one = program(here, starter, SOURCE=Program.PRELUDE + "say('inner', os.getpid())\n" + HOLDER)
    child = int(one.wait_line("child").split()[1])
    assert one.wait_line("inner") == "inner 1"
    intact = "sum " + one.wait_line("holds").split()[1]
    other = outside(here)
    thread = other.call("restore_thread", child)
    assert Path(f"/proc/{child}/task/{thread}/comm").read_text() == "cuda-EvtHandlr\n"
    other.save(child)
    count = len(one.lines())
    other.call("restore", child)
    other.call("unlock", child)
    one.wait_line(intact, after=count)
