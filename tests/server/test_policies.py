"""Kernels are saved without anybody asking: when, when not, and what comes of it."""

from __future__ import annotations

import getpass
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from traitlets import TraitError

from jupyter_gpu_ckpt.autosave import AutoSave
from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.models import AutoSaveChoice
from jupyter_gpu_ckpt.moments import read_moment
from jupyter_gpu_ckpt.store import StateStore
from jupyter_gpu_ckpt.tracking import TrackedKernel
from jupyter_gpu_ckpt.work import Work
from tests.harness.client import ApiError, EventStream, KernelClient, wait_for
from tests.harness.server import Home, JupyterServer

Start = Callable[..., KernelClient]
OFF = {
    "idle": 0.0, "interval": 0.0, "long_cell": 0.0, "shortest": 0.2, "retry": 0.5,
    "locked": ["before_cull"], "hook_timeout": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(lasting_home: Home) -> Iterator[JupyterServer]:
    """A server that saves nothing by itself until a test chooses otherwise for its kernel."""
    with JupyterServer(lasting_home, config={"AutoSave": OFF}) as server:
        yield server
        assert "Uncaught exception" not in server.log_path.read_text()


def choose(server: JupyterServer, kernel: KernelClient, **choice: Any) -> dict[str, Any]:
    path = f"gpu-ckpt/api/kernels/{kernel.id}/autosave"
    return dict(server.client.request("PUT", path, body=choice))


def saved(events: EventStream, kernel: KernelClient, cause: str, count: int = 1) -> str:
    """Wait for the end of a kernel's automatic saves; returns the id of the last state."""

    def done() -> list[dict[str, Any]]:
        return events.of("operation", kernel_id=kernel.id, cause=cause, status="done")

    events.wait(f"{count} saves for {cause}", lambda: len(done()) >= count, 30)
    return str(done()[count - 1]["state_id"])


def moment(iso: str) -> float:
    return read_moment(iso).timestamp()


def reasons(server: JupyterServer, kernel: KernelClient) -> list[str]:
    return [state["reason"] for state in server.client.states(kernel=kernel.id)]


def test_an_idle_kernel_is_saved_once_per_change(server: JupyterServer, start: Start) -> None:
    events = server.client.events()
    kernel, other = start(), start()
    for each in (kernel, other):
        choose(server, each, idle=0.5)
    kernel.run("x = 41")
    # The server hears of the cell's end a moment after its page.
    wait_for("it is idle", lambda: server.client.execution_state(kernel.id) == "idle", 10)
    activity = server.client.get(f"api/kernels/{kernel.id}")["last_activity"]
    saved(events, kernel, "idle")
    # Another kernel is saved later, twice: this one has had its time.
    for number in (1, 2):
        other.run(f"y = {number}")
        saved(events, other, "idle", number)
    assert reasons(server, kernel) == ["idle"]
    assert server.client.get(f"api/kernels/{kernel.id}")["last_activity"] == activity
    kernel.run("x += 1")
    state_id = saved(events, kernel, "idle", 2)
    choose(server, kernel)
    server.client.restore(state_id)
    assert kernel.run("print(x)") == "42"
    # What a user saves is not saved again either; a kernel that ran nothing never is.
    pristine = start()
    choose(server, pristine, idle=0.2)
    server.client.save(kernel)
    choose(server, kernel, idle=0.2)
    other.run("y = 3")
    saved(events, other, "idle", 3)
    assert reasons(server, pristine) == []
    assert reasons(server, kernel) == ["user", "idle", "idle"]


def test_a_check_of_a_state_is_no_save(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("x = 1")
    state = server.client.save(kernel)["result"]["state_id"]
    kernel.run("x = 2")
    server.client.done(server.client.post(f"gpu-ckpt/api/states/{state}/verify"))
    events = server.client.events()
    choose(server, kernel, idle=0.3)
    saved(events, kernel, "idle")
    assert reasons(server, kernel) == ["idle", "user"]


def test_work_is_saved_at_intervals_and_after_long_cells(
    server: JupyterServer, start: Start
) -> None:
    events = server.client.events()
    kernel = start()
    choose(server, kernel, interval=0.5)
    cell = kernel.begin("import time\nfor i in range(10**6): time.sleep(0.01)")
    state = server.client.get(f"gpu-ckpt/api/states/{saved(events, kernel, 'interval')}")
    assert (state["reason"], state["execution_state"]) == ("interval", "busy")
    saved(events, kernel, "interval", 2)
    # Not twice within the time that the freeze may cost at most (2 % by default).
    first, second = [
        it for it in server.client.get("gpu-ckpt/api/operations") if it["kernel_id"] == kernel.id
    ][::-1][:2]
    between = moment(second["started"]) - moment(first["started"])
    assert between > first["result"]["frozen_seconds"] / 0.02 - 0.1
    choose(server, kernel, long_cell=0.5)
    server.client.post(f"api/kernels/{kernel.id}/interrupt")
    assert "KeyboardInterrupt" in (cell.finish(20).error or "")
    state = server.client.get(f"gpu-ckpt/api/states/{saved(events, kernel, 'long_cell')}")
    assert (state["reason"], state["execution_state"]) == ("long_cell", "idle")
    count = len(reasons(server, kernel))
    kernel.run("time.sleep(0.1)")  # a short one is no reason
    other = start()
    choose(server, other, long_cell=0.2)
    other.run("import time; time.sleep(0.3)")
    saved(events, other, "long_cell")
    assert len(reasons(server, kernel)) == count


def test_kernels_are_left_alone(server: JupyterServer, start: Start, lasting_home: Home) -> None:
    folder = lasting_home.data / "kernels" / "alone"
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Alone", "language": "python",
        "metadata": {"gpu_ckpt": {"autosave": False}},
    }  # fmt: skip
    (folder / "kernel.json").write_text(json.dumps(spec))
    client, events = server.client, server.client.events()
    client.request("PUT", "gpu-ckpt/api/autosave", body={"idle": 0.4})
    by_spec, by_notebook, by_user = start(kernel="alone"), start(), start()
    path = next(
        s["path"] for s in client.get("api/sessions") if s["kernel"]["id"] == by_notebook.id
    )
    lasting_home.choose(path, {"enabled": False})
    assert choose(server, by_user, enabled=False)["policy"]["enabled"] is False
    saved_one = start()
    for kernel in (by_spec, by_notebook, by_user, saved_one):
        kernel.run("x = 1")
    saved(events, saved_one, "idle")
    saved_one.run("x = 2")
    saved(events, saved_one, "idle", 2)
    for kernel in (by_spec, by_notebook, by_user):
        assert reasons(server, kernel) == []
    client.save(by_user)  # who asks is served
    client.request("PUT", "gpu-ckpt/api/autosave", body={})


def test_a_notebook_chooses_within_the_limits(
    server: JupyterServer, start: Start, lasting_home: Home
) -> None:
    events, (kernel, quiet) = server.client.events(), (start(), start())
    sessions = server.client.get("api/sessions")
    (path,) = [s["path"] for s in sessions if s["kernel"]["id"] == kernel.id]
    wanted = {"idle": 0.3, "long_cell": 0.05, "before_cull": False}
    lasting_home.choose(path, wanted)
    # Nobody else has a reason to look: all that the user and the administrator have is off.
    for one in (kernel, quiet):
        one.run("x = 1")
    saved(events, kernel, "idle")
    found = server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}/autosave")
    policy, own = found["policy"], found["own"]
    assert (policy["idle"], policy["long_cell"], policy["before_cull"]) == (0.3, 0.2, True)
    assert set(own.values()) == {None}
    # What is chosen for the kernel itself is nearer; and the notebook's last word is known.
    assert choose(server, kernel, idle=100.0)["policy"]["idle"] == 100.0
    lasting_home.choose(path, {"idle": 90.0, "interval": 80.0})
    found = server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}/autosave")
    assert (found["policy"]["idle"], found["policy"]["interval"]) == (100.0, 80.0)
    with pytest.raises(ApiError, match="does not let this be changed"):
        choose(server, kernel, before_cull=False)
    assert reasons(server, quiet) == []


