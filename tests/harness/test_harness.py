"""The harness itself, proved on stock Jupyter: what it reports of a product must be true."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from tests.harness.node import Node
from tests.harness.server import Home, JupyterServer
from tests.harness.user import User


def test_a_node_has_its_own_everything_but_the_shared_folder(shared: Path) -> None:
    Path("/tmp/of-the-machine").touch()
    (shared / "note").write_text("kept")
    with Node("node-a", [shared], burn_pids=60) as node:
        assert node.run(["hostname"]).stdout.strip() == "node-a"
        for folder in ("/tmp", "/run", "/dev/shm", "/var/tmp"):
            assert node.run(["find", folder, "-mindepth", "1", "-type", "f"]).stdout == ""
        assert node.run(["cat", str(shared / "note")]).stdout == "kept"
        assert node.run(["ip", "-brief", "link"]).stdout.split()[0] == "lo"
        processes = node.run(["ls", "/proc"]).stdout.split()
        assert {str(pid) for pid in range(1, 61)} <= set(processes)
    os.unlink("/tmp/of-the-machine")


def test_a_node_may_have_been_up_longer(shared: Path) -> None:
    with Node("node-a", [shared], longer_up=1_000_000) as node:
        up = float(node.run(["cat", "/proc/uptime"]).stdout.split()[0])
        assert 1_000_000 <= up - time.clock_gettime(time.CLOCK_BOOTTIME) + 60 < 1_000_120


def test_a_node_dies_at_once_with_everything_on_it(shared: Path) -> None:
    node = Node("node-a", [shared])
    sleeper = node.popen(["sleep", "1000"])
    node.kill()
    assert sleeper.wait(10) != 0


@pytest.mark.parametrize("on_node", [False, True], ids=["here", "on-a-node"])
def test_stock_server_runs_cells_and_dies_with_its_kernels(
    shared: Path, home: Home, on_node: bool
) -> None:
    node = Node("node-a", [shared]) if on_node else None
    try:
        server = JupyterServer(home, node=node, extension=False)
        kernel = server.client.start(home.add_notebook("a.ipynb"))
        assert kernel.run("x = 41; print(x + 1)") == "42"
        assert kernel.run("import socket; print(socket.gethostname())") == (
            "node-a" if on_node else socket.gethostname()
        )
        asked = kernel.begin("print('hello', input('name? '))")
        asked.answer("you")
        assert asked.finish().text == "hello you\n"
        failed = kernel.execute("1/0")
        assert failed.error is not None and failed.error.startswith("ZeroDivisionError")
        pid = server.host_pid(kernel.pid)
        server.kill()
        assert not Path(f"/proc/{pid}").exists()
    finally:
        if node is not None:
            node.kill()


def test_an_ordinary_user_runs_a_server_on_a_node(shared: Path) -> None:
    user = User()
    home = Home(shared / "home", user)
    with (
        Node("node-a", [shared], for_users=True) as node,
        JupyterServer(home, node=node, extension=False) as server,
    ):
        kernel = server.client.start()
        assert kernel.run("import os; print(os.getuid(), os.path.expanduser('~'))") == (
            f"{user.uid} {home.path}"
        )
