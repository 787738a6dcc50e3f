"""The simulated driver: memory and kernels, and what one process does to another."""

from __future__ import annotations

import ctypes
import os
import signal
import textwrap
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.driver import state, wait_until
from tests.simgpu import api
from tests.simgpu.api import CudaError
from tests.simgpu.conftest import Outside, Program
from tests.simgpu.simgpu import SimulatedMachine, gpu, libraries

Machines = Callable[..., SimulatedMachine]
Programs = Callable[..., Program]
Outsides = Callable[..., Outside]

#: Holds 1 MiB of device memory and says, again and again, what is in it.
HOLDER = """
data = gpu.upload(os.urandom(1 << 20))
say("holds", gpu.checksum(data, 1 << 20))
while True:
    say("sum", gpu.checksum(data, 1 << 20), "on", gpu.uuid)
    time.sleep(0.01)
"""


def holder(program: Programs, machine: SimulatedMachine, **environment: str) -> tuple[Program, str]:
    """The program, and the line's beginning that says that its data are what they were."""
    one = program(machine, HOLDER, **environment)
    return one, "sum " + one.wait_line("holds").split()[1]


def devices(pid: int) -> list[str]:
    """The sockets that a process has open: what stands for device files here."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [link for link in links if link.startswith("socket:")]


def test_memory_is_copied_set_and_computed_on(machine: Machines, program: Programs) -> None:
    one = program(
        machine(),
        """
content = os.urandom(100_000)
a = gpu.upload(content)
b = gpu.allocate(100_000)
gpu.driver.cuMemcpyDtoD_v2(ctypes.c_uint64(b), ctypes.c_uint64(a), ctypes.c_size_t(100_000))
assert gpu.read(b, 100_000) == content
assert gpu.read(b + 17, 5) == content[17:22]
assert gpu.checksum(b, 100_000) == zlib.crc32(content)
gpu.driver.cuMemsetD8_v2(ctypes.c_uint64(a), 7, ctypes.c_size_t(10))
assert gpu.read(a, 11) == bytes([7] * 10) + content[10:11]
gpu.launch("add", b, 5)
gpu.synchronize()
number = int.from_bytes(content[:8], "little")
assert int.from_bytes(gpu.read(b, 8), "little") == (number + 5) % 2**64
try:
    gpu.read(a, 100_001)
except CudaError as error:
    say("beyond the end:", error.code)
say("done")
""",
    )
    one.wait_line("done")
    assert "beyond the end: 1" in one.lines()


def test_memory_is_limited_and_freed_with_its_process(machine: Machines, program: Programs) -> None:
    here = machine(gpu(memory=10 << 20), context_bytes=1 << 20)
    source = """
gpu.allocate(int(os.environ["SIZE"]))
say("has it")
time.sleep(100)
"""
    first = program(here, source, SIZE=str(8 << 20))
    first.wait_line("has it")
    assert (here.used(), here.pids()) == (9 << 20, [first.pid])
    second = program(here, source, SIZE=str(1 << 20))
    second.wait_line("error 2")  # out of memory: the contexts take some too
    first.close()
    wait_until(lambda: here.used() == 0, "the memory is free")
    program(here, source, SIZE=str(8 << 20)).wait_line("has it")


def test_a_launch_is_asynchronous_and_takes_its_time(machine: Machines, program: Programs) -> None:
    one = program(
        machine(),
        """
