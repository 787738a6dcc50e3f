"""Hibernation: saved and stopped, and back as soon as somebody needs the kernel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from jupyter_gpu_ckpt.doorman import HeldMessage, Kept
from tests.harness.client import EventStream, KernelClient, wait_for
from tests.harness.server import Home, JupyterServer
from tests.server.pages import WIDGET, BinaryPage, open_widget
from tests.server.rest import Api, metrics
from tests.server.shell import Shell

Start = Callable[..., KernelClient]


@pytest.fixture
def events(server: JupyterServer) -> EventStream:
    return server.client.events()


def hibernate(api: Api, kernel: KernelClient) -> str:
    """Hibernate a kernel; return the state that it wakes from."""
    # The server hears of a cell's end a moment after its page.
    wait_for("it is idle", lambda: state_of(api, kernel) == "idle", 30)
    return str(api.done(f"/kernels/{kernel.id}/hibernate")["state_id"])


def state_of(api: Api, kernel: KernelClient) -> str:
    return str(api.get(f"/kernels/{kernel.id}")["execution_state"])


def is_idle(api: Api, kernel: KernelClient) -> None:
    wait_for("it is awake and idle", lambda: state_of(api, kernel) == "idle", 30)


@contextmanager
def own_client(home: Home, kernel: KernelClient) -> Iterator[BlockingKernelClient]:
    """A client on the kernel's own sockets, of which its server does not hear."""
    client = BlockingKernelClient()
    client.load_connection_file(str(home.data / "runtime" / f"kernel-{kernel.id}.json"))
    client.start_channels()
    try:
        client.wait_for_ready(timeout=30)
        yield client
    finally:
        client.stop_channels()


def resident(pid: int) -> int:
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])


def test_frees_the_memory_and_wakes_for_a_cell(
    server: JupyterServer, api: Api, start: Start, events: EventStream
) -> None:
    kernel = start()
    kernel.run("import subprocess; child = subprocess.Popen(['sleep', '600'])")
    kernel.run("x = bytearray(b'x') * (64 << 20)")
    pid = kernel.pid
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert resident(pid) > 64 << 20 and len(tree) == 2
    state = hibernate(api, kernel)
    assert not any(process.is_running() for process in tree)
    assert state_of(api, kernel) == "hibernated"
    assert kernel.id in [running["id"] for running in server.client.get("api/kernels")]
    session = [s for s in server.client.get("api/sessions") if s["kernel"]["id"] == kernel.id]
    assert len(session) == 1
    # Looked at by a page that is open it sleeps on; an interrupt has nothing to do.
    kernel.send("shell", "comm_info_request", {})
    server.client.post(f"api/kernels/{kernel.id}/interrupt")
    refused = api.error("POST", f"/kernels/{kernel.id}/save", 422)
    assert "hibernated" in refused["message"]
    assert api.error("DELETE", f"/states/{state}", 409)["reason"] == "busy"
    assert state_of(api, kernel) == "hibernated"
    # Several at once: each runs once, in order, in the process that was saved.
    cells = [kernel.begin(f"print(len(x), {n}, child.poll())") for n in range(5)]
    for number, cell in enumerate(cells):
        cell.finish()
        assert cell.text.strip() == f"{64 << 20} {number} None"
        assert cell.reply is not None and cell.reply["execution_count"] == 4 + number
    assert kernel.pid == pid
    event = events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert (event["cause"], event["state_id"]) == ("wake", state)
    assert metrics(server)['gpu_ckpt_recovery_seconds_count{cause="wake"}'] >= 1
    shown = [
        m["content"]["execution_state"]
        for m in kernel.messages
        if m["header"]["msg_type"] == "status"
    ]
    assert not {"restarting", "autorestarting", "dead"} & set(shown)
    is_idle(api, kernel)


