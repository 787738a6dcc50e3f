"""Which kernels a new server finds lost, and how they come back."""

from __future__ import annotations

import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from jupyter_gpu_ckpt.store import Lease, StateStore
from tests.harness.client import ApiError, KernelClient, wait_for
from tests.harness.server import Home, JupyterServer
from tests.server.race import one_gets_it
from tests.server.rest import metrics


def store_of(home: Home) -> StateStore:
    (owner,) = home.store.iterdir()
    return StateStore(home.store, owner.name)


def saved(server: JupyterServer, name: str, value: int) -> KernelClient:
    """A notebook whose kernel holds ``x`` and has a state."""
    kernel = server.client.start(server.home.add_notebook(name))
    kernel.run(f"x = {value}")
    server.client.save(kernel)
    return kernel


def test_only_what_was_not_ended_in_order_is_lost(home: Home) -> None:
    with JupyterServer(home) as server:
        closed = saved(server, "closed.ipynb", 1)
        server.client.delete(f"api/kernels/{closed.id}")
        stateless = server.client.start(home.add_notebook("stateless.ipynb"))
        lost = saved(server, "lost.ipynb", 2)
        renamed = saved(server, "before.ipynb", 3)
        (home.notebooks / "before.ipynb").rename(home.notebooks / "after.ipynb")
        (session,) = [
            s for s in server.client.get("api/sessions") if s["kernel"]["id"] == renamed.id
        ]
        server.client.request(
            "PATCH", f"api/sessions/{session['id']}", body={"path": "after.ipynb"}
        )
        wait_for(
            "the record follows the notebook",
            lambda: store_of(home).kernel(renamed.id).path == "after.ipynb",  # type: ignore[union-attr]
            30,
        )
        server.kill()
    with JupyterServer(home) as server:
        found = server.client.wait_lost(2)
        assert {(k["kernel_id"], k["path"]) for k in found} == {
            (lost.id, "lost.ipynb"),
            (renamed.id, "after.ipynb"),
        }
        (one,) = [k for k in found if k["kernel_id"] == lost.id]
        assert one["node"] == one["state"]["node"]["hostname"]
        assert one["last_seen"] <= time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        wait_for(
            "a kernel without states is forgotten",
            lambda: store_of(home).kernel(stateless.id) is None,
            20,
        )
        # Restored, it is as any other kernel: saved again, killed, restored.
        server.client.restore_lost(lost.id)
        numbers = metrics(server)
        assert numbers['gpu_ckpt_recovery_seconds_count{cause="lost"}'] == 1
        assert numbers['gpu_ckpt_recovery_seconds_sum{cause="lost"}'] > 0
        # How old what is saved of it is, from the state that it came out of.
        made = datetime.fromisoformat(one["state"]["created"].replace("Z", "+00:00")).timestamp()
        newest = f'gpu_ckpt_last_save_timestamp_seconds{{kernel_id="{lost.id}"}}'
        assert abs(numbers[newest] - made) < 0.01
        assert [k["kernel_id"] for k in server.client.lost()] == [renamed.id]
        kernel = server.client.connect(lost.id)
        assert kernel.run("x += 1; print(x)") == "3"
        server.client.save(kernel)
        events = server.client.events()
        psutil.Process(kernel.pid).kill()
        events.wait_for("kernel", action="restored", kernel_id=lost.id, cause="death")
        assert kernel.run("print(x)") == "3"
        numbers = metrics(server)
        assert numbers['gpu_ckpt_recovery_seconds_count{cause="death"}'] == 1
        assert numbers["gpu_ckpt_frozen_seconds_count"] == 1
        assert 0 < numbers["gpu_ckpt_frozen_seconds_sum"] < 30
        assert numbers['gpu_ckpt_operation_seconds_count{kind="restore"}'] == 2
        assert numbers['gpu_ckpt_bytes_total{kind="save"}'] > 1e6
        assert numbers['gpu_ckpt_bytes_total{kind="restore"}'] > 1e6
        assert numbers[newest] > made
        session = next(s for s in server.client.get("api/sessions") if s["kernel"]["id"] == lost.id)
        assert (session["path"], session["type"]) == ("lost.ipynb", "notebook")
        # An interrupt, a restart and a shutdown work too.
        cell = kernel.begin("import time; print('on'); time.sleep(60)").wait_text("on")
        server.client.post(f"api/kernels/{lost.id}/interrupt")
        assert "KeyboardInterrupt" in (cell.finish(20).error or "")
        server.client.post(f"api/kernels/{lost.id}/restart")
        again = server.client.connect(lost.id)
        assert "NameError" in (again.execute("x").error or "")
        assert again.run("import os; print(os.getcwd())") == str(home.notebooks)
        server.client.delete(f"api/kernels/{lost.id}")
        wait_for("no age of what has ended", lambda: newest not in metrics(server), 20)
        server.stop()
    with JupyterServer(home) as server:
        assert [k["kernel_id"] for k in server.client.lost()] == [renamed.id]
        assert len(server.client.states(path="lost.ipynb")) == 2


