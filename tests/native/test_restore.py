"""Restores: the same tree with the same numbers, and a clear word where that cannot be."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.conftest import COUNTER
from tests.native.driver import Capture, Kernel, empty, send_signal, state, status, wait_until

Start = Callable[..., Kernel]
Run = Callable[..., Capture]

TREE = """
import os, subprocess, threading, time
child = subprocess.Popen(["sleep", "1000"])
zombie = subprocess.Popen(["true"])
while open(f"/proc/{zombie.pid}/stat").read().rpartition(")")[2].split()[0] != "Z": time.sleep(.01)
stopped = subprocess.Popen(["sleep", "1001"])
os.kill(stopped.pid, 19)
os.waitpid(stopped.pid, os.WUNTRACED)
r, w = os.pipe()
leader = os.fork()
if leader == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(w, str(os.getpid()).encode())
        while True: time.sleep(1)
    os._exit(0)
os.waitpid(leader, 0)
daemon = int(os.read(r, 20))
beats = [0]
def beat():
    while True:
        beats[0] += 1
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
print("tree", child.pid, zombie.pid, stopped.pid, daemon, flush=True)
i = 0
while True:
    i += 1
    print("tick", i, beats[0], flush=True)
    if os.path.exists("end"):
        print("zombie", zombie.wait(), flush=True)
        raise SystemExit(5)
    time.sleep(0.02)
"""

#: Both its threads write a file, so that one can see which of them runs.
TWO_THREADS = """
import signal, threading, time
def other():
    with open("other", "a", buffering=1) as f:
        while True: f.write("x"); f.flush(); time.sleep(0.01)
def on_signal(*_):
    print("signal", flush=True)
signal.signal(signal.SIGUSR1, on_signal)
threading.Thread(target=other, daemon=True).start()
i = 0
while True:
    i += 1
    print("tick", i, flush=True)
    time.sleep(0.02)