def test_what_cannot_be_saved_is_told_once_and_tried_again(
    server: JupyterServer, lasting_home: Home, start: Start
) -> None:
    events = server.client.events()
    kernel = start()
    choose(server, kernel, idle=0.3)
    kernel.run("import subprocess; child = subprocess.Popen(['unshare', '-m', 'sleep', '600'])")
    told = events.wait_for("kernel", action="autosave_failed", kernel_id=kernel.id)
    assert told["cause"] == "idle" and told["message"]

    def failures() -> int:
        return len(events.of("operation", kernel_id=kernel.id, status="failed"))

    events.wait("it is tried again", lambda: failures() >= 3, 30)
    assert len(events.of("kernel", action="autosave_failed")) == 1
    store = StateStore(lasting_home.store, getpass.getuser())
    wait_for("the store says so", lambda: store.failures() and store.failures()[0].count >= 3, 30)
    (noted,) = store.failures()
    assert (noted.kernel_id, noted.cause, noted.reason) == (kernel.id, "idle", "not_savable")
    assert noted.message == told["message"]
    kernel.run("child.kill(); child.wait()")
    saved(events, kernel, "idle")
    wait_for("it does not any more", lambda: store.failures() == [], 30)
    metrics = server.client._http.get(server.base_url + "metrics").text
    assert f'gpu_ckpt_last_save_timestamp_seconds{{kernel_id="{kernel.id}"}}' in metrics
    assert 'gpu_ckpt_operations_total{cause="idle",kind="save",reason="",status="done"}' in metrics
    assert 'cause="idle",kind="save",reason="not_savable",status="failed"}' in metrics


