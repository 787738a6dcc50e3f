"""Dumps as transactions: whatever happens, the kernel runs on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.native.conftest import COUNTER
from tests.native.driver import (
    Capture,
    Kernel,
    binary,
    empty,
    send_signal,
    state,
    status,
    tmpfs,
    wait_until,
)

Start = Callable[..., Kernel]
Run = Callable[..., Capture]

#: Fills memory with what does not compress to nothing, then counts.
BIG = """
import time
block = bytes(range(256)) * 4096
data = [bytearray(block) for _ in range({megabytes})]
print("filled", flush=True)
i = 0
while True:
    i += 1
    print("tick", i, flush=True)
    time.sleep(0.02)
"""

#: Holds a file below the folder that is the first argument... of the environment.
HOLDER = """
import os, time
f = open(os.environ["HELD"], "w+"); f.write("content"); f.flush()
print("holding", flush=True)
i = 0
while True:
    i += 1
    print("tick", i, flush=True)
    time.sleep(0.02)
"""


def holder(kernel: Start, path: Path) -> Kernel:
    one = kernel(HOLDER, env={**os.environ, "HELD": str(path)})
    one.wait_line("holding")
    return one


def test_a_dump_leaves_the_kernel_running(kernel: Start) -> None:
    one = kernel("import subprocess\nchild = subprocess.Popen(['sleep', '100'])\n" + COUNTER)
    one.wait_line("tick")
    done = one.save()
    assert done["criu_version"] >= "4.2"
    assert 0 < done["frozen_s"] <= done["dump_s"] < 5
    files = [path for path in one.images.iterdir()]
    # A page or two of difference: the log still grows while it is measured.
    assert abs(done["image_bytes"] - sum(path.stat().st_size for path in files)) < 8192
    assert len(one.pids()) == 2
    assert [oct(path.stat().st_mode & 0o777) for path in files if path.stat().st_mode & 0o077] == []
    one.runs_on()
    assert all(state(pid) in "SR" for pid in one.pids())
    # And again.
    empty(one.images)
    one.save()
    one.runs_on()


def test_progress_is_told(kernel: Start) -> None:
    one = kernel(BIG.format(megabytes=700))
    one.wait_line("filled", 60)
    capture = one.dump()
    last = capture.finish()
    assert last["event"] == "done"
    dumping = next(event for event in capture.events if event["event"] == "dumping")
    assert dumping["tasks"] == 1
    assert dumping["rss_bytes"] > 700 << 20
    progress = [event for event in capture.events if event["event"] == "progress"]
    assert progress
    sizes = [event["bytes"] for event in progress]
    assert sizes == sorted(sizes)
    assert all(event["total"] == dumping["rss_bytes"] for event in progress)
    one.runs_on()


@pytest.mark.parametrize("leave", ["stopped", "killed"])
def test_the_caller_may_want_the_kernel_otherwise(kernel: Start, leave: str) -> None:
    one = kernel()
    one.wait_line("tick")
    one.save("--leave", leave)
    if leave == "stopped":
        assert state(one.pid) == "T"
        send_signal(one.pid, signal.SIGCONT)
        one.runs_on()
    else:
        assert one.supervisor.wait() == 128 + signal.SIGKILL


def test_a_stopped_child_stays_stopped(kernel: Start) -> None:
    one = kernel(
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '100'])\nos.kill(child.pid, 19)\n"
        "os.waitpid(child.pid, os.WUNTRACED)\nprint('child', child.pid, flush=True)\n" + COUNTER
    )
    child = int(one.wait_line("child").split()[1])
    one.save()
    one.runs_on()
    assert state(child) == "T"


# The window ------------------------------------------------------------------------------------


def test_the_window_opens_for_files_of_this_node(kernel: Start, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    one = holder(kernel, local / "file")
    capture = one.dump("--window-dir", local)
    window = capture.expect("window")
    assert window["frozen_s"] > 0
    assert state(one.pid) == "T"
    count = len(one.lines())
    time.sleep(0.3)  # a kernel that is not stopped writes 15 lines meanwhile
    assert len(one.lines()) == count
    capture.send("resume")
    done = capture.expect("done")
    assert done["frozen_s"] >= 0.3
    one.runs_on()


def test_no_window_without_need(kernel: Start, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local-not").mkdir()
    one = holder(kernel, tmp_path / "local-not" / "file")
    capture = one.dump("--window-dir", tmp_path / "local", "--window-dir", "/no/such/dir")
    assert capture.finish()["event"] == "done"
    assert [event for event in capture.events if event["event"] == "window"] == []


def test_window_for_what_link_remap_leaves(kernel: Start, tmp_path: Path) -> None:
    one = kernel(
        "import os\n"
        "open('a', 'w').close(); os.link('a', 'b'); f = open('a'); os.unlink('a')\n"
        "print('ready', flush=True)\n" + COUNTER
    )
    one.wait_line("ready")
    capture = one.dump("--window-dir", tmp_path / "kernel")
    capture.expect("window")
    left = list((tmp_path / "kernel").glob("link_remap.*"))
    assert len(left) == 1
    left[0].unlink()
    capture.send("resume")
    capture.expect("done")
    one.runs_on()


def test_a_forgotten_window_closes(kernel: Start, tmp_path: Path) -> None:
    one = holder(kernel, tmp_path / "file")
    capture = one.dump("--window-dir", tmp_path, "--window-timeout", "0.5")
    last = capture.finish()
    assert (last["event"], last["reason"]) == ("error", "timeout")
    one.runs_on()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "lifeline", "cancel"])
def test_a_lost_caller_in_the_window(kernel: Start, tmp_path: Path, how: str) -> None:
    one = holder(kernel, tmp_path / "file")
    capture = one.dump("--window-dir", tmp_path)
    capture.expect("window")
    assert state(one.pid) == "T"
    if how == "lifeline":
        capture.hang_up()
    elif how == "cancel":
        capture.send("cancel")
    else:
        capture.process.send_signal(signal.Signals[how])
    one.runs_on()
    if how != "SIGKILL":
        assert capture.finish()["reason"] == "cancelled"
    empty(one.images)
    one.save()


def test_a_caller_that_does_not_read_keeps_nothing_frozen(kernel: Start) -> None:
    one = holder(kernel, Path("file"))
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 65536)
    os.set_blocking(write, True)
    command = [str(binary()), "dump", "--pid", str(one.pid), "--images-dir", str(one.images)]
    with subprocess.Popen(
        [*command, "--window-dir", str(one.folder)],
        stdin=subprocess.PIPE,
        stdout=write,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.wait(30) == 1
    os.close(write)
    os.close(read)
    one.runs_on()


# Connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["done", "cancel", "SIGKILL"])
def test_tcp_connections_go_on(kernel: Start, tmp_path: Path, how: str) -> None:
    """CRIU silences connections while it saves them; they must speak again, however it ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        one = kernel(
            "import socket\nf = open('file', 'w')\n"
            f"s = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\n"
            "while True: s.sendall(s.recv(100))\n"
        )
        peer, _ = server.accept()
        with peer:
            peer.settimeout(20)
            peer.sendall(b"before")
            assert peer.recv(100) == b"before"
            capture = one.dump("--window-dir", one.folder)
            capture.expect("window")
            peer.sendall(b"during")
            if how == "done":
                capture.send("resume")
                capture.expect("done")
            elif how == "cancel":
                capture.send("cancel")
            else:
                capture.process.kill()
            assert peer.recv(100) == b"during"
            peer.sendall(b"after")
            assert peer.recv(100) == b"after"