out = gpu.allocate(8)
gpu.driver.cuMemsetD8_v2(ctypes.c_uint64(out), 0, ctypes.c_size_t(8))
start = time.monotonic()
gpu.launch("add", out, 1, ms=300)
launched = time.monotonic() - start
gpu.launch("add", out, 1, ms=100)
gpu.synchronize()
took = time.monotonic() - start
assert launched < 0.3 <= 0.4 <= took, (launched, took)
assert gpu.read(out, 8)[0] == 2
say("done")
""",
    )
    one.wait_line("done")


def test_calls_wait_while_the_process_is_locked(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    here = machine()
    one, intact = holder(program, here)
    other = outside(here)
    assert other.call("state", one.pid) == api.RUNNING
    thread = other.call("restore_thread", one.pid)
    assert Path(f"/proc/{one.pid}/task/{thread}/comm").read_text() == "cuda-EvtHandlr\n"
    other.call("lock", one.pid, 30_000)
    assert other.call("state", one.pid) == api.LOCKED
    count = len(one.lines())
    wait_until(lambda: state(one.pid) == "S", "the program waits")
    assert len(one.lines()) <= count + 1  # the line that it was about to write
    count = len(one.lines())
    other.call("unlock", one.pid)
    one.wait_line(intact, after=count)


def test_a_checkpoint_frees_the_gpu_and_a_restore_takes_it_again(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    here = machine()
    one, intact = holder(program, here)
    other = outside(here)
    assert here.used() > 0 and devices(one.pid)
    other.save(one.pid)
    assert other.call("state", one.pid) == api.CHECKPOINTED
    assert (here.used(), here.pids(), devices(one.pid)) == (0, [], [])
    other.call("restore", one.pid)
    assert other.call("state", one.pid) == api.LOCKED
    assert here.pids() == [one.pid]
    count = len(one.lines())
    other.call("unlock", one.pid)
    one.wait_line(intact, after=count)


def test_steps_in_the_wrong_order_are_illegal(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    here = machine()
    one, intact = holder(program, here)
    other = outside(here)
    for step in ("checkpoint", "restore", "unlock"):
        assert other.code(step, one.pid) == api.ILLEGAL_STATE
    other.call("lock", one.pid, 30_000)
    for step in ("lock", "restore"):
        assert other.code(step, one.pid) == api.ILLEGAL_STATE
    other.call("checkpoint", one.pid)
    for step in ("lock", "checkpoint", "unlock"):
        assert other.code(step, one.pid) == api.ILLEGAL_STATE
    other.call("restore", one.pid)
    other.call("unlock", one.pid)
    one.wait_line(intact, after=len(one.lines()))


def test_a_lock_waits_for_a_kernel_and_gives_up_when_told_to(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    here = machine()
    other = outside(here)
    one = program(
        here,
        """
gpu.launch("spin", ms=1500)
say("launched")
gpu.synchronize()
say("went on")
gpu.synchronize()
say("not locked")
time.sleep(100)
""",
    )
    one.wait_line("launched")
    assert other.code("lock", one.pid, 50) == api.NOT_READY
    assert other.call("state", one.pid) == api.RUNNING
    other.call("lock", one.pid, 30_000)  # the kernel's end
    other.call("unlock", one.pid)
    one.wait_line("not locked")


def test_processes_without_cuda_and_processes_of_others(
    shared: Path, program: Programs, outside: Outsides
) -> None:
    here = SimulatedMachine(shared / "machine")
    try:
        other = outside(here)
        assert other.code("state", os.getpid()) == api.NOT_INITIALIZED
        assert other.code("restore_thread", os.getpid()) == api.NOT_INITIALIZED
        assert other.code("lock", 2**22 - 1, 100) == api.INVALID_VALUE
        one, intact = holder(program, here)
        source = """
os.setuid(65534)
for function in gpu.driver.state, gpu.driver.lock:
    try:
        function(int(os.environ["TARGET"]))
    except CudaError as error:
        say("code", error.code)
