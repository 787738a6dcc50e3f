"""NVIDIA's own Python packages, unmodified, on the simulated libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from tests.harness.node import REPOSITORY
from tests.simgpu.conftest import Program
from tests.simgpu.simgpu import SimulatedMachine, gpu

Machines = Callable[..., SimulatedMachine]
Programs = Callable[..., Program]


def run(machine: SimulatedMachine, source: str) -> str:
    """What a Python program prints on that machine."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **machine.environment(), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cuda_bindings_compute_and_checkpoint(machine: Machines, program: Programs) -> None:
    source = """
import ctypes, os, sys, zlib
from cuda.bindings import driver as cu

def ok(result):
    assert result[0] == cu.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) == 2 else result[1:]

ok(cu.cuInit(0))
device = ok(cu.cuDeviceGet(0))
assert ok(cu.cuDeviceGetName(64, device)).split(b"\\0")[0] == b"NVIDIA H100 80GB HBM3"
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(device))))
content = bytes(range(256)) * 400
data, out = ok(cu.cuMemAlloc(len(content))), ok(cu.cuMemAlloc(8))
ok(cu.cuMemcpyHtoD(data, content, len(content)))
kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(b"simgpu\\0")), b"checksum"))
values = (int(data), len(content), int(out), 10)
kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
ok(cu.cuLaunchKernel(kernel, *[1] * 6, 0, 0, (values, kinds), 0))
result = bytearray(8)
ok(cu.cuMemcpyDtoH(result, out, 8))
assert int.from_bytes(result, "little") == zlib.crc32(content)

pid = int(sys.stdin.read())
arguments = cu.CUcheckpointLockArgs()
arguments.timeoutMs = 30000
ok(cu.cuCheckpointProcessLock(pid, arguments))
ok(cu.cuCheckpointProcessCheckpoint(pid, None))
assert ok(cu.cuCheckpointProcessGetState(pid)) == cu.CUprocessState.CU_PROCESS_STATE_CHECKPOINTED
pair = cu.CUcheckpointGpuPair()
pair.oldUuid = pair.newUuid = ok(cu.cuDeviceGetUuid(device))
restore = cu.CUcheckpointRestoreArgs()
restore.gpuPairs, restore.gpuPairsCount = [pair], 1
ok(cu.cuCheckpointProcessRestore(pid, restore))
ok(cu.cuCheckpointProcessUnlock(pid, None))
print("done")
"""
    here = machine(gpu(name="NVIDIA H100 80GB HBM3"))
    one = program(
        here,
        """
data = gpu.upload(b"kept")
say("holds")
while not gpu.read(data, 4) == b"": say("read", gpu.read(data, 4)); time.sleep(0.02)
""",
    )
    one.wait_line("holds")
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **here.environment()},
        input=str(one.pid),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
    one.wait_line("b'kept'", after=len(one.lines()))


def test_versions_decide_which_functions_there_are(machine: Machines) -> None:
    source = """
import ctypes
library = ctypes.CDLL("libcuda.so.1")
def find(name, version):
    function, status = ctypes.c_void_p(), ctypes.c_int()
    code = library.cuGetProcAddress_v2(
        name, ctypes.byref(function), version, ctypes.c_uint64(0), ctypes.byref(status))
    return code, bool(function), status.value
print(find(b"cuMemAlloc", 12000), find(b"cuCheckpointProcessLock", 12000),
      find(b"cuCheckpointProcessLock", 13000), find(b"cuCheckpointOperationComplete", 13040),
      find(b"cuNothing", 13000))
"""
    assert run(machine(cuda=13040), source) == (
        "(0, True, 0) (500, False, 2) (0, True, 0) (0, True, 0) (500, False, 1)\n"
    )
    assert run(machine(cuda=12080), source) == (
        "(0, True, 0) (500, False, 2) (0, True, 0) (500, False, 1) (500, False, 1)\n"
    )