def test_saves_only_what_changed_and_wakes_for_a_page(
    server: JupyterServer, api: Api, lasting_home: Home, start: Start
) -> None:
    kernel = start()
    kernel.run("x = 41")
    server.client.save(kernel)
    saved = server.client.save(kernel)["state_id"]  # begun when all of the cell's end was heard
    assert hibernate(api, kernel) == saved
    assert api.error("POST", f"/kernels/{kernel.id}/hibernate", 422)["reason"] == "not_savable"
    page = server.client.connect(kernel.id)
    is_idle(api, kernel)
    assert page.run("x += 1; print(x)") == "42"
    shell = Shell(lasting_home)
    newer = shell.json("hibernate", kernel.id)["result"]["state_id"]
    assert newer != saved
    assert shell.json("wake", kernel.id)["result"]["state_id"] == newer
    assert api.error("POST", f"/kernels/{kernel.id}/wake", 400)["reason"] == "bad_request"
    assert kernel.run("print(x)") == "42"


def test_a_kernel_at_work_is_left_alone(server: JupyterServer, api: Api, start: Start) -> None:
    kernel = start()
    cell = kernel.begin("print('on'); a = input()").wait_text("on")
    assert api.failed(f"/kernels/{kernel.id}/hibernate")["reason"] == "busy"
    cell.wait_input()
    cell.answer("b")
    cell.finish()
    assert kernel.run("print(a)") == "b"


def test_used_while_it_is_saved_it_runs_on(
    server: JupyterServer, api: Api, start: Start, events: EventStream
) -> None:
    kernel = start()
    kernel.run("import os; data = os.urandom(128 << 20)")  # so that storing takes a moment
    pid = kernel.pid
    operation = api.begin(f"/kernels/{kernel.id}/hibernate")
    events.wait_for("operation", phase="storing", kernel_id=kernel.id)
    assert kernel.run("n = 1; print(n)") == "1"
    ended = api.finish(operation)
    assert (ended["status"], ended["error"]["reason"]) == ("failed", "busy")
    assert kernel.run("print(n)") == "1" and kernel.pid == pid


def test_used_through_its_own_sockets_it_runs_on(
    server: JupyterServer, api: Api, lasting_home: Home, start: Start, events: EventStream
) -> None:
    kernel = start()
    kernel.run("import os; data = os.urandom(128 << 20)")  # so that storing takes a moment
    with own_client(lasting_home, kernel) as client:
        operation = api.begin(f"/kernels/{kernel.id}/hibernate")
        events.wait_for("operation", phase="storing", kernel_id=kernel.id)
        assert client.execute_interactive("n = 1", timeout=30)["content"]["status"] == "ok"
        ended = api.finish(operation)
    assert (ended["status"], ended["error"]["reason"]) == ("failed", "busy")
    assert kernel.run("print(n)") == "1"


@pytest.mark.parametrize("is_last", [False, True], ids=["another-page-open", "the-only-page"])
def test_a_page_that_goes_leaves_its_messages(
    server: JupyterServer, api: Api, start: Start, events: EventStream, is_last: bool
) -> None:
    kernel = start()
    kernel.run("x = 1")
    page = BinaryPage(server, kernel)
    if is_last:
        kernel.close()
    hibernate(api, kernel)
    page.send("debug_request", {"type": "request", "seq": 1, "command": "debugInfo"}, "control")
    page.send_text("not a message")
    page.send("execute_request", {"code": "x += 1", "silent": False, "allow_stdin": False})
    page.close()
    again = server.client.connect(kernel.id)
    again.run("x += 10")
    wait_for("both cells ran", lambda: again.run("print(x)") == "12", 30)
    is_idle(api, kernel)
    event = events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert event["cause"] == "wake"
    assert events.of("operation", kernel_id=kernel.id, status="failed") == []