def test_a_port_is_free_after_the_tree_whenever_it_was_connected_to(kernel: Start) -> None:
    """Also for connections that are accepted in the instant in which CRIU begins."""
    one = kernel(
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0), backlog=1000)\n"
        "print('port', server.getsockname()[1], flush=True)\n"
        "held = []\n"
        "while True: held.append(server.accept()[0])\n"
    )
    address = ("127.0.0.1", int(one.wait_line("port").split()[1]))
    peers: list[socket.socket] = []
    done = threading.Event()

    def connect() -> None:
        while not done.wait(0.001) and len(peers) < 500:
            peers.append(socket.create_connection(address, 20))

    caller = threading.Thread(target=connect)
    caller.start()
    try:
        wait_until(lambda: len(peers) > 3, "connections")
        one.save()
        done.set()
        caller.join(30)
        one.kill()
        with socket.socket() as next_one:
            next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            next_one.bind(address)
    finally:
        done.set()
        caller.join(30)
        for peer in peers:
            peer.close()


# Undoing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "timeout", "SIGKILL"])
def test_a_dump_that_is_undone_midway(kernel: Start, how: str) -> None:
    one = kernel(BIG.format(megabytes=600))
    one.wait_line("filled", 60)
    capture = one.dump("--timeout", "0.2" if how == "timeout" else "60")
    if how != "timeout":
        # Pages are on their way: the middle of it.
        wait_until(
            lambda: sum(p.stat().st_size for p in one.images.glob("pages-*.img")) > 50 << 20,
            "pages",
        )
        begin = time.monotonic()
        if how == "cancel":
            capture.send("cancel")
        else:
            capture.process.kill()
    if how != "SIGKILL":
        last = capture.finish()
        assert last["reason"] == ("cancelled" if how == "cancel" else "timeout")
        assert capture.wait() == 1
    if how == "cancel":
        assert time.monotonic() - begin < 5
    one.runs_on()
    # It is whole: its memory is untouched, and a dump works.
    empty(one.images)
    one.save()
    one.runs_on()


