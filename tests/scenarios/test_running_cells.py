"""Saved in the middle of a cell, killed, restored: the cell goes on and its answer arrives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.client import EventStream, KernelClient, wait_for
from tests.harness.node import Node
from tests.harness.server import Home, JupyterServer

LINES = 400

#: Prints a counter and notes where the wall clock jumped most: there the state was frozen,
#: for the time from the save to the restore.
COUNTING = f"""
import time
jump, at, last = 0, None, time.time()
for i in range({LINES}):
    now = time.time()
    if now - last > jump:
        jump, at = now - last, i
    last = now
    print(i, flush=True)
    time.sleep(.025)
"""


@pytest.fixture
def server(home: Home) -> Iterator[JupyterServer]:
    with JupyterServer(home) as running:
        yield running


def kill_kernel(kernel_pid: int, events: EventStream, kernel: KernelClient) -> dict[str, object]:
    """Let the kernel die and wait until it was restored; returns the event that says so."""
    os.kill(kernel_pid, signal.SIGKILL)
    return events.wait_for("kernel", action="restored", kernel_id=kernel.id)


def last_series(lines: list[int]) -> list[int]:
    """Return what was printed after the last step back."""
    start = max(i for i in range(len(lines)) if i == 0 or lines[i] <= lines[i - 1])
    return lines[start:]


def test_a_counting_cell_goes_on_from_the_saved_value(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("count.ipynb"))
    events = client.events()
    pid = kernel.pid
    cell = kernel.begin(COUNTING)
    cell.wait_text("\n40\n")
    operation = client.save(kernel)
    saved = client.states(kernel=kernel.id)[0]
    assert saved["execution_state"] == "busy"
    seen = int(cell.text.split()[-1])
    cell.wait_text(f"\n{seen + 20}\n")

    event = kill_kernel(pid, events, kernel)
    assert event["in_flight_msg_id"] == cell.msg_id
    assert event["state_id"] == operation["result"]["state_id"]
    cell.finish(60)

    lines = [int(line) for line in cell.text.split()]
    after = last_series(lines)
    before = lines[: len(lines) - len(after)]
    assert before == list(range(len(before)))
    frozen_at = int(kernel.run("print(at)"))
    assert after[0] <= frozen_at  # nothing is lost from the restore on ...
    assert after == list(range(after[0], LINES))  # ... or doubled
    assert after[0] >= frozen_at - 2  # and what was printed before is not printed again
    replies = kernel.answers(cell.msg_id, "execute_reply")
    assert [reply["content"]["status"] for reply in replies] == ["ok"]
    assert replies[0]["content"]["execution_count"] == 2
    client.wait_state(kernel.id, "idle")
    following = kernel.execute("print(i)")
    assert following.text == f"{LINES - 1}\n"
    assert following.reply is not None and following.reply["execution_count"] == 4


def test_a_cell_that_waits_for_input_still_takes_it(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("ask.ipynb"))
    events = client.events()
    pid = kernel.pid
    cell = kernel.begin("name = input('Your name? '); print('Hello', name)")
    assert cell.wait_input()["content"]["prompt"] == "Your name? "
    client.save(kernel)

    kill_kernel(pid, events, kernel)
    cell.answer("Ada")

    cell.finish(30)
    assert cell.text == "Hello Ada\n"
    assert cell.reply is not None and cell.reply["status"] == "ok"
    assert kernel.run("print(name)") == "Ada"
    client.wait_state(kernel.id, "idle")


def test_a_cell_started_after_the_save_is_reported_as_lost(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("late.ipynb"))
    events = client.events()
    pid = kernel.pid
    kernel.run("x = 41")
    client.save(kernel)
    late = kernel.begin("import time; time.sleep(1000)")
    wait_for("the cell runs", lambda: client.execution_state(kernel.id) == "busy", 10)

    event = kill_kernel(pid, events, kernel)

    # The page is told that the state ran nothing, so it ends this cell; the kernel is idle.
    assert event["in_flight_msg_id"] is None
    assert late.reply is None
    assert kernel.run("print(x + 1)") == "42"
    client.wait_state(kernel.id, "idle")


def test_a_restored_cell_can_be_interrupted(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("stop.ipynb"))
    events = client.events()
    pid = kernel.pid
    cell = kernel.begin("import time\nprint('on')\nwhile True: time.sleep(.1)")
    cell.wait_text("on")
    client.save(kernel)
    kill_kernel(pid, events, kernel)

    client.post(f"api/kernels/{kernel.id}/interrupt")

    cell.finish(30)
    assert cell.error is not None and cell.error.startswith("KeyboardInterrupt")
    assert kernel.run("print(1)") == "1"


@pytest.mark.root
@pytest.mark.timeout(180)
def test_a_cell_outlives_the_node_and_answers_the_page_that_stayed_open(
    shared: Path, home: Home
) -> None:
    with Node("node-a", [shared]) as node, JupyterServer(home, node=node) as server:
        kernel = server.client.start(home.add_notebook("count.ipynb"))
        cell = kernel.begin(COUNTING)
        cell.wait_text("\n20\n")
        server.client.save(kernel)
        node.kill()
        port = server.port
    with Node("node-b", [shared]) as node, JupyterServer(home, node=node, port=port) as server:
        server.client.wait_lost(1)
        server.client.restore_lost(kernel.id)
        # The page keeps its session id, as JupyterLab does when it reconnects.
        again = server.client.connect(kernel.id, session=kernel.session, channel="control")
        wait_for("the cell ends", lambda: server.client.execution_state(kernel.id) == "idle", 60)
        assert again.run("print(i, at < 400)") == f"{LINES - 1} True"
        assert [
            reply["content"]["execution_count"]
            for reply in again.answers(cell.msg_id, "execute_reply")
        ] == [1]