def test_an_orderly_stop_loses_nothing(home: Home) -> None:
    with JupyterServer(home, config={"AutoSave": {"before_shutdown": False}}) as server:
        kernel = saved(server, "book.ipynb", 41)
        pid = kernel.pid
        server.stop()
        assert not psutil.pid_exists(pid)
    with JupyterServer(home) as server:
        assert server.client.lost() == []
        # The state is there, and brings the kernel back under its id when asked to.
        (state,) = server.client.states(path="book.ipynb")
        server.client.restore(state["id"])
        assert server.client.connect(kernel.id).run("print(x + 1)") == "42"


def test_a_page_that_was_quicker_gets_its_kernel_back(home: Home) -> None:
    with JupyterServer(home) as server:
        used = saved(server, "used.ipynb", 1)
        pristine = saved(server, "pristine.ipynb", 2)
        server.kill()
    with JupyterServer(home) as server:
        server.client.wait_lost(2)
        # Two pages open before anybody answers the prompt; one runs a cell.
        mine = server.client.start("used.ipynb")
        mine.run("y = 'mine'")
        empty = server.client.start("pristine.ipynb")
        for kernel in (used, pristine):
            server.client.restore_lost(kernel.id)
        by_path = {s["path"]: s["kernel"]["id"] for s in server.client.get("api/sessions")}
        assert by_path == {"used.ipynb": used.id, "pristine.ipynb": pristine.id}
        running = {k["id"] for k in server.client.get("api/kernels")}
        assert running == {used.id, pristine.id, mine.id}
        assert empty.id not in running
        assert mine.run("print(y)") == "mine"
        assert server.client.connect(pristine.id).run("print(x)") == "2"


@pytest.mark.parametrize("mode", ["prompt", "always"])
def test_a_lost_kernel_whose_newest_state_is_damaged_comes_back_from_an_older_one(
    home: Home, mode: str
) -> None:
    with JupyterServer(home) as server:
        kernel = saved(server, "book.ipynb", 1)
        kernel.run("import os; x, data = 2, os.urandom(4 << 20)")
        newer = server.client.save(kernel)["state_id"]
        (older,) = {state["id"] for state in server.client.states()} - {newer}
        server.kill()
    for pack in home.store.glob(f"*/packs/*/{newer}-*.pack"):
        with pack.open("r+b") as file:
            file.seek(1 << 20)
            file.write(bytes(4096))
    with JupyterServer(home, config={"GpuCkpt": {"restore_on_start": mode}}) as server:
        client = server.client
        if mode == "prompt":
            (lost,) = client.wait_lost(1)
            assert (lost["state"]["id"], lost["damaged"]) == (newer, [])
            failed = client.finished(client.post(f"gpu-ckpt/api/lost/{kernel.id}/restore"))
            assert failed["error"]["reason"] == "state_damaged"
            assert older in failed["error"]["hint"]
            # What is offered now is the older one.
            (lost,) = client.wait_lost(1)
            assert (lost["state"]["id"], lost["damaged"]) == (older, [newer])
            done = client.done(client.post(f"gpu-ckpt/api/lost/{kernel.id}/restore"))
        else:

            def restored() -> Any:
                operations = client.get("gpu-ckpt/api/operations")
                return next((op for op in operations if op["status"] == "done"), None)

            done = wait_for("it is restored", restored, 30)
            assert client.lost() == []
        assert done["result"]["state_id"] == older
        (note,) = done["result"]["warnings"]
        assert newer in note and "damaged" in note
        assert client.connect(kernel.id).run("print(x)") == "1"


def test_dismissed_for_good_and_unknown_ones(home: Home) -> None:
    with JupyterServer(home) as server:
        kernel = saved(server, "book.ipynb", 1)
        server.kill()
    with JupyterServer(home) as server:
        server.client.wait_lost(1)
        server.client.post(f"gpu-ckpt/api/lost/{kernel.id}/dismiss")
        assert server.client.lost() == []
        for what in ("restore", "dismiss"):
            with pytest.raises(ApiError) as refused:
                server.client.post(f"gpu-ckpt/api/lost/no-such-kernel/{what}")
            assert (refused.value.status, refused.value.body["reason"]) == (404, "unknown_kernel")
        assert len(server.client.states()) == 1
        server.kill()
    with JupyterServer(home) as server:
        assert server.client.lost() == []


