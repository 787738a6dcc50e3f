"""The REST API on a real server with real kernels; every answer is held against openapi.yaml."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timezone

from tests.harness.client import KernelClient, wait_for
from tests.harness.server import Home, JupyterServer
from tests.server.rest import Api

Start = Callable[..., KernelClient]
#: Code that gives a kernel so much to save that there is time to do something meanwhile.
BIG = "import os; data = os.urandom(600_000_000); mark = 'kept'"


def test_save_and_roll_back(api: Api, start: Start) -> None:
    kernel = start("rollback.ipynb")
    kernel.run("x = 41")
    result = api.done(f"/kernels/{kernel.id}/save", {"label": "before it goes wrong"})
    assert result["size"] > 1_000_000
    assert 0 < result["frozen_seconds"] <= result["seconds"]

    (state,) = api.get("/states", kernel=kernel.id)
    assert state["id"] == result["state_id"]
    assert (state["path"], state["label"]) == ("rollback.ipynb", "before it goes wrong")
    assert (state["reason"], state["execution_state"]) == ("user", "idle")
    assert state["node"]["hostname"] == os.uname().nodename
    age = datetime.now(timezone.utc) - datetime.fromisoformat(
        state["created"].replace("Z", "+00:00")
    )
    assert 0 <= age.total_seconds() < 60
    assert state["restorable"] is None
    assert api.get(f"/states/{state['id']}")["restorable"] is True

    described = api.get(f"/kernels/{kernel.id}")
    assert (described["savable"], described["error"]) == (True, None)
    assert described["last_state"]["id"] == state["id"]
    assert described in api.get("/kernels")

    kernel.run("x = 0")
    restored = api.finish(api.begin(f"/states/{state['id']}/restore", {"mode": "rollback"}))
    assert restored["result"]["kernel_id"] == kernel.id
    assert list(restored["phases"]) == ["reading", "checking", "restoring", "connecting"]
    times = list(restored["phases"].values())
    assert times[0] >= 0 and times == sorted(times) and times[-1] <= restored["result"]["seconds"]
    assert kernel.run("print(x + 1)") == "42"


def test_a_console_that_comes_back_is_called_as_before(api: Api, server: JupyterServer) -> None:
    client = server.client
    path = "console-2-cd932d9e-d39d-4df9-82f7-30857b853434"
    session = {"path": path, "name": "Console 2", "type": "console", "kernel": {"name": "python3"}}
    first = client.post("api/sessions", session)
    kernel = client.connect(first["kernel"]["id"])
    kernel.run("x = 41")
    state = api.done(f"/kernels/{kernel.id}/save")["state_id"]
    client.delete(f"api/sessions/{first['id']}")
    api.done(f"/states/{state}/restore")
    (again,) = [s for s in client.get("api/sessions") if s["path"] == path]
    assert (again["name"], again["type"]) == ("Console 2", "console")
    assert client.connect(kernel.id).run("print(x + 1)") == "42"
    client.delete(f"api/kernels/{kernel.id}")


def test_open_a_state_as_a_new_kernel_beside_its_own(
    api: Api, server: JupyterServer, lasting_home: Home, start: Start
) -> None:
    kernel = start()
    kernel.run("x = 'saved'")
    state = api.done(f"/kernels/{kernel.id}/save")["state_id"]
    kernel.run("x = 'later'")
    copy = lasting_home.add_notebook("copy.ipynb")
    new_id = api.done(f"/states/{state}/restore", {"mode": "new", "path": copy})["kernel_id"]
    assert new_id != kernel.id
    second = server.client.connect(new_id)
    assert (second.run("print(x)"), kernel.run("print(x)")) == ("saved", "later")
    assert api.get(f"/kernels/{new_id}")["path"] == copy
    server.client.delete(f"api/kernels/{new_id}")


def test_states_are_listed_by_kernel_and_by_notebook_newest_first(api: Api, start: Start) -> None:
    first, second = start("one.ipynb"), start("two.ipynb")
    saved = [api.done(f"/kernels/{k.id}/save")["state_id"] for k in (first, second, first)]
    ours = [s["id"] for s in api.get("/states") if s["id"] in saved]
    assert ours == saved[::-1]
    assert [s["id"] for s in api.get("/states", path="one.ipynb")] == [saved[2], saved[0]]
    assert [s["id"] for s in api.get("/states", kernel=second.id)] == [saved[1]]
    assert api.get("/states", path="nobody.ipynb") == []


def test_deleting_a_state_gives_its_space_back(
    api: Api, server: JupyterServer, start: Start
) -> None:
    kernel = start()
    kernel.run("import os; data = os.urandom(20_000_000)")
    events = server.client.events()
    state = api.done(f"/kernels/{kernel.id}/save")["state_id"]
    api.delete(f"/states/{state}", status=204)
    assert api.error("GET", f"/states/{state}", 404)["reason"] == "unknown_state"
    events.wait_for("kernel", action="state_deleted", state_id=state)
    assert set(api.post("/gc", {"dry_run": True})) == {"packs", "bytes", "dry_run"}
    assert api.post("/gc")["dry_run"] is False


def test_a_save_tells_of_itself_in_events(api: Api, server: JupyterServer, start: Start) -> None:
    kernel = start("events.ipynb")
    events = server.client.events()
    operation = api.begin(f"/kernels/{kernel.id}/save")
    end = events.wait_for("operation", operation_id=operation["id"], status="done", timeout=60)
    assert (end["phase"], end["progress"], end["path"]) == ("finished", 1, "events.ipynb")
    told = events.of("operation", operation_id=operation["id"])
    progress = [event["progress"] for event in told]
    assert progress == sorted(progress)
    assert {event["kernel_id"] for event in told} == {kernel.id}
    # A roll-back is told to every page, with what the state was doing.
    api.done(f"/states/{end['state_id']}/restore")
    restored = events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert (restored["cause"], restored["in_flight_msg_id"]) == ("user", None)


def test_one_operation_at_a_time_and_cancel(api: Api, start: Start) -> None:
    kernel = start()
    kernel.run(BIG)
    operation = api.begin(f"/kernels/{kernel.id}/save")
    assert api.error("POST", f"/kernels/{kernel.id}/save", 409, {})["reason"] == "busy"
    assert operation["id"] in [op["id"] for op in api.get("/operations")]
    described = api.get(f"/kernels/{kernel.id}")
    assert described["operation"]["id"] == operation["id"]

    api.delete(f"/operations/{operation['id']}", status=202)
    over = api.finish(operation)
    assert (over["status"], over["error"]["reason"]) == ("cancelled", "cancelled")
    assert api.get("/states", kernel=kernel.id) == []
    assert kernel.run("print(mark, len(data))") == "kept 600000000"
    # And it can be saved after that.
    assert api.done(f"/kernels/{kernel.id}/save")["size"] > 600_000_000


def test_a_kernel_lost_with_its_server_is_offered_and_comes_back(home: Home) -> None:
    path = home.add_notebook("lost.ipynb")
    with JupyterServer(home) as first:
        kernel = first.client.start(path)
        kernel.run("x = 41")
        Api(first).done(f"/kernels/{kernel.id}/save")
        first.kill()
    with JupyterServer(home) as second:
        api = Api(second)
        (lost,) = wait_for("the kernel is offered", lambda: api.get("/lost"), 60)
        assert (lost["kernel_id"], lost["path"]) == (kernel.id, path)
        api.done(f"/lost/{kernel.id}/restore")
        assert second.client.connect(kernel.id).run("print(x + 1)") == "42"
        assert api.get("/lost") == []
        assert api.error("POST", f"/lost/{kernel.id}/restore", 404)["reason"] == "unknown_kernel"


def test_a_dismissed_kernel_is_not_offered_again_and_keeps_its_states(home: Home) -> None:
    with JupyterServer(home) as first:
        kernel = first.client.start(home.add_notebook("lost.ipynb"))
        state = Api(first).done(f"/kernels/{kernel.id}/save")["state_id"]
        first.kill()
    with JupyterServer(home) as second:
        api = Api(second)
        wait_for("the kernel is offered", lambda: api.get("/lost"), 60)
        api.post(f"/lost/{kernel.id}/dismiss", status=204)
        assert api.get("/lost") == []
        second.kill()
    with JupyterServer(home) as third:
        api = Api(third)
        assert api.get("/lost") == []
        assert [s["id"] for s in api.get("/states")] == [state]


def test_doctor_says_that_this_node_can_capture(api: Api) -> None:
    doctor = api.get("/doctor")
    assert doctor["can_capture"] is True
    assert "problem" not in {check["status"] for check in doctor["checks"]}
    assert any("CRIU" in check["message"] for check in doctor["checks"])


def test_works_under_a_base_url(home: Home) -> None:
    config = {"ServerApp": {"base_url": "/user/me%40home/"}}
    with JupyterServer(home, config=config) as server:
        api = Api(server)
        kernel = server.client.start(home.add_notebook("a.ipynb"))
        # begin() follows the Location header.
        state = api.done(f"/kernels/{kernel.id}/save")["state_id"]
        assert api.get(f"/states/{state}")["kernel_id"] == kernel.id
