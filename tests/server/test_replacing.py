"""Cells that are run while a restored kernel takes the place of the one that a page has."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import pytest

from tests.harness.client import EventStream, KernelClient, wait_for
from tests.harness.node import REPOSITORY
from tests.harness.server import Home, JupyterServer
from tests.server.pages import WIDGET, BinaryPage, open_widget

Start = Callable[..., KernelClient]
BIG = "import os; data = os.urandom(64 << 20)"  # so that reading it takes a moment


@pytest.fixture
def events(server: JupyterServer) -> EventStream:
    return server.client.events()


def roll_back(server: JupyterServer, state_id: str) -> dict[str, str]:
    """Begin to put a state in the place of its kernel."""
    return dict(server.client.post(f"gpu-ckpt/api/states/{state_id}/restore"))


def test_of_a_roll_back_they_run_in_the_restored_kernel(
    server: JupyterServer, start: Start, events: EventStream
) -> None:
    kernel, other = start(), start()
    kernel.run(BIG)
    kernel.run(f"{WIDGET}\nx = 0")
    widget = open_widget(kernel)
    state = server.client.save(kernel)["state_id"]
    kernel.run("x = 100")
    operation = roll_back(server, state)
    kernel.send("shell", "comm_msg", {"comm_id": widget, "data": {"n": 7}})
    cells = [kernel.begin("x += 1; print(x)") for _ in range(3)]
    assert other.run("print(6 * 7)") == "42"  # another kernel is none of it
    assert [cell.finish().text.strip() for cell in cells] == ["1", "2", "3"]
    server.client.done(operation)
    event = events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    ids = [cell.msg_id for cell in cells]
    assert event["held_msg_ids"] == ids[: len(event["held_msg_ids"])]
    assert event["held_msg_ids"][:1] == ids[:1]
    assert kernel.run("print(moved)") == "[7]", "a widget was moved meanwhile"


def test_of_a_dead_kernel_they_run_in_the_restored_one(
    server: JupyterServer, start: Start, events: EventStream
) -> None:
    kernel = start()
    kernel.run(f"{BIG}; x = 41")
    server.client.save(kernel)
    os.kill(kernel.pid, signal.SIGKILL)
    events.wait_for("operation", phase="reading", kernel_id=kernel.id)
    cell = kernel.begin("print(x + 1)")
    assert cell.finish().text.strip() == "42"
    event = events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert event["held_msg_ids"] == [cell.msg_id]


def test_an_interrupt_ends_their_waiting(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run(f"{BIG}; x = 41")
    state = server.client.save(kernel)["state_id"]
    operation = roll_back(server, state)
    cells = [kernel.begin("x += 1; import time; time.sleep(60)") for _ in range(2)]
    kernel.request("control", "kernel_info_request", {})  # the server has them
    server.client.post(f"api/kernels/{kernel.id}/interrupt")
    for cell in cells:
        kernel.wait("the cell is answered", lambda cell=cell: cell.reply, 30)  # type: ignore[misc]
        assert "KeyboardInterrupt" in (cell.error or "")
    server.client.done(operation)
    assert kernel.run("print(x)") == "41"


def test_they_are_void_where_their_user_restarts_the_kernel(
    server: JupyterServer, start: Start
) -> None:
    kernel = start()
    kernel.run(f"{BIG}; x = 41")
    state = server.client.save(kernel)["state_id"]
    operation = roll_back(server, state)
    cell = kernel.begin("print(x + 1)")
    kernel.request("control", "kernel_info_request", {})  # the server has both
    server.client.post(f"api/kernels/{kernel.id}/restart")
    kernel.wait("the cell is answered", lambda: cell.reply, 30)
    if server.client.finished(operation)["status"] == "done":
        assert cell.text.strip() == "42"  # it was quicker than the restart
    else:
        assert (cell.error or "").startswith("CellNotRun")
        assert "restarted or shut down" in (cell.error or "")
    assert "NameError" in (server.client.connect(kernel.id).execute("x").error or "")


def test_of_a_fresh_kernel_that_a_lost_one_takes_the_place_of(home: Home) -> None:
    with JupyterServer(home) as server:
        path = home.add_notebook("lost.ipynb")
        lost = server.client.start(path)
        lost.run(f"{WIDGET}\n{BIG}; x = 41")
        widget = open_widget(lost)
        server.client.save(lost)
        server.kill()
    with JupyterServer(home) as server:
        server.client.wait_lost(1)
        fresh = server.client.start(path)
        page = BinaryPage(server, fresh)
        other = server.client.start(home.add_notebook("other.ipynb"))
        events = server.client.events()
        operation = server.client.post(f"gpu-ckpt/api/lost/{lost.id}/restore")
        fresh.send("shell", "comm_msg", {"comm_id": widget, "data": {"n": 1}})
        cell = fresh.begin("print('here')")
        page.send("comm_msg", {"comm_id": widget, "data": {"n": 2}})
        assert other.run("print(6 * 7)") == "42"
        server.client.done(operation)
        # It was not run where it would be gone, and its page is told, twice.
        fresh.wait("the cell is answered", lambda: cell.reply, 30)
        assert (cell.text, (cell.error or "").split("\n")[0]) == ("", "CellNotRun")
        event = events.wait_for("kernel", action="restored", kernel_id=lost.id)
        assert event["held_msg_ids"] == [cell.msg_id]
        late = fresh.begin("print('late')")
        fresh.wait("the cell is answered", lambda: late.reply, 30)
        assert "CellNotRun" in (late.error or "")
        back = server.client.connect(lost.id)
        assert back.run("print(x + 1)") == "42"
        # A page that leaves a kernel closes its widgets, and may have opened others in it.
        own = {"comm_id": "of-the-fresh-kernel", "target_name": "slider", "data": {}}
        fresh.send("shell", "comm_open", own)
        fresh.send("shell", "comm_msg", {"comm_id": own["comm_id"], "data": {"n": 9}})
        fresh.send("shell", "comm_close", {"comm_id": widget, "data": {}})
        # What was done to a widget reaches it in the restored kernel.
        fresh.send("shell", "comm_msg", {"comm_id": widget, "data": {"n": 3}})
        wait_for("it was moved", lambda: back.run("print(sorted(moved))") == "[1, 2, 3]", 30)
        # So the fresh one has run nothing, and is not kept.
        assert fresh.id not in [kernel["id"] for kernel in server.client.get("api/kernels")]


def test_widgets_that_there_was_no_room_for_are_told_of(home: Home) -> None:
    config = {"ServerApp": {"jpserver_extensions": {"tests.harness.narrow": True}}}
    environment = {"PYTHONPATH": str(REPOSITORY)}
    with JupyterServer(home, config=config, environment=environment) as server:
        kernel = server.client.start(home.add_notebook("book.ipynb"))
        kernel.run(f"{WIDGET}\n{BIG}")
        widget = open_widget(kernel)
        state = server.client.save(kernel)["state_id"]
        about = f"gpu-ckpt/api/kernels/{kernel.id}"
        for how in ("roll back", "wake"):
            operations = [roll_back(server, state)] if how == "roll back" else []
            if how == "wake":
                wait_for("idle", lambda: server.client.get(about)["execution_state"] == "idle", 30)
                server.client.done(server.client.post(f"{about}/hibernate"))
            for n in range(5):
                kernel.send("shell", "comm_msg", {"comm_id": widget, "data": {"n": n}})
            for operation in operations:
                server.client.done(operation)
            wait_for("idle", lambda: server.client.get(about)["execution_state"] == "idle", 30)
            wait_for("three moved", lambda: kernel.run("print(moved)") == "[0, 1, 2]", 30)
            found = server.client.get(about)["restored_from"]
            assert found["cause"] == ("user" if how == "roll back" else "wake")
            (said,) = found["warnings"]
            assert "did not get 2 of the changes that were made to widgets" in said
            kernel.run("moved.clear()")
        assert server.log().count("did not get 2 of the changes") == 2


def test_of_a_roll_back_that_fails_they_run_in_the_kernel_that_stays(
    server: JupyterServer, lasting_home: Home, start: Start
) -> None:
    kernel = start()
    kernel.run(BIG)
    state = server.client.save(kernel)["state_id"]
    kernel.run("x = 41")
    for pack in lasting_home.store.rglob("*.pack"):  # the last test of the file
        pack.write_bytes(bytes(pack.stat().st_size))
    operation = roll_back(server, state)
    cell = kernel.begin("print(x + 1)")
    assert server.client.finished(operation)["error"]["reason"] == "state_damaged"
    assert cell.finish().text.strip() == "42"


def test_a_page_that_leaves_its_kernel_while_that_starts_is_no_error(
    server: JupyterServer,
) -> None:
    """It does when another kernel takes the place of the one that it just asked for."""
    client = server.client
    kernel_id = client.post("api/kernels", {"name": "python3"})["id"]
    host, port = server.base_url.removeprefix("http://").split("/")[0].split(":")
    path = f"/api/kernels/{kernel_id}/channels"
    with socket.create_connection((host, int(port)), timeout=30) as page:
        page.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: token {server.token}\r\n"
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        wait_for("it is heard", lambda: client.get(f"api/kernels/{kernel_id}"), 30)
    wait_for("that is over", lambda: f"410 GET {path}" in server.log(), 60)
    assert "Traceback" not in server.log()
    kernel = client.connect(kernel_id)
    assert kernel.run("print(6 * 7)") == "42"
    kernel.close()
    client.delete(f"api/kernels/{kernel_id}")
