"""Every workload is saved on one node, the node dies, and it goes on on another."""

from __future__ import annotations

import contextlib
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.client import wait_for
from tests.harness.node import Node
from tests.harness.server import Home, JupyterServer, shared_folder
from tests.nodes.workloads import ECHO_PORT, WORKLOADS, Workload

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

ECHO_SERVICE = f"""
import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(100):
            self.request.sendall(data)
socketserver.ThreadingTCPServer(("127.0.0.1", {ECHO_PORT}), Echo).serve_forever()
"""
#: Two workers: as many as the smallest machine that runs the tests has CPUs.
WORKERS = 2


@dataclass
class Saved:
    """A kernel that was saved on the node that died, or why it was not."""

    kernel_id: str = ""
    execution_count: int = 0
    problem: BaseException | None = None


@dataclass
class Store:
    """What is left of the node that died."""

    home: Home
    kernels: dict[str, Saved]


@pytest.fixture(scope="module")
def left(r_kernelspec: Callable[[Home], str]) -> Iterator[Store]:
    """Start every workload on node A, save them all, and let A die."""
    with shared_folder("node-loss") as shared:
        home = Home(shared / "home")
        r_kernelspec(home)
        with (
            Node("node-a", [shared], longer_up=1_000_000) as node,
            JupyterServer(home, node=node) as server,
        ):
            node.popen([sys.executable, "-c", ECHO_SERVICE])

            def start_and_save(workload: Workload) -> Saved:
                saved = Saved()
                try:
                    path = home.add_notebook(f"{workload.name}.ipynb", kernel=workload.kernel)
                    kernel = server.client.start(path, workload.kernel)
                    saved.kernel_id = kernel.id
                    before = kernel.execute(workload.before, timeout=120)
                    assert before.error is None, before.error
                    assert before.reply is not None
                    saved.execution_count = before.reply["execution_count"]
                    server.client.save(kernel, timeout=120)
                except Exception as problem:
                    saved.problem = problem
                return saved

            with ThreadPoolExecutor(WORKERS) as pool:
                results = list(pool.map(start_and_save, WORKLOADS))
            node.kill()
            kernels = {w.name: saved for w, saved in zip(WORKLOADS, results, strict=True)}
            yield Store(home, kernels)


@pytest.fixture(scope="module", params=["empty", "crowded"])
def next_node(left: Store, request: pytest.FixtureRequest) -> Iterator[JupyterServer]:
    """A server on another node: a fresh one, or one full of other processes and kernels."""
    crowded = request.param == "crowded"
    shared = left.home.path.parent
    with (
        Node(f"node-{request.param}", [shared], burn_pids=400 if crowded else 0) as node,
        JupyterServer(left.home, node=node) as server,
    ):
        if crowded:
            others = [server.client.start(), server.client.start(), server.client.start()]
            for number, other in enumerate(others):
                assert other.run(f"import numpy; x = {number}; print(x)") == str(number)
        saved = [kernel for kernel in left.kernels.values() if kernel.problem is None]
        server.client.wait_lost(len(saved))
        yield server
        if crowded:
            for number, other in enumerate(others):
                assert other.run("print(x)") == str(number)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_goes_on_as_if_nothing_had_happened(
    left: Store, next_node: JupyterServer, workload: Workload
) -> None:
    saved = left.kernels[workload.name]
    if saved.problem is not None:
        raise saved.problem
    client = next_node.client

    client.restore_lost(saved.kernel_id)

    kernel = client.connect(saved.kernel_id)
    after = kernel.execute(workload.after, timeout=60)
    assert after.error is None, after.error
    assert after.text.strip() == workload.expected
    assert after.reply is not None
    assert after.reply["execution_count"] == saved.execution_count + 1
    assert "Session/line number was not unique" not in after.stderr
    sessions = client.get("api/sessions")
    assert {s["path"] for s in sessions if s["kernel"]["id"] == kernel.id} == {
        f"{workload.name}.ipynb"
    }
    assert saved.kernel_id not in [lost["kernel_id"] for lost in client.lost()]


def test_the_store_is_private(left: Store) -> None:
    files = 0
    for path in [left.home.store, *left.home.store.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # a server is at work there
            mode = path.lstat().st_mode
            assert mode & 0o077 == 0, path
            files += stat.S_ISREG(mode)
    assert files > len(WORKLOADS)


def test_nothing_of_the_nodes_is_left_outside_of_them() -> None:
    assert not Path("/tmp/notes.txt").exists()
    # CRIU itself makes some for a moment, in saves that other tests make outside of nodes.
    names = Path("/dev/shm")
    wait_for("nothing is left", lambda: not list(names.glob("link_remap*")), 30)
