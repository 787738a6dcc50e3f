"""What notebooks and consoles do with a kernel works as with the stock provisioner."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.harness.client import wait_for
from tests.harness.server import Home, JupyterServer


@pytest.fixture
def server(home: Home) -> Iterator[JupyterServer]:
    with JupyterServer(home) as running:
        yield running


def console(server: JupyterServer, kernel_id: str, lines: str) -> str:
    """Run `lines` in a console that attaches to a running kernel; return what it printed."""
    (connection,) = server.home.data.rglob(f"kernel-{kernel_id}.json")
    done = subprocess.run(
        ["jupyter", "console", "--existing", str(connection), "--simple-prompt"],
        input=lines,
        env=server.home.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout


def test_a_console_attaches_before_and_after_a_restore(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("console.ipynb"))
    kernel.run("x = 41")
    assert "answer 42" in console(server, kernel.id, "print('answer', x + 1)\n")
    events = client.events()
    pid = kernel.pid
    client.save(kernel)
    os.kill(pid, signal.SIGKILL)
    events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert "answer 43" in console(server, kernel.id, "print('answer', x + 2)\n")


def test_interrupt_restart_and_shutdown(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("stop.ipynb"))
    pid = kernel.pid
    cell = kernel.begin("import time\nprint('on')\nwhile True: time.sleep(.1)")
    cell.wait_text("on")
    client.post(f"api/kernels/{kernel.id}/interrupt")
    assert (cell.finish().error or "").startswith("KeyboardInterrupt")
    kernel.run("x = 41")
    client.save(kernel)

    client.post(f"api/kernels/{kernel.id}/restart")

    kernel = client.connect(kernel.id)
    assert (kernel.execute("x").error or "").startswith("NameError")  # a fresh start
    assert kernel.pid != pid
    pid = kernel.pid
    assert len(client.states(kernel=kernel.id)) == 1
    client.delete(f"api/kernels/{kernel.id}")
    wait_for("the kernel is gone", lambda: not os.path.exists(f"/proc/{pid}"), 10)
    assert client.lost() == []
    assert len(client.states(kernel=kernel.id)) == 1  # until retention or the user removes it


def test_a_kernel_that_is_not_saved_is_restarted_empty(server: JupyterServer) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("unsaved.ipynb"))
    pid = kernel.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(
        "JupyterLab is told",
        lambda: any(
            m["header"]["msg_type"] == "status"
            and m["content"]["execution_state"] in ("restarting", "starting")
            for m in list(kernel.messages)
        ),
        30,
    )
    fresh = client.connect(kernel.id)
    assert fresh.pid != pid


def test_the_post_mortem_debugger_asks_and_answers(server: JupyterServer) -> None:
    kernel = server.client.start()
    kernel.execute("def f(secret):\n    return 1 / 0\nf(42)")
    cell = kernel.begin("%debug")
    cell.wait_input()
    cell.answer("p secret")
    cell.wait_text("42")
    kernel.wait("it asks again", lambda: len(kernel.answers(cell.msg_id, "input_request")) > 1, 10)
    cell.answer("q")
    cell.finish()
    assert kernel.run("print(1)") == "1"


def test_the_debugger_stops_at_a_breakpoint(server: JupyterServer) -> None:
    kernel = server.client.start()

    def debug(command: str, **arguments: object) -> dict[str, object]:
        request = {"type": "request", "seq": 1, "command": command, "arguments": arguments}
        reply = kernel.request("control", "debug_request", request)
        return dict(reply["content"])

    kernel.run("1")
    assert debug("initialize", clientID="test", adapterID="")["success"]
    assert debug("attach")["success"]
    code = "x = 1\ny = x + 1\nprint(y)"
    source = debug("dumpCell", code=code)["body"]
    assert isinstance(source, dict)
    path = source["sourcePath"]
    breakpoints = debug("setBreakpoints", source={"path": path}, breakpoints=[{"line": 2}])
    assert breakpoints["success"]
    assert debug("configurationDone")["success"]
    cell = kernel.begin(code)
    stopped = kernel.wait(
        "it stops",
        lambda: [
            m
            for m in list(kernel.messages)
            if m["header"]["msg_type"] == "debug_event" and m["content"]["event"] == "stopped"
        ],
        30,
    )
    assert debug("continue", threadId=stopped[0]["content"]["body"]["threadId"])["success"]
    assert cell.finish().text == "2\n"
