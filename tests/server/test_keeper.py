"""Saving and rolling back, beyond what the API's own tests say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.harness.client import ApiError, KernelClient, wait_for
from tests.harness.server import Home, JupyterServer

Start = Callable[..., KernelClient]


def test_saves_tell_what_the_kernel_was_doing(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("import time")
    server.client.save(kernel, label="idle")
    cell = kernel.begin("print('on')\nfor _ in range(600): time.sleep(0.05)").wait_text("on")
    server.client.save(kernel, label="busy")
    server.client.post(f"api/kernels/{kernel.id}/interrupt")
    cell.finish()
    question = kernel.begin("input('? ')")
    question.wait_input()
    server.client.save(kernel, label="asking")
    question.answer("")
    question.finish()
    states = {s["label"]: s for s in server.client.states(kernel=kernel.id)}
    told = {
        label: (state["execution_state"], state["execution_count"])
        for label, state in states.items()
    }
    assert told == {"idle": ("idle", 1), "busy": ("busy", 2), "asking": ("busy", 3)}
    events = server.client.events()
    server.client.restore(states["busy"]["id"])
    event = events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert (event["in_flight_msg_id"], event["cause"]) == (cell.msg_id, "user")
    server.client.wait_state(kernel.id, "busy")
    server.client.post(f"api/kernels/{kernel.id}/interrupt")
    wait_for("idle again", lambda: server.client.execution_state(kernel.id) == "idle", 20)


def test_roll_back_while_another_cell_runs(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("x = 41")
    state = server.client.save(kernel)["state_id"]
    kernel.begin("import time; x = 0; print('on'); time.sleep(999)").wait_text("on")
    server.client.restore(state)
    wait_for("idle", lambda: server.client.execution_state(kernel.id) == "idle", 10)
    kernel.wait("the page hears of it", lambda: last_state(kernel) == "idle", 10)
    assert kernel.run("print(x + 1)") == "42"


def test_what_a_state_lacks_is_said(server: JupyterServer, start: Start) -> None:
    kernel = start()
    # A daemon whose session leader is gone comes back beside the kernel's own tree.
    daemon = kernel.run(
        "import subprocess\n"
        "print(subprocess.run(['setsid', 'sh', '-c', 'sleep 1000 >/dev/null 2>&1 & echo $!'],"
        " stdout=subprocess.PIPE, text=True).stdout)"
    ).strip()
    first = server.client.save(kernel)["result"]
    assert first["warnings"] == []
    server.client.restore(first["state_id"])
    assert psutil.pid_exists(int(daemon))
    second = server.client.save(kernel)["result"]
    assert [w for w in second["warnings"] if f"sleep ({daemon})" in w]
    assert server.client.states(kernel=kernel.id)[0]["warnings"] == second["warnings"]


def last_state(kernel: KernelClient) -> str:
    """What a page shows: the last status on iopub, whoever asked for what it did."""
    states = [m["content"] for m in kernel.messages if m["header"]["msg_type"] == "status"]
    return str(states[-1]["execution_state"])


def test_children_and_threads_come_back(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run(
        "import subprocess, threading, queue\n"
        "cat = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "asked, answered = queue.Queue(), queue.Queue()\n"
        "def serve():\n"
        "    while True: answered.put(asked.get() + 1)\n"
        "threading.Thread(target=serve, daemon=True).start()"
    )
    ask = (
        "cat.stdin.write(b'meow\\n'); cat.stdin.flush(); asked.put(41)\n"
        "print(cat.stdout.readline(), answered.get(timeout=10))"
    )
    state = server.client.save(kernel)["state_id"]
    assert kernel.run(ask) == "b'meow\\n' 42"
    kernel.run("cat.kill()")
    server.client.restore(state)
    assert kernel.run(ask) == "b'meow\\n' 42"


def test_a_copy_lives_a_life_of_its_own(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("x = 1")
    state = server.client.save(kernel)["state_id"]
    copies = [server.client.restore(state, mode="new")["result"]["kernel_id"] for _ in range(2)]
    assert len({kernel.id, *copies}) == 3
    first, second = (server.client.connect(copy) for copy in copies)
    first.run("x = 2")
    second.run("x = 3")
    assert [k.run("print(x)") for k in (kernel, first, second)] == ["1", "2", "3"]
    # One is saved, and restored from that, without disturbing the others.
    own = server.client.save(second)["state_id"]
    second.run("x = 4")
    server.client.restore(own)
    assert [k.run("print(x)") for k in (kernel, first, second)] == ["1", "2", "3"]
    for copy in copies:
        server.client.delete(f"api/kernels/{copy}")
    assert kernel.run("print(x)") == "1"


def test_a_copy_that_dies_comes_back(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("x = 1")
    state = server.client.save(kernel)["state_id"]
    copy = server.client.connect(server.client.restore(state, mode="new")["result"]["kernel_id"])
    copy.run("x = 2")
    events = server.client.events()
    copy.begin("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    events.wait_for("kernel", action="restored", kernel_id=copy.id, cause="death")
    assert copy.run("print(x)") == "1"
    assert kernel.run("print(x)") == "1"
    server.client.delete(f"api/kernels/{copy.id}")


def test_unknown_and_busy(server: JupyterServer, start: Start) -> None:
    client = server.client
    for method, path, reason in (
        ("POST", "kernels/no-such-kernel/save", "unknown_kernel"),
        ("GET", "kernels/no-such-kernel", "unknown_kernel"),
        ("POST", "states/20200101T000000Z-00000000/restore", "unknown_state"),
        ("DELETE", "states/20200101T000000Z-00000000", "unknown_state"),
        ("DELETE", "operations/0123456789", "unknown_operation"),
    ):
        with pytest.raises(ApiError) as refused:
            client.request(method, f"gpu-ckpt/api/{path}", body={} if method == "POST" else None)
        assert (refused.value.status, refused.value.body["reason"]) == (404, reason)
    kernel = start()
    kernel.run("import os; data = os.urandom(300 << 20)")
    first = client.begin_save(kernel)
    for path in (f"kernels/{kernel.id}/save",):
        with pytest.raises(ApiError) as refused:
            client.post(f"gpu-ckpt/api/{path}")
        assert (refused.value.status, refused.value.body["reason"]) == (409, "busy")
    assert client.done(first)["progress"] == 1.0


def test_a_failed_roll_back_leaves_the_running_kernel_alone(
    server: JupyterServer, start: Start, lasting_home: Home
) -> None:
    kernel = start()
    kernel.run("x = 'saved'")
    state = server.client.save(kernel)["state_id"]
    kernel.run("x = 'later'")
    pid = kernel.pid
    (packs,) = lasting_home.store.glob("*/packs")
    kept = lasting_home.path / "packs-kept"
    packs.rename(kept)
    try:
        operation = server.client.finished(
            dict(server.client.post(f"gpu-ckpt/api/states/{state}/restore", {"mode": "rollback"}))
        )
    finally:
        if packs.exists():
            packs.rmdir()
        kept.rename(packs)
    assert operation["status"] == "failed"
    assert operation["error"]["reason"] == "state_damaged"
    assert (kernel.run("print(x)"), kernel.pid) == ("later", pid)
    server.client.restore(state)
    assert kernel.run("print(x)") == "saved"


def test_a_restore_is_cancelled_while_criu_is_at_work(server: JupyterServer, start: Start) -> None:
    """Nothing of the kernel stays, and the state is as good as before."""
    client, kernel = server.client, start()
    kernel.run("import os; data = os.urandom(200_000_000)")
    state, pid = client.save(kernel)["state_id"], kernel.pid
    client.delete(f"api/kernels/{kernel.id}")

    operation = dict(client.post(f"gpu-ckpt/api/states/{state}/restore", {}))
    wait_for("the first process is there", lambda: psutil.pid_exists(pid), 30, 0.001)
    siblings = psutil.Process(psutil.Process(pid).ppid()).children()
    (criu,) = (one for one in siblings if one.name() == "criu" and one.pid != pid)
    criu.suspend()  # it could not finish any more
    client.delete(f"gpu-ckpt/api/operations/{operation['id']}")
    operation = client.finished(operation)
    assert (operation["status"], operation["error"]["reason"]) == ("cancelled", "cancelled")
    assert not psutil.pid_exists(pid)
    assert kernel.id not in [other["id"] for other in client.get("api/kernels")]

    client.restore(state)
    assert client.connect(kernel.id).run("print(len(data))") == "200000000"


def test_restarting_while_it_is_saved_cancels_the_save(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("import os; data = os.urandom(400 << 20)")
    operation = server.client.begin_save(kernel)
    restarting = threading.Thread(
        target=server.client.post, args=(f"api/kernels/{kernel.id}/restart",)
    )
    restarting.start()
    ended = server.client.finished(operation)
    restarting.join(60)
    assert ended["status"] in ("cancelled", "failed"), ended
    assert server.client.states(kernel=kernel.id) == []
    assert server.client.connect(kernel.id).run("print('fresh')") == "fresh"


def test_no_working_files_stay(
    server: JupyterServer, start: Start, lasting_home: Home, tmp_path: Path
) -> None:
    kernel = start()
    # Open under a name that is gone, of a file that has another: CRIU gives it one of its own.
    kernel.run(
        f"import os; file = open({str(tmp_path / 'gone')!r}, 'w+'); file.write('kept')\n"
        f"os.link(file.name, {str(tmp_path / 'other')!r}); os.unlink(file.name)"
    )
    state = server.client.save(kernel)["state_id"]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    server.client.restore(state)
    assert kernel.run("_ = file.seek(0); print(file.read())") == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    spool = lasting_home.data / "gpu-ckpt" / "spool"
    assert not [path for path in spool.rglob("*") if path.is_file()]


def test_a_state_comes_back_without_the_log_that_its_kernel_had_open(
    server: JupyterServer, start: Start, lasting_home: Home
) -> None:
    kernel = start()
    kernel.run("x = 41")
    state = server.client.save(kernel)["state_id"]
    server.client.delete(f"api/kernels/{kernel.id}")
    log = lasting_home.data / "gpu-ckpt" / "logs" / f"{kernel.id}.log"
    log.unlink()
    server.client.restore(state)
    again = server.client.connect(kernel.id)
    assert again.run("print(x + 1)") == "42"
    again.run("import os; os.write(1, b'in the new log')")
    wait_for("it is in the log", lambda: "in the new log" in log.read_text(), 10)
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_store_that_cannot_be_written(home: Home) -> None:
    nowhere = home.path / "file"
    nowhere.touch()
    config = {"GpuCkpt": {"store_url": str(nowhere / "store")}}
    with JupyterServer(home, config=config) as server:
        kernel = server.client.start()
        kernel.run("x = 41")
        operation = server.client.finished(server.client.begin_save(kernel))
        assert operation["error"]["reason"] == "store_unavailable"
        assert kernel.run("print(x + 1)") == "42"
        checks = server.client.get("gpu-ckpt/api/doctor")["checks"]
        assert [c["status"] for c in checks if c["name"] == "store"] == ["problem"]
        assert psutil.pid_exists(kernel.pid)
