"""What stands in the way is found before anything is touched."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time

import msgspec
import pytest

from jupyter_gpu_ckpt.capture import images
from jupyter_gpu_ckpt.capture.node import node_info
from jupyter_gpu_ckpt.capture.preflight import (
    check_restore,
    check_save,
    kernel_and_descendants,
)
from jupyter_gpu_ckpt.capture.protocol import Finding, GpuAbility, Probe
from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.gpus.fit import fit
from jupyter_gpu_ckpt.gpus.inventory import CudaGpu, CudaProcess, GpuUse, Inventory

from .conftest import RunningKernel


def refused(kernel: RunningKernel, probe: Probe) -> CkptError:
    with pytest.raises(CkptError) as caught:
        check_save(kernel.pid, probe)
    assert caught.value.hint
    return caught.value


def test_a_plain_kernel_can_be_saved(kernel: RunningKernel, probe: Probe) -> None:
    check_save(kernel.pid, probe)


def test_a_node_that_cannot_capture(kernel: RunningKernel, probe: Probe) -> None:
    problem = Finding("no_capability", "Rights are missing.", "Ask for them.")
    other = msgspec.structs.replace(probe, can_capture=False, problems=[problem])
    error = refused(kernel, other)
    assert (error.reason, error.message) == ("cannot_capture", "Rights are missing.")
    with pytest.raises(CkptError) as caught:
        check_restore(probe=other, saved=node_info(), here=node_info(), mapped_files=[])
    assert caught.value.reason == "cannot_capture"


def test_gpu_memory_on_a_node_without_gpus(probe: Probe) -> None:
    use = GpuUse([CudaProcess(1, memory_bytes=2 * 10**9)], [CudaGpu("GPU-1", "H100", 80 * 10**9)])
    here = node_info(probe, Inventory())
    placed = fit(use, Inventory())
    found = check_restore(probe=probe, saved=here, here=here, mapped_files=[], gpus=placed)
    assert found[0].blocking
    assert found[0].message.startswith("The kernel has 2.0 GB of GPU memory, and this node has no")
    assert not check_restore(probe=probe, saved=here, here=here, mapped_files=[])


def test_a_gpu_that_is_open(kernel: RunningKernel, probe: Probe) -> None:
    # The null device by another name: a kernel cannot tell, and a driver is not asked.
    device = f"/dev/nvidia-of-a-test-{os.getpid()}"
    os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    try:
        kernel.run(f"held = open({device!r})")
        assert "libcuda.so.1" in refused(kernel, msgspec.structs.replace(probe, gpu=None)).message
        old = Finding("gpu_unsupported", "The driver is too old.")
        other = msgspec.structs.replace(probe, gpu=GpuAbility(), notes=[old])
        assert "The driver is too old." in refused(kernel, other).message
        check_save(kernel.pid, msgspec.structs.replace(probe, gpu=GpuAbility(checkpoint=True)))
    finally:
        os.unlink(device)


def test_a_dead_kernel(kernel: RunningKernel, probe: Probe) -> None:
    kernel.kill()
    assert refused(kernel, probe).reason == "not_savable"


def test_a_debugger(kernel: RunningKernel, probe: Probe) -> None:
    code = """
import ctypes, sys, time
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None) == 0
print("seized", flush=True)
time.sleep(100)
"""
    command = [sys.executable, "-c", code, str(kernel.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tracer:
        try:
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == b"seized\n"
            error = refused(kernel, probe)
        finally:
            tracer.kill()
    assert "debugger" in error.message
    assert str(tracer.pid) in str(error.details)


def test_a_process_in_namespaces_of_its_own(kernel: RunningKernel, probe: Probe) -> None:
    kernel.run("import subprocess; p = subprocess.Popen(['unshare', '-n', 'sleep', '100'])")
    child = kernel.run("print(p.pid)").strip()
    deadline = time.monotonic() + 10
    while os.readlink(f"/proc/{child}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < deadline
    error = refused(kernel, probe)
    assert child in error.message
    assert "sandbox" in error.message


def test_a_child_that_nobody_waited_for_is_no_obstacle(kernel: RunningKernel, probe: Probe) -> None:
    kernel.run(
        "import subprocess, time; p = subprocess.Popen(['true'])\n"
        "while ') Z ' not in open(f'/proc/{p.pid}/stat').read(): time.sleep(0.01)"
    )
    check_save(kernel.pid, probe)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("425, 4, ctypes.create_string_buffer(256)", "io_uring"),
        ("323, 1", "userfaultfd"),
    ],
)
def test_what_cannot_be_saved_is_named(
    kernel: RunningKernel, probe: Probe, code: str, words: str
) -> None:
    kernel.run(f"import ctypes; held = ctypes.CDLL(None).syscall({code}); assert held >= 0")
    assert words in refused(kernel, probe).message


def test_another_user(kernel: RunningKernel, probe: Probe) -> None:
    """Only root can start such a child."""
    kernel.run("import subprocess; p = subprocess.Popen(['sleep', '100'], user=65534)")
    assert "another user" in refused(kernel, probe).message


def test_taken_numbers_and_ports_are_named(kernel: RunningKernel, probe: Probe) -> None:
    images_dir, _ = kernel.dump()
    here = node_info(probe)
    arguments = {
        "probe": msgspec.structs.replace(probe, pid_namespaces=False),
        "saved": here,
        "here": here,
        "mapped_files": images.mapped_files(images_dir),
        "pids": images.all_pids(images_dir),
        "listeners": images.inet_listeners(images_dir),
    }
    pid, second, *ports = check_restore(**arguments)  # type: ignore[arg-type]
    assert {found.mode for found in (pid, *ports)} == {"rollback"}
    assert pid.what == "pid"
    assert f"{kernel.pid} (python" in pid.message
    assert {port.what for port in ports} == {"port"}
    assert any(f"{kernel.client.ip}:{kernel.client.shell_port}" in p.message for p in ports)
    # Where PID namespaces cannot be made there is no second kernel at all.
    assert (second.what, second.mode, second.blocking) == ("pid_namespace", "new", True)
    # For a roll-back the kernel itself is not in its own way.
    ending = kernel_and_descendants(kernel.pid)
    assert check_restore(**arguments, ending=ending) == [second]  # type: ignore[arg-type]
    kernel.kill()
    assert check_restore(**arguments) == [second]  # type: ignore[arg-type]
    # A new PID namespace makes taken numbers harmless.
    arguments |= {"probe": probe, "pids": [os.getpid()]}
    blocking = [] if probe.pid_namespaces and probe.can_set_pid else ["pid"]
    assert [d.what for d in check_restore(**arguments)] == blocking  # type: ignore[arg-type]


def test_an_address_that_is_not_here_does_not_block(probe: Probe) -> None:
    here = node_info(probe)
    (found,) = check_restore(
        probe=probe,
        saved=here,
        here=here,
        mapped_files=[],
        listeners=[("198.51.100.9", 80), ("::", 0), ("127.0.0.1", 0)],
    )
    assert (found.what, found.blocking) == ("address", False)
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        (found,) = check_restore(
            probe=probe, saved=here, here=here, mapped_files=[], listeners=[("::1", port)]
        )
    assert (found.what, found.blocking, found.saved) == ("port", True, f"::1:{port}")