def test_pynvml_takes_inventory(machine: Machines, program: Programs) -> None:
    here = machine(
        gpu(0, name="NVIDIA L4", memory=24 << 20, persistence=True),
        gpu(1, name="NVIDIA A100", mig=True, mps=True, nvlinks=4),
        driver="580.95.05",
        context_bytes=1 << 20,
    )
    one = program(here, "gpu.allocate(2 << 20)\nsay('up')\ntime.sleep(100)")
    one.wait_line("up")
    source = f"""
import pynvml as nv
nv.nvmlInit()
assert nv.nvmlSystemGetDriverVersion() == "580.95.05"
assert nv.nvmlSystemGetCudaDriverVersion() == 13000
a, b = (nv.nvmlDeviceGetHandleByIndex(i) for i in range(nv.nvmlDeviceGetCount()))
assert (nv.nvmlDeviceGetName(a), nv.nvmlDeviceGetName(b)) == ("NVIDIA L4", "NVIDIA A100")
assert nv.nvmlDeviceGetUUID(a) == {here.gpus[0]["uuid"]!r}
assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetHandleByUUID({here.gpus[1]["uuid"]!r}.encode())) == 1
assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetHandleByPciBusId(b"0000:02:00.0")) == 1
memory = nv.nvmlDeviceGetMemoryInfo(a)
assert (memory.total, memory.used, memory.free) == (24 << 20, 3 << 20, 21 << 20)
assert nv.nvmlDeviceGetMemoryInfo(a, version=nv.nvmlMemory_v2).used == 3 << 20
processes = nv.nvmlDeviceGetComputeRunningProcesses(a)
assert [(one.pid, one.usedGpuMemory) for one in processes] == [({one.pid}, 3 << 20)], processes
assert nv.nvmlDeviceGetComputeRunningProcesses(b) == []
assert (nv.nvmlDeviceGetMigMode(a), nv.nvmlDeviceGetMigMode(b)) == ([0, 0], [1, 1])
assert (nv.nvmlDeviceGetPersistenceMode(a), nv.nvmlDeviceGetPersistenceMode(b)) == (1, 0)
assert nv.nvmlDeviceGetMPSComputeRunningProcesses(a) == []
assert [nv.nvmlDeviceGetNvLinkState(b, link) for link in (0, 3, 4)] == [1, 1, 0]
try:
    nv.nvmlDeviceGetHandleByIndex(2)
except nv.NVMLError_InvalidArgument as error:
    print(error)
nv.nvmlShutdown()
"""
    assert run(here, source) == "Invalid Argument\n"


def test_a_gpu_that_falls_off_the_bus_says_so(machine: Machines, program: Programs) -> None:
    here = machine(gpu(0), gpu(1))
    user = program(here, "while True: gpu.read(gpu.upload(b'x'), 1); time.sleep(0.02)")
    watcher = program(
        here,
        """
import pynvml as nv
address = lambda handle: ctypes.cast(handle, ctypes.c_void_p).value
nv.nvmlInit()
handles = [nv.nvmlDeviceGetHandleByIndex(i) for i in range(2)]
events = nv.nvmlEventSetCreate()
for handle in handles:
    nv.nvmlDeviceRegisterEvents(handle, nv.nvmlEventTypeXidCriticalError, events)
try:
    nv.nvmlEventSetWait(events, 10)
except nv.NVMLError_Timeout:
    say("watching")
for _ in range(2):
    event = nv.nvmlEventSetWait(events, 30_000)
    index = [address(handle) for handle in handles].index(address(event.device))
    say("xid", event.eventData, "of", index)
try:
    nv.nvmlDeviceGetMemoryInfo(handles[0])
except nv.NVMLError_GpuIsLost:
    say("lost")
""",
    )
    watcher.wait_line("watching")
    here.xid(31, gpu=1)
    here.xid(79, lost=True)
    watcher.wait_line("lost")
    assert [line for line in watcher.lines() if "xid" in line] == ["xid 31 of 1", "xid 79 of 0"]
    user.wait_line("error 46")


def test_no_machine_is_no_driver(machine: Machines) -> None:
    here = machine()
    here.stop()
    source = """
import pynvml
try:
    pynvml.nvmlInit()
except pynvml.NVMLError_DriverNotLoaded as error:
    print(error)
"""
    assert run(here, source) == "Driver Not Loaded\n"
