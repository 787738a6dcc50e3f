"""Saves that cannot succeed: the kernel runs on, older states stay, nothing half is left."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.client import Client, KernelClient, wait_for
from tests.harness.server import Home, JupyterServer

MIB = 1 << 20


def used(folder: Path) -> int:
    """Return the bytes that the files below `folder` take on disk."""
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def images(home: Home) -> list[Path]:
    """Return the memory images that lie around; none while nothing is going on."""
    return [path for path in (home.data / "gpu-ckpt" / "spool").rglob("*") if path.is_file()]


def start_with_data(client: Client, path: str, mib: int) -> KernelClient:
    """Start a kernel holding `mib` MiB that do not compress."""
    kernel = client.start(path)
    assert kernel.run(f"import os; x = 41; data = os.urandom({mib * MIB}); print(len(data))")
    return kernel


def assert_runs_on(kernel: KernelClient) -> None:
    assert kernel.run("x += 1; print(x)").isdigit()


def assert_busy_saving(client: Client, operation: dict[str, object], phase: str) -> None:
    """Wait until the operation is in `phase`, and fail if it ends before."""

    def look() -> bool:
        now = client.get(f"gpu-ckpt/api/operations/{operation['id']}")
        assert now["status"] in ("pending", "running"), now
        return bool(now["phase"] == phase)

    wait_for(f"phase {phase}", look, 30, interval=0.01)


@pytest.fixture
def server(home: Home) -> Iterator[JupyterServer]:
    with JupyterServer(home) as running:
        yield running


REFUSED = {
    "a connection to a service over a Unix socket": """
import socket
service = socket.socket(socket.AF_UNIX); service.connect(SERVICE)
""",
    "a child under a debugger": """
import ctypes, os, signal
pid = os.fork()
if pid == 0:
    ctypes.CDLL(None).ptrace(0, 0, None, None)  # PTRACE_TRACEME: the kernel is the debugger
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
os.waitpid(pid, os.WUNTRACED)
""",
    "a userfaultfd": """
import ctypes, platform
number = {'x86_64': 323, 'aarch64': 282}[platform.machine()]
assert ctypes.CDLL(None).syscall(number, 0) > 0
""",
}
WORDS = {
    "a connection to a service over a Unix socket": "Unix socket",
    "a child under a debugger": "debugger",
    "a userfaultfd": "userfaultfd",
}


@pytest.mark.parametrize("what", REFUSED)
def test_something_criu_refuses(server: JupyterServer, shared: Path, what: str) -> None:
    client = server.client
    service = shared / "service.sock"
    listener = subprocess.Popen(
        ["/usr/bin/env", "python3", "-c",
         "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]);"
         "s.listen(); c, _ = s.accept(); time.sleep(1000)", str(service)],
    )  # fmt: skip
    try:
        wait_for("the service is up", service.exists, 10)
        kernel = client.start(server.home.add_notebook("refused.ipynb"))
        kernel.run("x = 41")
        client.save(kernel)
        older = client.states()
        kernel.run(REFUSED[what].replace("SERVICE", repr(str(service))))

        operation = client.finished(client.begin_save(kernel))

        assert operation["status"] == "failed"
        error = operation["error"]
        # In a user's words, and the technical ones, CRIU's own when it was it, behind "details".
        assert WORDS[what] in error["message"]
        assert "Error (" not in error["message"] and "criu/" not in error["message"]
        assert error["hint"]
        assert error["details"]
        assert error["reason"] == "not_savable" or "Error (criu/" in error["details"], error
        assert_runs_on(kernel)
        assert client.states() == older
        assert not images(server.home)
        assert client.get(f"gpu-ckpt/api/kernels/{kernel.id}")["operation"] is None
    finally:
        listener.kill()
        listener.wait(10)


@pytest.mark.root
@pytest.mark.parametrize("full", ["store", "spool"])
def test_a_full_disk(home: Home, shared: Path, full: str) -> None:
    small = shared / "small"
    small.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200m,mode=700", "tmpfs", str(small)], check=True
    )
    try:
        traits = {"store_url": str(small)} if full == "store" else {"spool_dir": str(small)}
        with JupyterServer(home, config={"GpuCkpt": traits}) as server:
            client = server.client
            kernel = client.start(home.add_notebook("full.ipynb"))
            kernel.run("x = 41")
            client.save(kernel, timeout=30)
            older, before = client.states(), used(small)
            kernel.run(f"import os; data = os.urandom({250 * MIB})")

            operation = client.finished(client.begin_save(kernel))

            assert operation["status"] == "failed"
            assert operation["error"]["reason"] == "no_space", operation
            assert_runs_on(kernel)
            assert client.states() == older
            assert used(small) <= before + MIB
            kernel.run("del data")
            client.save(kernel)  # and it works again once there is room
            assert len(client.states()) == 2
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


@pytest.mark.parametrize("phase", ["dumping", "storing"])
def test_cancelled(server: JupyterServer, phase: str) -> None:
    client, home = server.client, server.home
    kernel = start_with_data(client, home.add_notebook("cancel.ipynb"), 400)
    before = used(home.data)
    operation = client.begin_save(kernel)
    assert_busy_saving(client, operation, phase)

    client.delete(f"gpu-ckpt/api/operations/{operation['id']}")

    operation = client.finished(operation, timeout=15)
    assert operation["status"] == "cancelled"
    assert_runs_on(kernel)
    assert client.states() == []
    assert used(home.data) <= before + MIB
    client.save(kernel)


@pytest.mark.parametrize("phase", ["dumping", "storing"])
def test_the_server_is_killed(home: Home, phase: str) -> None:
    with JupyterServer(home) as server:
        client = server.client
        kernel = client.start(home.add_notebook("killed.ipynb"))
        kernel.run("x = 41")
        client.save(kernel)
        older, before = client.states(), used(home.store)
        kernel.run(f"import os; x += 1; data = os.urandom({400 * MIB})")
        operation = client.begin_save(kernel)
        assert_busy_saving(client, operation, phase)
        children = server.process.children(recursive=True)

        server.kill(kernels=False)

        # Its kernels end with it, and whatever was working on them.
        wait_for("all ends", lambda: not any(c.is_running() for c in children), 30)
        port = server.port
    with JupyterServer(home, port=port) as server:
        client = server.client
        assert client.states() == older
        assert [lost["state"]["id"] for lost in client.wait_lost(1)] == [older[0]["id"]]
        wait_for("images are removed", lambda: not images(home), 10)
        wait_for("so is what was stored", lambda: used(home.store) <= before + MIB, 30)
        client.restore_lost(kernel.id)
        assert client.connect(kernel.id).run("print(x)") == "41"


def test_saves_at_the_same_moment_do_not_fail_each_other(server: JupyterServer) -> None:
    # CRIU gives semaphores names in /dev/shm while it dumps, numbered from one in each save.
    client = server.client
    kernels = [client.start(f"{name}.ipynb") for name in ("one", "two")]
    for kernel in kernels:
        kernel.run(
            "import multiprocessing; spawn = multiprocessing.get_context('spawn')\n"
            "locks = [spawn.Lock() for _ in range(40)]; x = 41"
        )
    for _ in range(2):
        begun = [client.begin_save(kernel) for kernel in kernels]
        for operation in begun:
            client.done(operation)
    for kernel in kernels:
        assert_runs_on(kernel)