def test_callbacks_that_do_not_end_hold_up_no_save(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run(
        "%load_ext jupyter_gpu_ckpt\nimport time\nfrom jupyter_gpu_ckpt.hooks import before_save\n"
        "@before_save\ndef hang():\n    time.sleep(3)"
    )
    (warning,) = server.client.save(kernel)["result"]["warnings"]
    assert "did not end in time" in warning


def test_the_administrator_s_limits() -> None:
    settings = AutoSave(shortest=30.0, locked=["before_cull"], idle=5.0, leave_alone=["R*"])
    assert settings.policy("python3", []).idle == 5.0  # the administrator's own is as it is
    for choice in (AutoSaveChoice(idle=29.0), AutoSaveChoice(before_cull=False)):
        with pytest.raises(CkptError, match="administrator"):
            settings.check(choice)
    # Chosen before the limits were set: the nearest that is allowed.
    old = AutoSaveChoice(idle=1.0, interval=0.0, before_cull=False)
    policy = settings.policy("python3", [old, AutoSaveChoice(interval=40.0)])
    assert (policy.idle, policy.interval, policy.before_cull) == (30.0, 40.0, True)
    assert not settings.policy("R-4", [AutoSaveChoice(enabled=True)]).enabled
    with pytest.raises(TraitError, match="locked"):
        AutoSave(locked=["everything"])


def test_a_choice_that_is_none_is_refused(server: JupyterServer, start: Start) -> None:
    kernel = start()
    for body in ({"idle": 0.1}, {"idle": -1.0}, {"other": 1}, {"enabled": "yes"}):
        for path in ("autosave", f"kernels/{kernel.id}/autosave"):
            with pytest.raises(ApiError) as refused:
                server.client.request("PUT", f"gpu-ckpt/api/{path}", body=body)
            assert (refused.value.status, refused.value.body["reason"]) == (400, "bad_request")


class Quiet:
    """Stands for the policies in tests of the times alone."""

    def worked(self, work: Work) -> None: ...

    def asked(self, work: Work, data: dict[str, Any]) -> None: ...


def test_saves_of_a_working_kernel_cost_no_more_than_the_limit() -> None:
    policy = AutoSave(interval=60.0, idle=0.0, long_cell=0.0).defaults()
    work = Work(cast(TrackedKernel, None), policy, Quiet())
    work.cell_started(time.time())
    began = work.touched_at
    assert work.due(0.02) == (began + 60.0, "interval")
    work.saved(began + 60.0, seconds=3.0, frozen=0.5)
    assert work.due(0.02) == (began + 120.0, "interval")
    work.saved(began + 120.0, seconds=9.0, frozen=6.0)  # it has grown
    assert work.due(0.02) == (began + 120.0 + 300.0, "interval")
    assert work.due(0.5) == (began + 180.0, "interval")
    # What fails is tried again later and later.
    waits = []
    for _ in range(10):
        work.failed(retry=100.0)
        due = work.due(0.5)
        assert due is not None
        waits.append(round(due[0] - time.monotonic()))
    assert waits[:4] == [180, 200, 400, 800] and waits[-1] == 3600