def test_a_widget_wakes_it_and_both_of_its_pages_go_on(
    server: JupyterServer, api: Api, start: Start
) -> None:
    kernel = start()
    kernel.run(WIDGET)
    widget = open_widget(kernel)
    page = server.client.connect(kernel.id)
    hibernate(api, kernel)
    page.send("shell", "comm_msg", {"comm_id": widget, "data": {"n": 1}})
    cells = [one.begin("moved.append(9); print(moved)") for one in (kernel, page)]
    said = sorted((cell.finish().text.strip() for cell in cells), key=len)
    assert said[1].count("9") == 2 and said[1].count("1") == 1, "each once, and nothing is lost"
    assert said[0].count("9") == 1
    is_idle(api, kernel)
    page.send("shell", "comm_msg", {"comm_id": widget, "data": {"n": 2}})
    assert page.run("print(sorted(moved))") == "[1, 2, 9, 9]"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_gpu_ckpt.doorman._MOST_BYTES", 1000)
    kept = Kept()
    cells = [json.dumps({"header": {"msg_type": kind, "msg_id": kind}, "content": {}})
             for kind in ("execute_request", "comm_msg")]  # fmt: skip
    messages = [HeldMessage(SimpleNamespace(subprotocol=None), cell.ljust(400)) for cell in cells]
    assert all(kept.add(message) for message in messages)
    assert not kept.add(messages[0]), "300 bytes are left"
    assert kept.left_out == 0, "whose cell is answered is told"
    assert kept.take(only_cells=True) == messages[:1] and list(kept) == messages[1:]
    assert kept.add(messages[0])
    assert kept.take() == [*reversed(messages)] and len(kept) == 0


def test_damage_is_noted_and_the_next_try_saves_anew(
    server: JupyterServer, api: Api, lasting_home: Home, start: Start
) -> None:
    kernel = start()
    kernel.run("import os; x, data = 41, os.urandom(8 << 20)")
    first = server.client.save(kernel)["state_id"]
    saved = server.client.save(kernel)["state_id"]  # begun when all of the cell's end was heard
    for state in (first, saved):
        for pack in lasting_home.store.glob(f"*/packs/*/{state}-*.pack"):
            with pack.open("r+b") as file:
                file.seek(64)
                file.write(bytes(64))
    assert api.failed(f"/kernels/{kernel.id}/hibernate")["reason"] == "state_damaged"
    assert api.get(f"/states/{saved}")["damage"]
    assert hibernate(api, kernel) != saved
    assert kernel.run("print(x)") == "41"


def test_a_failed_wake_leaves_the_state_and_tells_the_cell(
    server: JupyterServer, api: Api, lasting_home: Home, start: Start, events: EventStream
) -> None:
    kernel = start()
    kernel.run("import os; x, data = 41, os.urandom(8 << 20)")
    state = hibernate(api, kernel)
    (record,) = lasting_home.store.glob(f"*/kernels/{kernel.id}/states/{state}.json")
    hidden = record.with_suffix(".away")
    record.rename(hidden)
    cell = kernel.execute("x")
    assert "did not wake" in (cell.error or "")
    told = {"action": "restore_failed", "kernel_id": kernel.id}
    event = events.wait_for("kernel", **told)
    assert (event["cause"], event["state_id"]) == ("wake", state)
    assert event["held_msg_ids"] == [cell.msg_id]
    assert state_of(api, kernel) == "hibernated"
    # Where a widget was to wake it no cell can say so: its page reads why.
    kernel.send("shell", "comm_msg", {"comm_id": "a widget", "data": {}})
    events.wait("it is told again", lambda: len(events.of("kernel", **told)) == 2, 30)
    assert events.of("kernel", **told)[1]["held_msg_ids"] == []
    error = api.get(f"/kernels/{kernel.id}")["error"]
    assert error["reason"] == "restore_failed"
    assert event["message"].partition(".")[0] in error["message"]
    assert "run a cell to try again" in error["hint"]
    hidden.rename(record)
    assert kernel.run("print(x)") == "41"
    assert api.get(f"/kernels/{kernel.id}")["error"] is None