"""
        stranger = program(here, source, TARGET=str(one.pid))
        wait_until(lambda: stranger.lines() == ["code 304"] * 2, "both are refused")
        one.wait_line(intact, after=len(one.lines()))
    finally:
        here.stop()


def test_a_restore_needs_cuinit_or_persistence_mode(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    for persistence, code in ((False, api.NOT_INITIALIZED), (True, 0)):
        here = machine(gpu(persistence=persistence))
        one, _ = holder(program, here)
        other = outside(here, init=False)
        other.save(one.pid)
        assert other.code("restore", one.pid) == code


def test_gpus_are_mapped_by_uuid_and_each_must_be_named(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    here = machine(gpu(0), gpu(1))
    a, b = (one["uuid"] for one in here.gpus)
    one, intact = holder(program, here, CUDA_VISIBLE_DEVICES="0")
    other = outside(here)
    other.save(one.pid)
    # Also one that the process cannot see: the driver counts them all.
    assert other.code("restore", one.pid, {a: b}) == api.INVALID_VALUE
    assert other.code("restore", one.pid, {a: b, b: b}) == api.INVALID_VALUE
    assert other.code("restore", one.pid, {a: gpu(7)["uuid"], b: a}) == api.INVALID_VALUE
    other.call("restore", one.pid, {a: b, b: a})
    assert (here.used(0), here.pids(1)) == (0, [one.pid])
    other.call("unlock", one.pid)
    assert one.wait_line(intact, after=len(one.lines())).endswith(b)


@pytest.mark.parametrize(
    ("gpus", "settings", "code"),
    [
        ([gpu(2, chip="SIM200")], {}, api.NOT_SUPPORTED),
        ([gpu(2, memory=1 << 20)], {"context_bytes": 1 << 10}, api.OUT_OF_MEMORY),
        ([gpu(2)], {"driver": "570.10"}, api.DRIVER_MISMATCH),
    ],
    ids=["chip", "memory", "driver"],
)
def test_an_unfit_machine_is_refused_and_the_state_stays(
    machine: Machines,
    program: Programs,
    outside: Outsides,
    gpus: list[dict[str, object]],
    settings: dict[str, object],
    code: int,
) -> None:
    here = machine(gpu(0))
    there = machine(*gpus, **settings, sticky_restore_oom=False)
    one, intact = holder(program, here)
    other, afar = outside(here), outside(there)
    other.save(one.pid)
    pairs = {here.gpus[0]["uuid"]: there.gpus[0]["uuid"]}
    assert afar.code("restore", one.pid, pairs) == code
    assert other.call("state", one.pid) == api.CHECKPOINTED
    assert (here.used(), there.used(), devices(one.pid)) == (0, 0, [])
    other.call("restore", one.pid)
    other.call("unlock", one.pid)
    one.wait_line(intact, after=len(one.lines()))


def test_a_restore_that_ran_out_of_memory_cannot_be_repeated(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    here = machine(gpu(memory=2 << 20))
    one, _ = holder(program, here)
    other = outside(here)
    other.save(one.pid)
    full = program(here, "gpu.allocate(2 << 20)\nsay('full')\ntime.sleep(100)")
    full.wait_line("full")
    assert other.code("restore", one.pid) == api.OUT_OF_MEMORY
    full.close()
    wait_until(lambda: here.used() == 0, "the memory is free")
    # As the real driver (580): who restores must know beforehand that it fits.
    assert other.code("restore", one.pid) == api.OPERATING_SYSTEM
    assert other.call("state", one.pid) == api.CHECKPOINTED


@pytest.mark.parametrize(
    ("use", "mig"),
    [
        (
            "gpu.driver.cuMemAllocManaged(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(9), 1)",
            False,
        ),
        ("gpu.driver.cuIpcGetMemHandle(handle, ctypes.c_uint64(gpu.allocate(9)))", False),
        ("", True),
    ],
    ids=["unified memory", "ipc", "mig"],
)
def test_what_cannot_be_checkpointed_can_be_unlocked(
    machine: Machines, program: Programs, outside: Outsides, use: str, mig: bool
) -> None:
    here = machine(gpu(mig=mig))
    one = program(here, "handle = ctypes.create_string_buffer(64)\n" + use + HOLDER)
    one.wait_line("sum")
    other = outside(here)
    other.call("lock", one.pid, 30_000)
    assert other.code("checkpoint", one.pid) == api.NOT_SUPPORTED
    other.call("unlock", one.pid)
    one.wait_line("sum", after=len(one.lines()))


STEPS = {
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}


def test_faults_fail_delay_and_hang_each_function(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    here = machine()
    one, intact = holder(program, here)
    other = outside(here)
    for step, function in STEPS.items():
        here.faults("# comment", f"{function} 1 error {api.UNKNOWN}")
        assert other.code(step, one.pid) == api.UNKNOWN
        assert other.code(step, one.pid) == 0  # its second call
    one.wait_line(intact, after=len(one.lines()))

    here.faults(f"{STEPS['lock']} * after {api.UNKNOWN}")
    assert other.code("lock", one.pid) == api.UNKNOWN
    assert other.call("state", one.pid) == api.LOCKED  # it was done all the same
    here.faults(f"{STEPS['unlock']} 3+ delay 200", f"{STEPS['checkpoint']} 3+ hang")
    other.call("unlock", one.pid)
    other.call("lock", one.pid)
    other.start("checkpoint", one.pid)
    waits = Path(f"/proc/{other.process.pid}/wchan")
    wait_until(lambda: "nanosleep" in waits.read_text(), "the call hangs")
    other.process.send_signal(signal.SIGTERM)  # it ends only with its process
    assert other.process.wait(30) == -signal.SIGTERM
    here.faults()
    outside(here).call("unlock", one.pid)
    one.wait_line(intact, after=len(one.lines()))


def test_a_process_can_fail_for_good_and_its_caller_can_be_killed(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    here = machine()
    # It stays when its calls fail, to be asked for its state.
    stays = "except CudaError as error:\n    say(error)\n    time.sleep(100)\n"
    one = program(here, "try:\n" + textwrap.indent(HOLDER, "    ") + stays)
    one.wait_line("holds")
    other = outside(here)
    here.faults(f"{STEPS['lock']} 1 kill")
    other.start("lock", one.pid)
    assert other.process.wait(30) == -signal.SIGKILL
    here.faults(f"{STEPS['checkpoint']} 1 fail")
    another = outside(here)
    another.call("lock", one.pid)
    assert another.code("checkpoint", one.pid) == api.UNKNOWN
    assert another.call("state", one.pid) == api.FAILED
    one.wait_line(f"error {api.UNKNOWN}")


def test_a_child_of_fork_has_no_driver(
    machine: Machines, program: Programs, outside: Outsides
) -> None:
    source = (
        """
