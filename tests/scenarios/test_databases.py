"""Databases that a kernel writes to: a state is never taken in the middle of a transaction."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator

import pytest

from tests.harness.client import wait_for
from tests.harness.server import Home, JupyterServer

#: Half of the time in a transaction, each of them short.
WRITER = """
import sqlite3, threading, time
def write():
    db = sqlite3.connect('work.db')
    db.execute('create table t (x integer)')
    while not stop.is_set():
        db.execute('insert into t values (1)')
        time.sleep(.02)
        db.commit()
        time.sleep(.02)
    db.close()
stop = threading.Event()
thread = threading.Thread(target=write)
thread.start()
"""


@pytest.fixture
def server(home: Home) -> Iterator[JupyterServer]:
    with JupyterServer(home) as running:
        yield running


def test_a_kernel_that_writes_all_the_time(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("write.ipynb"))
    kernel.run(WRITER)
    states = [client.save(kernel)["result"]["state_id"] for _ in range(4)]
    kernel.run("stop.set(); thread.join()")
    for state in states:
        client.restore(state)
        assert kernel.run("stop.set(); thread.join(); print(thread.is_alive())") == "False"
    with sqlite3.connect(server.home.notebooks / "work.db") as database:
        assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
    database.close()


def test_a_transaction_that_the_user_keeps_open(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("open.ipynb"))
    events = client.events()
    kernel.run(
        "import sqlite3; db = sqlite3.connect('own.db', isolation_level=None)\n"
        "db.execute('create table t (x)'); db.execute('begin')\n"
        "db.execute('insert into t values (7)')"
    )
    pid = kernel.pid
    client.save(kernel)
    os.kill(pid, signal.SIGKILL)
    events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert kernel.run("db.execute('commit'); print(*db.execute('select x from t'))") == "(7,)"


def test_the_history_that_kernels_share_where_home_is_node_local(home: Home) -> None:
    """As in containers with HOME=/tmp: the history is not rolled back with one of its kernels."""
    dirs = ["/tmp", "/dev/shm", str(home.path)]
    with JupyterServer(home, config={"GpuCkpt": {"node_local_dirs": dirs}}) as server:
        client = server.client
        events = client.events()
        one, other = (client.start(home.add_notebook(f"{n}.ipynb")) for n in range(2))
        one.run("a = 1")
        client.save(one)
        other.run("b = 2")
        pid = one.pid
        os.kill(pid, signal.SIGKILL)
        event = events.wait_for("kernel", action="restored", kernel_id=one.id)
        assert event["message"] is None
        for kernel, code in ((one, "c = 3"), (other, "d = 4")):
            cell = kernel.execute(code)
            assert (cell.error, cell.stderr, cell.text) == (None, "", "")
        assert not list(home.path.rglob("*.before-restore-*"))
        path = home.path / ".ipython" / "profile_default" / "history.sqlite"

        def lines() -> set[str]:
            with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
                return {line for (line,) in database.execute("select source_raw from history")}

        wait_for("all lines", lambda: {"a = 1", "b = 2", "c = 3", "d = 4"} <= lines(), 10)
