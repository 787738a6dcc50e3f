"""Databases that a kernel writes to: a state is never taken in the middle of a transaction."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.client import wait_for
from tests.harness.server import Home, JupyterServer, shared_folder

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


@pytest.fixture(scope="module")
def server() -> Iterator[JupyterServer]:
    with shared_folder("databases") as folder, JupyterServer(Home(folder / "home")) as running:
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


#: Opens a database in WAL mode and puts a row into it.
WAL = """
import sqlite3
db = sqlite3.connect({name!r}, isolation_level=None)
db.execute('pragma journal_mode=wal')
db.execute('create table t (x)'); db.execute('insert into t values (1)')
"""
ROWS = "print(*[x for (x,) in db.execute('select x from t order by x')])"


def use_elsewhere(path: Path, row: int) -> None:
    """Another program adds a row, and closes the database as the last one."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("insert into t values (?)", (row,))


def test_wal_mode_where_the_database_was_closed_by_all_since(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("closed.ipynb"))
    kernel.run(WAL.format(name="closed.db"))
    result = client.save(kernel)["result"]
    assert result["warnings"] == []
    kernel.run("db.close()")
    path = server.home.notebooks / "closed.db"
    use_elsewhere(path, 2)
    assert not list(path.parent.glob("closed.db-*"))
    client.restore(result["state_id"])
    # The kernel's old connection sees what others have written since, and writes itself.
    assert kernel.run(ROWS) == "1 2"
    assert kernel.run(f"db.execute('insert into t values (3)'); {ROWS}") == "1 2 3"
    use_elsewhere(path, 4)
    assert kernel.run(f"{ROWS}; print(*db.execute('pragma integrity_check'))") == (
        "1 2 3 4\n('ok',)"
    )


def test_wal_mode_where_the_log_has_grown_since(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("grown.ipynb"))
    kernel.run(WAL.format(name="grown.db"))
    state = client.save(kernel)["result"]["state_id"]
    # More than one region of the index that processes share, so that its file grows too.
    kernel.run(
        "db.execute('pragma wal_autocheckpoint=0'); db.execute('pragma synchronous=off')\n"
        "for i in range(4100): db.execute('update t set x = ?', (i,))"
    )
    assert (server.home.notebooks / "grown.db-shm").stat().st_size == 65536
    client.restore(state)
    assert kernel.run(f"db.execute('insert into t values (9999)'); {ROWS}") == "4099 9999"


def test_wal_mode_in_a_transaction(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("within.ipynb"))
    kernel.run(WAL.format(name="within.db"))
    kernel.run("db.execute('begin'); db.execute('insert into t values (2)')")
    events = client.events()
    pid = kernel.pid
    result = client.save(kernel)["result"]
    (warning,) = result["warnings"]
    assert "transaction is open in" in warning and "within.db" in warning
    # Nothing else has happened to the database: it goes on.
    os.kill(pid, signal.SIGKILL)
    events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert kernel.run(f"db.execute('commit'); {ROWS}") == "1 2"
    # By now the transaction would overwrite what came after it.
    operation = client.finished(
        client.post(f"gpu-ckpt/api/states/{result['state_id']}/restore", {"mode": "rollback"})
    )
    assert operation["status"] == "failed"
    assert operation["error"]["reason"] == "not_restorable"
    assert "was in a transaction of the database" in operation["error"]["message"]
    assert kernel.run(ROWS) == "1 2"


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