def test_restart_and_shutdown_forget_it(server: JupyterServer, api: Api, start: Start) -> None:
    kernel = start()
    kernel.run("x = 1")
    hibernate(api, kernel)
    server.client.post(f"api/kernels/{kernel.id}/restart")
    again = server.client.connect(kernel.id)
    assert "NameError" in (again.execute("x").error or "")
    is_idle(api, kernel)
    again.run("x = 2")
    state = hibernate(api, kernel)
    server.client.delete(f"api/kernels/{kernel.id}")
    assert kernel.id not in [k["id"] for k in server.client.get("api/kernels")]
    assert state in [s["id"] for s in server.client.states(kernel=kernel.id)]
    assert kernel.id not in [k["kernel_id"] for k in server.client.lost()]


def test_an_older_state_can_be_put_in_its_place(
    server: JupyterServer, api: Api, start: Start
) -> None:
    kernel = start()
    kernel.run("x = 1")
    older = server.client.save(kernel)["state_id"]
    kernel.run("x = 2")
    hibernate(api, kernel)
    server.client.restore(older)
    is_idle(api, kernel)
    assert kernel.run("print(x)") == "1"


def test_the_next_server_offers_it(home: Home) -> None:
    config = {"AutoSave": {"before_shutdown": False}}
    with JupyterServer(home, config=config) as server:
        kernel = server.client.start(home.add_notebook("book.ipynb"))
        kernel.run("x = 41")
        hibernate(Api(server), kernel)
        server.stop()
    for end, x in (("kill", 42), ("stop", 43)):
        with JupyterServer(home, config=config) as server:
            (lost,) = server.client.wait_lost(1)
            assert (lost["kernel_id"], lost["path"]) == (kernel.id, "book.ipynb")
            assert lost["why"] == "hibernated", "nothing of it is lost"
            server.client.restore_lost(kernel.id)
            kernel = server.client.connect(kernel.id)
            assert kernel.run("x += 1; print(x)") == str(x)
            if end == "kill":
                hibernate(Api(server), kernel)
            else:
                server.client.save(kernel)
                lost_awake = server.client.start(home.add_notebook("awake.ipynb"))
                lost_awake.run("y = 1")
                server.client.save(lost_awake)
                hibernate(Api(server), kernel)
                server.kill()
    # Where lost kernels come back unasked, what was hibernated stays so.
    always = {"GpuCkpt": {"restore_on_start": "always", "lease_interval": 0.5}, **config}
    with JupyterServer(home, config=always) as server:
        client = server.client
        wait_for("what ran is back", lambda: client.get("api/kernels"), 30)
        time.sleep(1.5)  # two more looks
        assert [k["id"] for k in client.get("api/kernels")] == [lost_awake.id]
        (lost,) = client.lost()
        assert (lost["kernel_id"], lost["why"]) == (kernel.id, "hibernated")


def test_idle_kernels_hibernate_and_are_not_culled(home: Home) -> None:
    config: dict[str, dict[str, Any]] = {
        "AutoSave": {"idle": 0.2, "hibernate": 0.4, "shortest": 0.0},
        "MappingKernelManager": {
            "cull_idle_timeout": 2,
            "cull_interval": 1,
            "cull_connected": True,
        },
    }
    with JupyterServer(home, config=config) as server:
        api = Api(server)
        kernel = server.client.start(home.add_notebook("book.ipynb"))
        kernel.run("x = 41")
        pid = kernel.pid
        wait_for("it is hibernated", lambda: state_of(api, kernel) == "hibernated", 30)
        assert not psutil.pid_exists(pid)
        # One that came later and ran nothing is ended, so the culler saw both.
        server.client.start(home.add_notebook("other.ipynb"))
        wait_for("the culler came by", lambda: len(server.client.get("api/kernels")) == 1, 30)
        assert state_of(api, kernel) == "hibernated"
        assert kernel.run("x += 1; print(x)") == "42"
        wait_for("it is hibernated again", lambda: state_of(api, kernel) == "hibernated", 30)