child = os.fork()
if child == 0:
    try:
        gpu.allocate(1)
    except CudaError as error:
        say("child", os.getpid(), error.code)
    time.sleep(100)
say("parent")
"""
        + HOLDER
    )
    here = machine()
    one = program(here, source)
    _, child, code = one.wait_line("child").split()
    one.wait_line("sum")
    try:
        assert int(code) == api.NOT_INITIALIZED
        assert devices(int(child)) == []
        other = outside(here)
        assert other.code("state", int(child)) == api.NOT_INITIALIZED
        other.save(one.pid)
        assert here.used() == 0
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_functions_of_old_drivers_and_versions(machine: Machines, outside: Outsides) -> None:
    here = machine(cuda=12040)
    other = outside(here, variant="r550")
    assert other.process.poll() is None
    old = ctypes.CDLL(str(libraries() / "r550" / "libcuda.so.1"))
    assert not hasattr(old, "cuCheckpointProcessLock")
    assert hasattr(old, "cuMemAlloc_v2")


def test_no_machine_is_no_device(program: Programs, tmp_path: Path) -> None:
    library = ctypes.CDLL(str(libraries() / "libcuda.so.1"))
    os.environ["SIMGPU_MACHINE"] = str(tmp_path)
    try:
        assert library.cuInit(0) == api.NO_DEVICE
    finally:
        del os.environ["SIMGPU_MACHINE"]
    with pytest.raises(CudaError):
        api.Driver(str(libraries() / "libcuda.so.1")).lock(os.getpid())


def test_the_checksum_is_the_usual_one() -> None:
    assert zlib.crc32(b"123456789") == 0xCBF43926