def test_no_space(kernel: Start, tmp_path: Path) -> None:
    one = kernel(BIG.format(megabytes=200))
    one.wait_line("filled", 60)
    with tmpfs(tmp_path / "small", "40m") as small:
        one.images = small
        capture = one.dump()
        assert capture.finish()["reason"] == "no_space"
        one.runs_on()


@contextmanager
def traced(pid: int) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    seize, detach, interrupt = 0x4206, 17, 0x4207
    assert libc.ptrace(seize, pid, None, None) == 0
    try:
        yield
    finally:
        libc.ptrace(interrupt, pid, None, None)
        os.waitpid(pid, 0x40000000)
        libc.ptrace(detach, pid, None, None)


def test_a_traced_kernel_is_refused_and_runs_on(kernel: Start) -> None:
    one = kernel()
    one.wait_line("tick")
    with traced(one.pid):
        capture = one.dump()
        last = capture.finish()
        assert (last["event"], last["reason"]) == ("error", "criu_failed")
        assert "traced" in last["message"]
        assert str(os.getpid()) in last["message"]
        one.runs_on()
    empty(one.images)
    one.save()


def test_what_criu_refuses_is_named(kernel: Start, tmp_path: Path) -> None:
    """A connected socket whose other end is outside of the tree cannot be saved."""
    path = tmp_path / "outside.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()
        one = kernel(
            f"import socket\ns = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})\n"
            "print('connected', flush=True)\n" + COUNTER
        )
        one.wait_line("connected")
        peer, _ = server.accept()
        with peer:
            capture = one.dump()
            last = capture.finish()
            assert last["reason"] == "criu_failed"
            assert 0 < len(last["criu_errors"]) <= 10
            assert all(len(line.encode()) <= 500 for line in last["criu_errors"])
        one.runs_on()


# Refusals --------------------------------------------------------------------------------------


def test_no_such_process(capture: Run, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dump = capture("dump", "--pid", str(ended.pid), "--images-dir", tmp_path)
    assert dump.finish()["reason"] == "no_process"


def test_no_dump_of_what_it_runs_under(capture: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    dump = capture("dump", "--pid", str(os.getpid()), "--images-dir", tmp_path)
    assert dump.finish()["reason"] == "usage"


def test_image_directories_that_are_not_safe(kernel: Start, tmp_path: Path) -> None:
    one = kernel()
    real = one.images
    link = tmp_path / "link"
    link.symlink_to(real)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 65534, 65534)
    file = tmp_path / "file"
    file.write_text("")
    for path, reason in [
        (link, "usage"),
        (open_to_all, "usage"),
        (foreign, "not_yours"),
        (file, "usage"),
        (tmp_path / "missing", "usage"),
    ]:
        one.images = path
        capture = one.dump()
        assert capture.finish()["reason"] == reason, path
        assert status(one.pid)["State"].startswith(("S", "R"))