"""


def ticks(kernel: Kernel) -> int:
    lines = [line for line in kernel.lines() if line.startswith("tick")]
    return int(lines[-1].split()[1]) if lines else 0


def saved_and_killed(kernel: Kernel) -> None:
    kernel.save()
    kernel.kill()


def test_the_whole_tree_comes_back(kernel: Start) -> None:
    one = kernel(TREE)
    child, zombie, stopped, daemon = map(int, one.wait_line("tree").split()[1:])
    one.wait_line("tick")
    before = {pid: (os.getsid(pid), os.getpgid(pid)) for pid in [one.pid, child, stopped, daemon]}
    one.save()
    saved = ticks(one)
    one.runs_on()
    one.kill()
    assert not any(Path(f"/proc/{pid}").exists() for pid in [one.pid, child, daemon])
    restored = one.restore().expect("restored")
    assert restored["pid"] == one.pid
    assert restored["inner_pid"] == one.pid
    assert restored["pid_namespace"] is False
    assert restored["time_namespace"] is True
    one.runs_on()
    # What it printed between the freeze and the answer to the save counts once more.
    wait_until(lambda: ticks(one) > saved, "the counter to go on")
    # The daemon whose session leader is gone comes back beside the kernel.
    assert int(status(daemon)["PPid"]) == one.supervisor.process.pid
    after = {pid: (os.getsid(pid), os.getpgid(pid)) for pid in [one.pid, child, stopped, daemon]}
    assert after == before
    assert state(zombie) == "Z"
    assert state(stopped) == "T"
    assert state(child) in "SR"
    assert len(os.listdir(f"/proc/{one.pid}/task")) == 2
    beats = int(one.lines()[-1].split()[2])
    wait_until(lambda: int(one.lines()[-1].split()[2]) > beats + 5, "the second thread")
    # Only one tree can be saved: what stands beside it is named.
    empty(one.images)
    assert [entry["pid"] for entry in one.save()["left_out"]] == [daemon]
    # The supervisor is its parent, and its exit code arrives; nothing is left.
    assert int(status(one.pid)["PPid"]) == one.supervisor.process.pid
    (one.folder / "end").touch()
    assert one.supervisor.wait() == 5
    assert one.lines()[-1] == "zombie 0"
    assert not any(Path(f"/proc/{pid}").exists() for pid in [one.pid, child, stopped, daemon])


def test_a_restored_kernel_can_be_saved_again(kernel: Start) -> None:
    one = kernel()
    one.wait_line("tick")
    for _ in range(3):
        saved_and_killed(one)
        one.restore("--hold", "--hold-timeout", "0.05").expect("released")
        one.runs_on()
        empty(one.images)
    one.save()
    one.runs_on()


def test_a_daemon_of_a_restored_kernel_stays_in_its_tree(kernel: Start) -> None:
    """The kernel is a subreaper before and after, and dies with its supervisor."""
    one = kernel(
        "import os, time\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n        time.sleep(1000)\n"
        "    os._exit(0)\n"
        "os.wait()\nprint('forked', flush=True)\n" + COUNTER
    )
    saved_and_killed(one)
    one.restore().expect("restored")
    (one.folder / "go").touch()
    one.wait_line("forked")
    children = Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
    assert len(children) == 1
    one.supervisor.process.kill()
    wait_until(lambda: state(one.pid) in ("", "Z"), "the kernel's end")
    send_signal(int(children[0]))


def test_signals_and_exit_code_after_a_restore(kernel: Start) -> None:
    one = kernel(
        "import time\nprint('ready', flush=True)\n"
        "try:\n    while True: time.sleep(0.05)\n"
        "except KeyboardInterrupt:\n    raise SystemExit(9)\n"
    )
    one.wait_line("ready")
    saved_and_killed(one)
    one.restore().expect("restored")
    one.supervisor.process.send_signal(signal.SIGINT)
    assert one.supervisor.wait() == 9
    last = one.supervisor.finish()
    assert (last["event"], last["code"]) == ("exited", 9)


@pytest.mark.parametrize("how", ["kill command", "lifeline", "SIGTERM"])
def test_a_restored_kernel_ends_like_any_other(kernel: Start, how: str) -> None:
    one = kernel()
    one.wait_line("tick")
    saved_and_killed(one)
    one.restore("--hold", "--hold-timeout", "30").expect("held")
    if how == "kill command":
        one.supervisor.send("kill")
    elif how == "lifeline":
        one.supervisor.hang_up()
    else:
        one.supervisor.process.send_signal(signal.SIGTERM)
        one.supervisor.send("release")
    number = signal.SIGKILL if how == "kill command" else signal.SIGTERM
    assert one.supervisor.wait() == 128 + number


# The hold --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["caller", "timeout"])
def test_the_main_thread_is_held(kernel: Start, how: str) -> None:
    one = kernel(TWO_THREADS)
    one.wait_line("tick")
    saved_and_killed(one)
    main, other = ticks(one), (one.folder / "other").stat().st_size
    supervisor = one.restore("--hold", "--hold-timeout", "0.5" if how == "timeout" else "30")
    begin = time.monotonic()
    supervisor.expect("held")
    # The other thread runs, the main one does not, and a signal waits for it.
    send_signal(one.pid, signal.SIGUSR1)
    wait_until(lambda: (one.folder / "other").stat().st_size > other + 5, "the other thread")
    assert ticks(one) == main
    assert "signal" not in one.lines()
    if how == "caller":
        supervisor.send("release")
    assert supervisor.expect("released")["by"] == how
    if how == "timeout":
        assert 0.4 < time.monotonic() - begin < 3
    one.wait_line("signal")
    one.runs_on()
    # No trace of having been stopped or traced.
    assert status(one.pid)["TracerPid"] == "0"
    assert state(one.pid) in "SR"
    send_signal(one.pid, signal.SIGSTOP)
    wait_until(lambda: state(one.pid) == "T", "stop")
    send_signal(one.pid, signal.SIGCONT)
    one.runs_on()


def test_death_while_held(kernel: Start) -> None:
    one = kernel(TWO_THREADS)
    one.wait_line("tick")
    saved_and_killed(one)
    supervisor = one.restore("--hold", "--hold-timeout", "30")
    supervisor.expect("held")
    send_signal(one.pid)
    assert supervisor.wait() == 128 + signal.SIGKILL


# What is in the way ----------------------------------------------------------------------------


def digest(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.img")
    }


def test_taken_numbers_are_named(kernel: Start) -> None:
    one = kernel()
    one.wait_line("tick")
    one.save()
    images = digest(one.images)
    second = Capture(
        "restore",
        "--images-dir",
        one.images,
        "--pids-file",
        pids_file(one),
        "--pid-namespace",
        "never",
    )
    last = second.finish()
    second.close()
    assert (last["event"], last["reason"]) == ("error", "pid_in_use")
    assert [entry["pid"] for entry in last["pids"]] == [one.pid]
    assert last["pids"][0]["comm"].startswith("python")
    one.runs_on()
    assert digest(one.images) == images


def pids_file(kernel: Kernel) -> Path:
    path = kernel.folder / "pids"
    path.write_text("\n".join(map(str, kernel.pids())))
    return path


def test_a_restore_that_fails_leaves_the_images_and_no_process(kernel: Start) -> None:
    data = "open('data', 'w').write('x' * 1000)\nf = open('data')\n"
    one = kernel(data + "print('open', flush=True)\n" + COUNTER)
    one.wait_line("open")
    saved_and_killed(one)
    (one.folder / "data").rename(one.folder / "data.away")
    images = digest(one.images)
    supervisor = one.restore()
    last = supervisor.finish()
    assert (last["event"], last["reason"]) == ("error", "criu_failed")
    assert any("data" in line for line in last["criu_errors"])
    assert last["log"] == "restore.log"
    assert supervisor.wait() == 1
    assert not Path(f"/proc/{one.pid}").exists()
    assert digest(one.images) == images
    # With the cause gone it works.
    (one.folder / "data.away").rename(one.folder / "data")
    one.restore().expect("restored")
    one.runs_on()


@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage", "empty folder"])
def test_damaged_images(kernel: Start, damage: str) -> None:
    one = kernel()
    one.wait_line("tick")
    saved_and_killed(one)
    core = one.images / f"core-{one.pid}.img"
    pids = pids_file(one)
    if damage == "missing":
        core.unlink()
    elif damage == "truncated":
        core.write_bytes(core.read_bytes()[:30])
    elif damage == "garbage":
        core.write_bytes(os.urandom(5000))
    else:
        empty(one.images)
    supervisor = Capture("restore", "--images-dir", one.images, "--pids-file", pids)
    last = supervisor.finish()
    supervisor.close()
    assert last["reason"] == "criu_failed"
    assert not Path(f"/proc/{one.pid}").exists()


@pytest.mark.parametrize("name", ["restore.log", "criu.out", "inventory.img", "stopped-tasks"])
def test_a_fifo_in_the_place_of_a_file_holds_nothing_up(kernel: Start, name: str) -> None:
    one = kernel()
    one.wait_line("tick")
    saved_and_killed(one)
    (one.images / name).unlink(missing_ok=True)
    os.mkfifo(one.images / name)
    supervisor = one.restore("--timeout", "2")
    if name == "stopped-tasks":
        supervisor.expect("restored")
        one.runs_on()
    else:
        last = supervisor.finish(20)
        assert last["event"] == "error"
        assert not Path(f"/proc/{one.pid}").exists()


def test_a_restore_can_be_given_up(kernel: Start) -> None:
    one = kernel("data = bytearray(b'abcd' * (100 << 20))\nprint('filled', flush=True)\n" + COUNTER)
    one.wait_line("filled", 60)
    saved_and_killed(one)
    supervisor = one.restore("--timeout", "0.1")
    assert supervisor.finish()["reason"] == "timeout"
    assert not Path(f"/proc/{one.pid}").exists()
    for lines in ("", "resume\nrelease\ncancel\nresume"):  # heard at one wake-up
        supervisor = one.restore()
        if lines:
            supervisor.send(lines)
        else:
            supervisor.hang_up()
        assert supervisor.finish()["reason"] == "cancelled"
    assert not Path(f"/proc/{one.pid}").exists()
    one.restore().expect("restored")
    one.runs_on()


def test_a_killed_restore_leaves_no_process(kernel: Start) -> None:
    one = kernel(
        "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n"
        "data = bytearray(b'abcd' * (100 << 20))\nprint('filled', flush=True)\n" + COUNTER
    )
    one.wait_line("filled", 60)
    saved_and_killed(one)
    supervisor = one.restore()
    wait_until(lambda: Path(f"/proc/{one.pid}").exists(), "the first process")
    supervisor.process.kill()
    supervisor.wait()
    wait_until(lambda: not any(state(pid) not in ("", "Z") for pid in one.pids()), "the end of all")
    time.sleep(0.3)  # nothing comes back either
    assert not any(state(pid) not in ("", "Z") for pid in one.pids())


@pytest.mark.parametrize("text", ["12 thirteen", "-5", "0", "99999999999999999999"])
def test_bad_lists_of_pids(capture: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "pids").write_text(text)
    tmp_path.chmod(0o700)
    restore = capture("restore", "--images-dir", tmp_path, "--pids-file", tmp_path / "pids")
    assert restore.finish()["reason"] == "usage"
    assert restore.wait() == 2


# PID namespaces --------------------------------------------------------------------------------


def test_taken_numbers_lead_to_a_namespace(kernel: Start) -> None:
    """While the original runs on, its copy lives in a PID namespace: two of it, one number."""
    one = kernel(
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n"
        "name = 'second' if os.path.exists('second-lives') else 'first'\n"
        "import time, signal\n"
        "def bye(*_):\n    print('bye', flush=True); raise SystemExit(4)\n"
        "signal.signal(signal.SIGINT, bye)\n"
        "i = 0\n"
        "while True:\n    i += 1\n    print('tick', i, os.getpid(), flush=True); time.sleep(0.02)\n"
    )
    one.wait_line("tick")
    one.save()
    first = one.supervisor
    one.images.rename(one.folder / "saved")
    supervisor = Capture(
        "restore",
        "--images-dir",
        one.folder / "saved",
        "--pids-file",
        saved_pids(one),
        "--hold",
        "--hold-timeout",
        "20",
    )
    try:
        restored = supervisor.expect("restored")
        assert restored["pid_namespace"] is True
        assert restored["inner_pid"] == one.pid
        copy = restored["pid"]
        assert copy != one.pid
        assert status(copy)["NSpid"].split()[-1] == str(one.pid)
        supervisor.expect("held")
        supervisor.send("release")
        supervisor.expect("released")
        # The original is unharmed, and goes.
        assert first.process.poll() is None
        one.kill()
        one.runs_on()
        # What runs in a namespace can be saved, from outside, and again.
        one.images.mkdir(mode=0o700)
        capture = one.dump(pid=copy)
        done = capture.finish()
        assert done["event"] == "done", done
        one.runs_on()
        assert sorted(one.pids()) == sorted(
            int(path.name[5:-4]) for path in (one.folder / "saved").glob("core-*.img")
        )
        # Signals and the exit code go through both.
        supervisor.process.send_signal(signal.SIGINT)
        assert supervisor.wait() == 4
        wait_until(lambda: not Path(f"/proc/{copy}").exists(), "its end")
    finally:
        supervisor.close()
    # And from there back into the ordinary world.
    one.restore("--pid-namespace", "never").expect("restored")
    one.runs_on()


def saved_pids(kernel: Kernel) -> Path:
    path = kernel.folder / "saved-pids"
    cores = (kernel.folder / "saved").glob("core-*.img")
    path.write_text("\n".join(core.name[5:-4] for core in cores))
    return path


def test_numbers_from_the_beginning_of_a_namespace(kernel: Start) -> None:
    """In a new PID namespace the first numbers would go to the programs that restore."""
    one = kernel(
        "import os, threading, time\n"
        "while not os.path.exists('go'): print('tick', flush=True); time.sleep(0.02)\n"
        "open('/proc/sys/kernel/ns_last_pid', 'w').write('1')\n"
        "threads = [threading.Thread(target=time.sleep, args=(1000,)) for _ in range(6)]\n"
        "for thread in threads: thread.start()\n"
        "print('low', *sorted(thread.native_id for thread in threads), flush=True)\n" + COUNTER
    )
    one.wait_line("tick")
    saved_and_killed(one)
    copy = one.restore("--pid-namespace", "always").expect("restored")["pid"]
    (one.folder / "go").touch()
    low = list(map(int, one.wait_line("low").split()[1:]))
    assert low[0] < 5
    empty(one.images)
    assert one.dump(pid=copy).finish()["event"] == "done"
    one.kill()
    restored = one.restore("--pid-namespace", "always").expect("restored")
    one.runs_on()
    found = sorted(map(int, os.listdir(f"/proc/{restored['pid']}/task")))
    inner = sorted(int(status(tid)["NSpid"].split()[-1]) for tid in found)
    assert inner == sorted([one.pid, *low])


@pytest.mark.parametrize("how", ["supervisor killed", "lifeline", "kill command"])
def test_a_namespace_ends_whole(kernel: Start, how: str) -> None:
    one = kernel("import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n" + COUNTER)
    one.wait_line("tick")
    saved_and_killed(one)
    supervisor = one.restore("--pid-namespace", "always")
    copy = supervisor.expect("restored")["pid"]
    one.runs_on()
    child = int(Path(f"/proc/{copy}/task/{copy}/children").read_text())
    if how == "supervisor killed":
        supervisor.process.kill()
    elif how == "lifeline":
        supervisor.hang_up()
    else:
        supervisor.send("kill")
    supervisor.wait()
    wait_until(lambda: state(copy) == "" and state(child) == "", "the end of all")


@pytest.mark.parametrize("how", ["cancel", "SIGKILL", "lifeline"])
def test_undo_in_a_namespace(kernel: Start, how: str) -> None:
    one = kernel(
        "f = open('file', 'w')\n"
        "data = bytearray(b'abcd' * (10 << 20))\nprint('filled', flush=True)\n" + COUNTER
    )
    one.wait_line("filled", 60)
    saved_and_killed(one)
    copy = one.restore("--pid-namespace", "always").expect("restored")["pid"]
    one.runs_on()
    empty(one.images)
    capture = Capture(
        "dump", "--pid", str(copy), "--images-dir", one.images, "--window-dir", one.folder
    )
    capture.expect("window")
    assert state(copy) == "T"
    if how == "cancel":
        capture.send("cancel")
    elif how == "lifeline":
        capture.hang_up()
    else:
        capture.process.kill()
    one.runs_on()
    capture.close()


@pytest.mark.parametrize("what", ["nothing", "file", "link", "another's"])
def test_images_come_only_from_a_socket_of_the_caller(kernel: Start, what: str) -> None:
    one = kernel()
    saved_and_killed(one)
    path = one.images / "streamer-serve.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(one.folder / "other" if what == "link" else path))
        listener.listen()
        if what == "link":
            path.symlink_to(one.folder / "other")
        elif what == "another's":
            os.chown(path, 12345, -1)
        else:
            path.unlink()
            if what == "file":
                path.touch()
        last = one.restore("--stream").finish()
        assert (last["event"], last["reason"]) == ("error", "usage")
        assert "socket" in last["message"]
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
