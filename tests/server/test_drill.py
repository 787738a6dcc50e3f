"""``jupyter gpu-ckpt drill`` against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tests.harness.client import KernelClient, wait_for
from tests.harness.server import Home, JupyterServer
from tests.server.rest import Api
from tests.server.shell import Shell

Start = Callable[..., KernelClient]


@pytest.fixture(scope="module")
def shell(lasting_home: Home, server: JupyterServer) -> Shell:
    """A shell beside the running server."""
    return Shell(lasting_home)


def nothing_is_left(server: JupyterServer, api: Api, *kernels: KernelClient) -> None:
    """Only these kernels run, and there is no state, nor a record of another kernel."""
    mine = {kernel.id for kernel in kernels}
    assert {kernel["id"] for kernel in server.client.get("api/kernels")} == mine
    assert {state["kernel_id"] for state in api.get("/states")} <= mine
    (owner,) = server.home.store.iterdir()
    assert {folder.name for folder in (owner / "kernels").iterdir()} <= mine


def test_the_notebook_is_saved_killed_restored_and_compared(
    shell: Shell, server: JupyterServer, api: Api, lasting_home: Home, start: Start
) -> None:
    kernel = start("work.ipynb")
    kernel.run("x = 'the user has changed it'")
    cells = [
        "# comment", "x = 41", "1 / 0", "import random; r = random.random()\nx += 1\nx",
        "print('run', file=open('runs.txt', 'a'))",
    ]  # fmt: skip
    lasting_home.add_notebook("work.ipynb", cells)
    book = json.loads((lasting_home.notebooks / "work.ipynb").read_text())
    book["cells"][2]["metadata"]["tags"] = ["raises-exception"]
    (lasting_home.notebooks / "work.ipynb").write_text(json.dumps(book))
    sessions = server.client.get("api/sessions")

    file = lasting_home.path / "report.json"
    said = shell.run("drill", "work.ipynb", "--check", "x", "--check", "r", "--report", str(file))
    for row in ("Detection", "Placement", "Read", "Restore", "First reply", "Recovery in all"):
        assert re.search(rf"^{row} +[\d.]+ s +[\d.]+% *$", said.stdout, re.MULTILINE), said.stdout
    assert re.search(r"^Running it again +[\d.]+ s +100.0% *$", said.stdout, re.MULTILINE)
    assert re.search(r"^x +42 +42 +yes *$", said.stdout, re.MULTILINE)

    found = json.loads(file.read_text())
    assert (found["path"], found["cells"], found["same"]) == ("work.ipynb", 5, True)
    assert found["checks"][1]["before"] == found["checks"][1]["after"]
    steps = found["recovery"]
    total = steps.pop("total")
    assert all(0 <= seconds < 30 for seconds in steps.values()), steps
    assert steps["restore"] > 0 and sum(steps.values()) == pytest.approx(total, abs=0.02)
    assert found["run_seconds"] > 0 and found["rerun_measured"] is True
    # It was run from the top twice, and the second run's time is the second run's.
    assert (lasting_home.notebooks / "runs.txt").read_text() == "run\nrun\n"
    assert found["rerun_seconds"] not in (0, found["run_seconds"])
    # Each step is what the restore itself says of it.
    (restore,) = [it for it in api.get("/operations") if it["kind"] == "restore"]
    (save,) = [it for it in api.get("/operations") if it["kind"] == "save"]
    assert (restore["cause"], restore["kernel_id"]) == ("death", save["kernel_id"])
    begun = restore["phases"]
    assert steps["placement"] == pytest.approx(begun["restoring"] - begun["checking"], abs=0.002)
    assert steps["read"] == pytest.approx(begun["checking"] - begun["reading"], abs=0.002)
    assert found["frozen_seconds"] == save["result"]["frozen_seconds"]
    assert (found["state_bytes"], found["save_seconds"]) == (
        save["result"]["size"], save["result"]["seconds"],
    )  # fmt: skip

    # The user's own kernel and session are as they were.
    assert kernel.run("print(x)") == "the user has changed it"
    assert [s["kernel"]["id"] for s in server.client.get("api/sessions")] == [
        s["kernel"]["id"] for s in sessions
    ]
    nothing_is_left(server, api, kernel)


def test_a_difference_fails(shell: Shell, server: JupyterServer, api: Api) -> None:
    # What is measured anew each time differs, whatever is restored.
    server.home.add_notebook("clock.ipynb", ["import time"])
    found = shell.json(
        "drill", "clock.ipynb", "--check", "time.perf_counter_ns()", "--no-rerun", code=1
    )
    assert found["same"] is False and found["checks"][0]["same"] is False
    assert (found["rerun_measured"], found["rerun_seconds"]) == (False, found["run_seconds"])
    nothing_is_left(server, api)


def test_what_cannot_be_drilled_is_said_and_leaves_nothing(
    shell: Shell, server: JupyterServer, api: Api
) -> None:
    home = server.home
    assert "nowhere.ipynb" in shell.error("drill", "nowhere.ipynb")
    home.add_notebook("broken.ipynb", ["x = 1", "no_such_name"])
    said = shell.error("drill", "broken.ipynb")
    assert "The code cell 2 of broken.ipynb failed: NameError" in said
    home.add_notebook("fine.ipynb", ["x = 1"])
    assert "--check 'y' failed: NameError" in shell.error("drill", "fine.ipynb", "--check", "y")
    home.add_notebook("long.ipynb", ["import time; time.sleep(60)"])
    said = shell.error("drill", "long.ipynb", "--timeout", "1")
    assert "did not answer within" in said
    nothing_is_left(server, api)


def test_ctrl_c_tidies_up(shell: Shell, server: JupyterServer, api: Api) -> None:
    server.home.add_notebook("long.ipynb", ["import time; time.sleep(60)"])
    terminal = shell.terminal("drill", "long.ipynb")
    terminal.expect("cell 1 of 1")
    busy = lambda: any(  # noqa: E731
        k["execution_state"] == "busy" for k in server.client.get("api/kernels")
    )
    wait_for("the cell runs", busy, 30)
    terminal.sendintr()
    terminal.expect("Interrupted")
    terminal.wait()
    assert terminal.exitstatus == 1
    nothing_is_left(server, api)
