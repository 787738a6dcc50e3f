"""Custom storage (driver 13.4): device memory goes through the caller's GPUs, not the target."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simgpu import api
from tests.simgpu.conftest import Outside, Program
from tests.simgpu.simgpu import SimulatedMachine, gpu
from tests.simgpu.test_driver import devices, holder

Machines = Callable[..., SimulatedMachine]
Programs = Callable[..., Program]
Outsides = Callable[..., Outside]

#: Saves a process's device memory into a file and brings it back.
STORER = """
pid, path = int(os.environ["TARGET"]), os.environ["FILE"]
driver = gpu.driver
driver.lock(pid, 30_000)
storage = driver.custom_checkpoint(pid)
assert driver.state(pid) == CHECKPOINTING
saved = []
for i in range(storage.count):
    device = storage.devices[i]
    saved.append(gpu.read(device.address, device.size))
driver.complete(storage)
assert driver.state(pid) == CHECKPOINTED
say("saved", *map(len, saved))
while not os.path.exists(path): time.sleep(0.01)
storage = driver.custom_restore(pid)
assert driver.state(pid) == RESTORING
for i in range(storage.count):
    gpu.write(storage.devices[i].address, saved[i])
driver.complete(storage)
assert driver.state(pid) == LOCKED
driver.unlock(pid)
say("restored")
"""


def memory_of(pid: int) -> int:
    """The resident memory of a process, in bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_device_memory_goes_to_storage_and_back(
    machine: Machines,
    program: Programs,
    outside: Outsides,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    here = machine(gpu(0), gpu(1), cuda=13040)
    one, intact = holder(program, here)
    go = tmp_path_factory.mktemp("go") / "go"
    storer = program(here, STORER, TARGET=str(one.pid), FILE=str(go))
    sizes = storer.wait_line("saved").split()[1:]
    # All that it has, its scratch memory too, in one piece for the one GPU.
    assert len(sizes) == 1 and int(sizes[0]) >= 1 << 20
    assert (here.used(0), devices(one.pid)) == (0, [])
    # Nobody who does not have the data can bring it back.
    assert outside(here).code("restore", one.pid) == api.INVALID_VALUE
    count = len(one.lines())
    go.touch()
    storer.wait_line("restored")
    one.wait_line(intact, after=count)


def test_memory_is_shown_only_to_who_has_a_primary_context_there(
    machine: Machines, program: Programs
) -> None:
    here = machine(gpu(0), gpu(1), cuda=13040)
    one, intact = holder(program, here)
    source = """
pid = int(os.environ["TARGET"])
gpu = Gpu(1)
driver = gpu.driver
def refused(what):
    try:
        what(pid)
    except CudaError as error:
        assert error.code == INVALID_CONTEXT, error
    else:
        raise AssertionError("it was shown")
driver.lock(pid)
refused(driver.custom_checkpoint)
assert driver.state(pid) == LOCKED
gpu = Gpu(0)
storage = driver.custom_checkpoint(pid)
saved = gpu.read(storage.devices[0].address, storage.devices[0].size)
driver.complete(storage)
driver.cuDevicePrimaryCtxRelease_v2(0)
refused(driver.custom_restore)
assert driver.state(pid) == CHECKPOINTED
gpu = Gpu(0)
storage = driver.custom_restore(pid)
gpu.write(storage.devices[0].address, saved)
driver.complete(storage)
driver.unlock(pid)
say("done")
"""
    other = program(here, source, TARGET=str(one.pid), prelude=Program.IMPORTS)
    other.wait_line("done")
    one.wait_line(intact, after=len(one.lines()))


def test_an_older_driver_takes_the_field_for_a_reserved_one(
    machine: Machines, program: Programs
) -> None:
    here = machine(cuda=13000)
    one, intact = holder(program, here)
    source = """
pid = int(os.environ["TARGET"])
gpu.driver.lock(pid)
try:
    gpu.driver.custom_checkpoint(pid)
except CudaError as error:
    say("code", error.code)
gpu.driver.unlock(pid)
"""
    program(here, source, TARGET=str(one.pid)).wait_line("code 1")
    one.wait_line(intact, after=len(one.lines()))
