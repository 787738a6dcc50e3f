"""The handle on a supervisor: start, signals, exit codes, callbacks, and what it leaves behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capture import images
from jupyter_gpu_ckpt.capture.supervisor import Supervisor
from jupyter_gpu_ckpt.errors import CkptError

from .conftest import RunningKernel


def start(kernel_capture: Path, folder: Path, code: str, **env: str) -> Supervisor:
    argv = [sys.executable, "-u", "-c", code]
    return Supervisor.run(
        kernel_capture, argv, env={**os.environ, **env}, cwd=str(folder), log=folder / "log"
    )


def until(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, f"{path} does not say {text!r}"
        time.sleep(0.01)


def test_exit_code_and_callbacks(kernel_capture: Path, tmp_path: Path) -> None:
    supervisor = start(kernel_capture, tmp_path, "import os; print(os.getcwd()); os._exit(7)")
    told: queue.Queue[int] = queue.Queue()
    supervisor.add_exit_callback(told.put)
    assert supervisor.wait_started(10) > 0
    assert supervisor.wait(10) == 7
    assert supervisor.poll() == 7
    assert told.get(timeout=5) == 7
    supervisor.add_exit_callback(told.put)
    assert told.get_nowait() == 7, "too late to be called back means at once"
    assert (tmp_path / "log").read_text() == f"{tmp_path}\n"


def test_a_failing_callback_does_not_harm_the_others(kernel_capture: Path, tmp_path: Path) -> None:
    supervisor = start(kernel_capture, tmp_path, "input()")
    told: queue.Queue[int] = queue.Queue()

    def fail(code: int) -> None:
        raise RuntimeError(f"told {code}")

    supervisor.add_exit_callback(fail)
    supervisor.add_exit_callback(told.put)
    assert told.get(timeout=10) == 1, "stdin is empty"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_death_by_signal_looks_as_in_subprocess(
    kernel_capture: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    supervisor = start(kernel_capture, tmp_path, "print('up'); import time; time.sleep(100)")
    until(tmp_path / "log", "up")
    supervisor.signal(signum)
    assert supervisor.wait(10) == -signum


def test_interrupt_reaches_the_kernel_and_its_children(
    kernel_capture: Path, tmp_path: Path
) -> None:
    code = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import time
print("child", flush=True)
try:
    time.sleep(100)
except KeyboardInterrupt:
    print("child interrupted", flush=True)
'''])
try:
    child.wait()
except KeyboardInterrupt:
    child.wait()
    print("interrupted")
"""
    supervisor = start(kernel_capture, tmp_path, code)
    until(tmp_path / "log", "child\n")
    supervisor.signal(signal.SIGINT)
    assert supervisor.wait(10) == 0
    assert (tmp_path / "log").read_text() == "child\nchild interrupted\ninterrupted\n"


def test_an_environment_larger_than_a_pipe(kernel_capture: Path, tmp_path: Path) -> None:
    names = {f"LARGE_{number}": "x" * 50_000 for number in range(8)}
    code = "import os; print(sum(len(v) for n, v in os.environ.items() if n[:6] == 'LARGE_'))"
    supervisor = start(kernel_capture, tmp_path, code, **names, LD_PRELOAD="", ODD="a=b\n€")
    assert supervisor.wait(10) == 0
    assert (tmp_path / "log").read_text() == "400000\n"


def test_another_child_does_not_hold_the_lifeline(kernel_capture: Path, tmp_path: Path) -> None:
    supervisor = start(kernel_capture, tmp_path, "print('up'); import time; time.sleep(100)")
    other = subprocess.Popen(["sleep", "100"])
    try:
        until(tmp_path / "log", "up")
        assert supervisor.process.stdin is not None
        supervisor.process.stdin.close()
        supervisor.wait(10)
    finally:
        other.kill()
        other.wait()


def test_a_program_that_does_not_exist(kernel_capture: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-kernel"):
        Supervisor.run(
            kernel_capture, ["no-such-kernel"], env=dict(os.environ), cwd=None, log=tmp_path / "log"
        )
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        Supervisor.run(
            kernel_capture,
            ["true"],
            env=dict(os.environ),
            cwd=str(tmp_path / "no-such-folder"),
            log=tmp_path / "log",
        )
    supervisor = Supervisor.run(
        kernel_capture, ["/no/such/kernel"], env={}, cwd=None, log=tmp_path / "log"
    )
    with pytest.raises(CkptError) as caught:
        supervisor.wait_started(10)
    assert caught.value.reason == "internal"
    assert "/no/such/kernel" in str(caught.value.details)


def test_without_kernel_capture(tmp_path: Path) -> None:
    with pytest.raises(CkptError) as caught:
        Supervisor.run(
            tmp_path / "kernel-capture", ["true"], env={}, cwd=None, log=tmp_path / "log"
        )
    assert caught.value.reason == "cannot_capture"
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_stays_behind(kernel_capture: Path, tmp_path: Path) -> None:
    """Children, also daemonised ones, are gone once the exit is told."""
    code = """
import os, subprocess
child = subprocess.Popen(["setsid", "-f", "sh", "-c", "echo $$ > pid; exec sleep 100"])
child.wait()
while not (os.path.exists("pid") and open("pid").read()):
    pass
"""
    supervisor = start(kernel_capture, tmp_path, code)
    assert supervisor.wait(20) == 0
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_taken_pid_is_named(kernel: RunningKernel) -> None:
    images_dir, _ = kernel.dump()
    images.prepare_for_restore(images_dir)
    supervisor = Supervisor.restore(
        kernel.kernel_capture,
        images_dir,
        pids=images.all_pids(images_dir),
        hold=False,
        hold_timeout=1,
        timeout=20,
        pid_namespace="never",
    )
    with pytest.raises(CkptError, match=str(kernel.pid)) as caught:
        supervisor.wait_started(20)
    assert caught.value.reason == "pid_in_use"
    assert supervisor.wait(10) != 0
    assert kernel.run("print('alive')") == "alive\n"


def test_a_damaged_image_is_one_clear_error(kernel: RunningKernel) -> None:
    images_dir, _ = kernel.dump()
    kernel.kill()
    (images_dir / f"core-{kernel.pid}.img").write_bytes(b"\x19\x43\x56\x54")
    with pytest.raises(CkptError) as caught:
        kernel.restore(images_dir)
    assert caught.value.reason in ("state_damaged", "restore_failed")
    assert caught.value.details