def test_a_kernel_of_another_node_is_lost_when_its_lease_has_run_out(home: Home) -> None:
    with JupyterServer(home, config={"GpuCkpt": {"lease_interval": 1.0}}) as server:
        kernel = saved(server, "book.ipynb", 41)
        first = renewed(home, kernel.id)
        wait_for("the lease is renewed", lambda: renewed(home, kernel.id) > first + 0.5, 20)
        server.kill()
    record = store_of(home).kernel(kernel.id)
    assert record is not None and record.lease is not None
    # As if its node still lived, and could not be asked. Its clock is an hour slow.
    elsewhere = {"node_id": "elsewhere", "hostname": "elsewhere", "renewed": time.time() - 3600}
    record.lease = msgspec.structs.replace(record.lease, **elsewhere, ttl=60.0)
    store_of(home).put_kernel(record)
    with JupyterServer(home, config={"GpuCkpt": {"lease_interval": 1.0}}) as server:
        events = server.client.events()
        # It is renewed for the last time.
        record.lease = msgspec.structs.replace(record.lease, ttl=8.0)
        store_of(home).put_kernel(record)
        assert server.client.lost() == []
        with pytest.raises(ApiError) as refused:
            server.client.post(f"gpu-ckpt/api/lost/{kernel.id}/restore")
        assert refused.value.status == 404
        # A page that is open already is told when the time has come.
        events.wait_for("kernel", action="lost", kernel_id=kernel.id, path="book.ipynb")
        (lost,) = server.client.lost()
        assert lost["node"] == "elsewhere"
        server.client.restore_lost(kernel.id)
        assert server.client.connect(kernel.id).run("print(x + 1)") == "42"


@pytest.mark.parametrize(
    "config",
    [
        {"MappingKernelManager": {"transport_encryption": "required"}},
        {"AsyncMultiKernelManager": {"use_pending_kernels": True}},
    ],
    ids=["encrypted", "pending kernels"],
)
def test_other_ways_to_run_kernels(home: Home, config: dict[str, dict[str, Any]]) -> None:
    with JupyterServer(home, config=config) as server:
        kernel = saved(server, "book.ipynb", 41)
        events = server.client.events()
        psutil.Process(kernel.pid).kill()
        events.wait_for("kernel", action="restored", kernel_id=kernel.id, cause="death")
        assert kernel.run("print(x + 1)") == "42"
        server.kill()
    with JupyterServer(home, config=config) as server:
        server.client.wait_lost(1)
        state = server.client.restore_lost(kernel.id)["state_id"]
        assert server.client.connect(kernel.id).run("print(x + 1)") == "42"
        copy = server.client.restore(state, mode="new")["result"]["kernel_id"]
        assert server.client.connect(copy).run("print(x + 1)") == "42"


def test_two_servers_on_one_store_leave_each_others_kernels_alone(home: Home) -> None:
    with JupyterServer(home) as one, JupyterServer(home) as other:
        kernel = saved(one, "book.ipynb", 41)
        assert other.client.lost() == []
        (state,) = other.client.states()
        with pytest.raises(ApiError, match="still runs, in another") as caught:
            other.client.restore(state["id"])
        assert (caught.value.status, caught.value.body["reason"]) == (422, "not_restorable")
        # It says so before it is tried, and what is possible all the same.
        described = other.client.get(f"gpu-ckpt/api/states/{state['id']}")
        assert (described["restorable"], described["modes"]) == (True, ["new"])
        (difference,) = [d for d in described["differences"] if d["blocking"]]
        assert "still runs, in another" in difference["message"]
        assert difference["mode"] == "rollback"
        here = one.client.get(f"gpu-ckpt/api/states/{state['id']}")
        assert (here["modes"], here["differences"]) == (["rollback", "new"], [])
        copy = other.client.restore(state["id"], mode="new")["result"]["kernel_id"]
        assert other.client.connect(copy).run("print(x + 1)") == "42"
        assert kernel.run("print(x + 1)") == "42"
        spool = home.data / "gpu-ckpt" / "spool"
        assert not [p for p in spool.glob("*/*") if p.is_dir()]


def test_a_named_server_brings_back_unasked_only_its_own_kernels(home: Home) -> None:
    named = {"JUPYTERHUB_SERVER_NAME": "other"}
    always = {"GpuCkpt": {"restore_on_start": "always"}}
    with JupyterServer(home) as one, JupyterServer(home, environment=named) as other:
        mine, theirs = saved(one, "mine.ipynb", 1), saved(other, "theirs.ipynb", 2)
        one.kill()
        other.kill()
    with JupyterServer(home, environment=named, config=always) as other:
        client = other.client
        told = client.events()
        wait_for("its own is back", lambda: client.get("api/kernels"), 30)
        assert client.connect(theirs.id).run("print(x)") == "2"
        # The user's other server may be about to start: that one's kernel is only offered.
        (lost,) = client.wait_lost(1)
        assert (lost["kernel_id"], lost["why"], lost["server"]) == (mine.id, "lost", "")
        assert [kernel["id"] for kernel in client.get("api/kernels")] == [theirs.id]
        client.restore_lost(mine.id)
        assert client.connect(mine.id).run("print(x)") == "1"
        causes = [(e["kernel_id"], e["cause"]) for e in told.of("kernel", action="restored")]
        assert causes.count((mine.id, "lost")) == 1
        wait_for(
            "it is this server's from then on",
            lambda: store_of(home).kernel(mine.id).server == "other",  # type: ignore[union-attr]
            30,
        )


