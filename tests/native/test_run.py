"""The supervisor of a fresh kernel."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.driver import Capture, Kernel, send_signal, state, status, wait_until

Start = Callable[..., Kernel]
Run = Callable[..., Capture]


def test_exit_code_is_passed_on(kernel: Start) -> None:
    one = kernel("import sys; print('hello'); print('oops', file=sys.stderr); sys.exit(7)")
    assert one.supervisor.wait() == 7
    last = one.supervisor.finish()
    assert (last["event"], last["code"], last["signal"]) == ("exited", 7, None)
    assert one.lines() == ["hello", "oops"]
    assert one.log.stat().st_mode & 0o777 == 0o600


def test_death_by_signal_is_passed_on(kernel: Start) -> None:
    one = kernel()
    one.wait_line("tick")
    send_signal(one.pid, signal.SIGSEGV)
    assert one.supervisor.wait() == 128 + signal.SIGSEGV
    last = one.supervisor.finish()
    assert (last["code"], last["signal"]) == (None, signal.SIGSEGV)


def test_signals_reach_the_kernels_process_group(kernel: Start) -> None:
    one = kernel(
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print('ready')\n"
        "try:\n    time.sleep(100)\n"
        "except KeyboardInterrupt:\n    print('interrupted', child.wait())\n"
    )
    one.wait_line("ready")
    one.supervisor.process.send_signal(signal.SIGINT)
    assert one.wait_line("interrupted") == f"interrupted -{int(signal.SIGINT)}"
    assert one.supervisor.wait() == 0


def ignore_and_block_all() -> None:
    """Ignore and block every signal, also those that the C library keeps for itself."""
    sigaction, sigprocmask = {"x86_64": (13, 14), "aarch64": (134, 135)}[platform.machine()]
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    ignored = (ctypes.c_ulong * 8)(int(signal.SIG_IGN))
    for number in range(1, 65):
        syscall(sigaction, number, ignored, None, ctypes.c_size_t(8))
    everything = ctypes.c_uint64(~0)
    syscall(sigprocmask, signal.SIG_BLOCK, ctypes.byref(everything), None, ctypes.c_size_t(8))


@pytest.mark.parametrize("caller", [None, ignore_and_block_all])
def test_the_kernel_starts_like_any_program(
    kernel: Start, caller: Callable[[], None] | None
) -> None:
    """Own session, default signals, stdin empty, no fd but its three, caller's umask."""
    one = kernel(
        preexec_fn=caller,
        source="import os, signal, time\n"
        "print('session', os.getsid(0) == os.getpid())\n"
        "print('fds', sorted(map(int, os.listdir('/proc/self/fd')))[:-1])\n"
        "print('stdin', os.read(0, 1), os.readlink('/proc/self/fd/0'))\n"
        "mask = os.umask(0); print('umask', oct(mask))\n"
        "print('blocked', signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
        "print('pipe', open('/proc/self/fdinfo/1').read().split('flags:')[1].split()[0])\n"
        "print('done')\n"
        "time.sleep(100)\n",
    )
    one.wait_line("done")
    assert "session True" in one.lines()
    assert "fds [0, 1, 2]" in one.lines()
    assert "stdin b'' /dev/null" in one.lines()
    assert "umask 0o22" in one.lines()
    assert "blocked set()" in one.lines()
    # CRIU does not compare the size of a log that is append-only and write-only.
    flags = int(one.wait_line("pipe").split()[1], 8)
    assert flags & os.O_APPEND
    assert flags & os.O_ACCMODE == os.O_WRONLY
    assert status(one.pid)["SigIgn"] == "0000000001001000"  # only Python's own
    assert status(one.pid)["SigBlk"] == "0000000000000000"
    assert int(status(one.pid)["PPid"]) == one.supervisor.process.pid


def test_the_environment_comes_through_the_pipe(kernel: Start) -> None:
    one = kernel(
        "import os; print(sorted(k for k in os.environ if k != 'LC_CTYPE'))",
        env={"LD_LIBRARY_PATH": "/nowhere", "TMPDIR": "/tmp", "PATH": "/usr/bin"},
    )
    assert one.supervisor.wait() == 0
    assert one.lines() == ["['LD_LIBRARY_PATH', 'PATH', 'TMPDIR']"]