def test_a_kernel_that_runs_on_another_node_is_not_brought_in_twice(home: Home) -> None:
    with JupyterServer(home) as server:
        kernel = saved(server, "book.ipynb", 41)
        (state,) = server.client.states()
        server.client.delete(f"api/kernels/{kernel.id}")
        store = store_of(home)
        wait_for("it is ended", lambda: store.kernel(kernel.id).lease is None, 10)  # type: ignore[union-attr]
        record = store.kernel(kernel.id)
        assert record is not None
        record.lease = Lease(
            node_id="other", hostname="far", boot_id="b", server_pid=1, server_start=1.0,
            renewed=time.time(), ttl=5.0,
        )  # fmt: skip
        store.put_kernel(record)
        with pytest.raises(ApiError, match="another Jupyter server on far"):
            server.client.restore(state["id"])
        copy = server.client.restore(state["id"], mode="new")["result"]["kernel_id"]
        assert server.client.connect(copy).run("print(x + 1)") == "42"
        wait_for("the lease runs out", server.client.lost, 15)
        server.client.restore(state["id"])
        assert server.client.connect(kernel.id).run("print(x + 1)") == "42"


def test_never_asks_and_of_two_servers_one_gets_a_lost_kernel(home: Home) -> None:
    with JupyterServer(home) as server:
        kernel = saved(server, "book.ipynb", 41)
        server.kill()
    never = {"GpuCkpt": {"restore_on_start": "never", "lease_interval": 0.2}}
    with JupyterServer(home) as one, JupyterServer(home, config=never) as other:
        one.client.wait_lost(1)
        told = other.client.events()
        # It offers nothing and does nothing by itself; what its user asks for it does.
        assert other.client.lost() == []
        start, both = threading.Barrier(2, timeout=30), (one, other)

        def bring_back(server: JupyterServer) -> dict[str, Any]:
            (state,) = server.client.states(kernel=kernel.id)
            start.wait()
            path = f"gpu-ckpt/api/states/{state['id']}/restore"
            try:
                return server.client.finished(server.client.post(path))
            except ApiError as refused:
                return {"status": "failed", "error": refused.body}

        winner, _, said = one_gets_it(both, bring_back)
        assert "still runs, in another" in said
        assert [k["id"] for k in winner.client.get("api/kernels")] == [kernel.id]
        assert winner.client.connect(kernel.id).run("print(x + 1)") == "42"
        assert not told.of("kernel", action="lost")


def test_states_follow_a_renamed_notebook(home: Home) -> None:
    with JupyterServer(home) as server:
        client = server.client
        kernel = saved(server, "old.ipynb", 41)
        (state,) = client.states(path="old.ipynb")
        (session,) = client.get("api/sessions")
        client.request("PATCH", "api/contents/old.ipynb", body={"path": "new.ipynb"})
        client.request("PATCH", f"api/sessions/{session['id']}", body={"path": "new.ipynb"})
        wait_for("the store knows", lambda: client.states(path="new.ipynb") == [state], 10)
        client.delete(f"api/sessions/{session['id']}")
        assert client.states(path="new.ipynb") == [state]
        client.restore(state["id"])
        (session,) = client.get("api/sessions")
        assert (session["path"], session["kernel"]["id"]) == ("new.ipynb", kernel.id)


def test_what_a_killed_server_left_in_the_spool_is_removed(home: Home) -> None:
    with JupyterServer(home) as server:
        server.kill()
        spool = home.data / "gpu-ckpt" / "spool"
        saved_by_it = make_left_over(spool, server)
    with JupyterServer(home):
        wait_for("it is gone", lambda: not saved_by_it.exists(), 20)


def make_left_over(spool: Path, server: JupyterServer) -> Path:
    """What a server killed in the middle of a save leaves."""
    from jupyter_gpu_ckpt.capture.node import node_id

    folder = spool / f"{node_id()}-{server._popen.pid}-1" / "operation" / "images"
    folder.mkdir(parents=True)
    (folder / "pages-1.img").write_bytes(bytes(1 << 20))
    return folder


def renewed(home: Home, kernel_id: str) -> float:
    """When a kernel's lease was renewed, in seconds of this machine's clock."""
    beat = store_of(home).heartbeat(kernel_id)
    return 0.0 if beat is None else time.time() - beat.age