def test_a_random_high_pid(kernel: Start) -> None:
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    pids = [kernel(name=f"k{i}").pid for i in range(3)]
    assert all(pid_max // 4 <= pid < pid_max * 9 // 10 for pid in pids)
    assert max(pids) - min(pids) > 10


def test_end_of_the_lifeline_ends_the_kernel(kernel: Start) -> None:
    one = kernel(
        "import signal, sys, time\n"
        "def bye(*_):\n    print('bye'); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, bye); print('ready')\n"
        "time.sleep(100)\n"
    )
    one.wait_line("ready")
    one.supervisor.hang_up()
    assert one.supervisor.wait() == 3
    assert one.lines()[-1] == "bye"


def test_a_stubborn_kernel_is_killed(kernel: Start) -> None:
    one = kernel(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready')\n"
        "time.sleep(100)\n"
    )
    one.wait_line("ready")
    begin = time.monotonic()
    one.supervisor.hang_up()
    assert one.supervisor.wait() == 128 + signal.SIGKILL
    assert 1.5 < time.monotonic() - begin < 6


FAMILY = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "101"])
stopped = subprocess.Popen(["sleep", "102"])
os.kill(stopped.pid, 19)
r, w = os.pipe()
if os.fork() == 0:          # a daemon: forked twice, in a session of its own
    os.setsid()
    if os.fork() == 0:
        os.write(w, str(os.getpid()).encode())
        while True: time.sleep(1)
    os._exit(0)
os.wait()
print("family", child.pid, stopped.pid, int(os.read(r, 20)), flush=True)
while True: time.sleep(1)
"""


@pytest.mark.parametrize("how", ["kernel killed", "kill command", "lifeline"])
def test_nothing_of_the_tree_is_left(kernel: Start, how: str) -> None:
    one = kernel(FAMILY)
    family = [int(word) for word in one.wait_line("family").split()[1:]]
    # The daemon stays in the kernel's tree.
    assert int(status(family[2])["PPid"]) == one.pid
    if how == "kernel killed":
        send_signal(one.pid)
    elif how == "kill command":
        one.supervisor.send("kill")
    else:
        one.supervisor.hang_up()
    one.supervisor.wait()
    # At once, not after a while: a restore needs these numbers.
    assert [pid for pid in [one.pid, *family] if Path(f"/proc/{pid}").exists()] == []


def test_the_kernel_does_not_outlive_a_killed_supervisor(kernel: Start) -> None:
    one = kernel()
    one.wait_line("tick")
    one.supervisor.process.kill()
    one.supervisor.wait()
    wait_until(lambda: state(one.pid) in ("", "Z"), "the kernel's end")


def test_unknown_commands_are_ignored(kernel: Start) -> None:
    one = kernel()
    one.supervisor.send("x" * 5000)
    one.supervisor.send("dance")
    one.supervisor.send("release")
    one.runs_on()
    assert one.kill() == 128 + signal.SIGKILL


def test_a_command_that_cannot_be_started(capture: Run, tmp_path: Path) -> None:
    run = capture("run", "--log", tmp_path / "log", "--", "/no/such/program")
    last = run.finish()
    assert (last["event"], last["reason"]) == ("error", "exec_failed")
    assert "/no/such/program" in last["message"]
    assert "No such file" in last["message"]
    assert run.wait() == 1


def test_a_log_that_is_a_link_is_refused(capture: Run, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("content")
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    run = capture("run", "--log", tmp_path / "log", "--", "/bin/true")
    assert run.finish()["reason"] == "usage"
    assert run.wait() == 2
    assert (tmp_path / "precious").read_text() == "content"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["fly"],
        ["run", "--log", "x"],
        ["run", "--", "true"],
        ["dump", "--pid", "1", "--images-dir", "x"],
        ["dump", "--pid", "-5", "--images-dir", "x"],
        ["dump", "--pid", "99", "--images-dir", "x", "--timeout", "inf"],
        ["dump", "--pid", "99", "--images-dir", "x", "--lib-dir", "/tmp"],
        ["restore"],
        ["restore", "--images-dir", "x", "--pid-namespace", "maybe"],
    ],
)
def test_bad_command_lines(capture: Run, args: list[str]) -> None:
    run = capture(*args)
    assert run.finish()["reason"] == "usage"
    assert run.wait() == 2


def test_probe(capture: Run) -> None:
    probe = capture("probe").finish()
    assert probe["event"] == "probe"
    assert probe["problems"] == []
    assert probe["can_capture"] is True
    assert probe["criu"]["version"] >= "4.2"
    assert probe["root"] is (os.getuid() == 0)
