"""Ends that no user asked for: the server is stopped, the culler culls; the next server goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.client import wait_for
from tests.harness.contents import SLOW
from tests.harness.node import REPOSITORY, Node
from tests.harness.server import Home, JupyterServer, shared_folder
from tests.server.rest import Api


def test_a_stopped_server_saves_its_kernels_and_the_next_offers_them(home: Home) -> None:
    with JupyterServer(home) as server:
        kernels = [server.client.start(home.add_notebook(f"{n}.ipynb")) for n in range(4)]
        server.client.start(home.add_notebook("pristine.ipynb"))  # nothing in it
        alone = kernels.pop()
        for number, kernel in enumerate(kernels):
            kernel.run(f"x = {number}")
        server.client.save(kernels[0])  # nothing new in it: not saved again
        alone.run("x = 3")
        path = f"gpu-ckpt/api/kernels/{alone.id}/autosave"
        server.client.request("PUT", path, body={"before_shutdown": False})
        kernels[1].begin("import time\nwhile True: time.sleep(0.01); x += 1")
        wait_for("it runs", lambda: server.client.execution_state(kernels[1].id) == "busy", 10)
        opted_out = server.client.start(home.add_notebook("opted-out.ipynb"))
        opted_out.run("x = 4")
        home.choose("opted-out.ipynb", False)  # a moment before the end
        server.stop()
    config = {"AutoSave": {"shutdown_deadline": 0.0}, "GpuCkpt": {"restore_parallel": 3}}
    with JupyterServer(home, config=config) as server:
        lost = {entry["kernel_id"]: entry for entry in server.client.wait_lost(3)}
        assert set(lost) == {kernel.id for kernel in kernels}
        assert {entry["why"] for entry in lost.values()} == {"shutdown"}
        assert [lost[kernel.id]["state"]["reason"] for kernel in kernels] == [
            "user", "shutdown", "shutdown",
        ]  # fmt: skip
        assert lost[kernels[1].id]["state"]["execution_state"] == "busy"
        # No time to save: it says so, and the older state is offered again.
        server.client.restore_lost(kernels[2].id)
        server.client.connect(kernels[2].id).run("x = 'not saved'")
        server.client.post(f"gpu-ckpt/api/lost/{kernels[0].id}/dismiss")
        server.stop()
        assert f"Not saved before the server stops: kernel {kernels[2].id}" in server.log()
    always = {"GpuCkpt": {"restore_on_start": "always", "restore_parallel": 1}}
    with JupyterServer(home, config=always) as server:
        # These go on by themselves; nobody is asked.
        restored = {kernels[1].id, kernels[2].id}
        wait_for(
            "they are back",
            lambda: {s["kernel"]["id"] for s in server.client.get("api/sessions")} == restored,
            60,
        )
        assert server.client.lost() == []
        assert server.client.connect(kernels[2].id).run("print(x)") == "2"
        wait_for("it runs", lambda: server.client.execution_state(kernels[1].id) == "busy", 30)
        # One at a time, what was used last first.
        states = {state["id"]: state["created"] for state in server.client.states()}
        begun = [states[it["state_id"]] for it in server.client.get("gpu-ckpt/api/operations")]
        assert len(begun) == 2 and begun == sorted(begun), "the list has the newest first"


@pytest.mark.root
def test_a_deadline_that_fits_only_some_of_five_kernels(shared: Path) -> None:
    home = Home(shared / "home")
    config = {
        "AutoSave": {
            "shutdown_deadline": 9.0,
            "shutdown_parallel": 1,
            "idle": 0.0,
            "interval": 0.0,
        }
    }
    device = Path("/dev/nvidia-of-a-test")
    try:
        with (
            Node("node-a", [shared]) as node,
            JupyterServer(home, node=node, config=config) as server,
        ):
            names = ["slow", "first", "second", "third", "gpu"]
            kernels = {n: server.client.start(home.add_notebook(f"{n}.ipynb")) for n in names}
            kernels["slow"].run(
                "import time\nfrom jupyter_gpu_ckpt.hooks import before_save\n"
                "%load_ext jupyter_gpu_ckpt\nbefore_save(lambda: time.sleep(9.5))"
            )
            begun = server.client.begin_save(kernels["slow"])
            server.client.done(begun)  # now it is known how long that takes
            for kernel in kernels.values():
                kernel.run("x = 41")
            # Something of a GPU's is open: it goes first, though its work is the youngest.
            kernels["gpu"].run(f"gpu = open({str(device)!r}, 'w')")
            server.stop()
            log = server.log()
            missed = "Not saved before the server stops: kernel "
            saved = [name for name in names if missed + kernels[name].id not in log]
            assert saved == ["first", "second", "third"]
            tried = log.index(f"The save of kernel {kernels['gpu'].id}")
            assert f"{kernels['gpu'].id} (gpu.ipynb): " in log
            assert f"{kernels['slow'].id} (slow.ipynb): The server stopped before" in log
            assert tried < log.index(missed)
        with (
            Node("node-b", [shared]) as node,
            JupyterServer(home, node=node, config=config) as server,
        ):
            lost = {e["path"]: e["state"] for e in server.client.wait_lost(4)}
            # What did not fit has its older state.
            assert lost.pop("slow.ipynb")["reason"] == "user"
            assert sorted(lost, key=lambda path: lost[path]["created"]) == [
                "first.ipynb", "second.ipynb", "third.ipynb",
            ]  # fmt: skip
            server.client.restore_lost(kernels["third"].id)
            assert server.client.connect(kernels["third"].id).run("print(x + 1)") == "42"
    finally:
        device.unlink(missing_ok=True)


CULLER: dict[str, dict[str, Any]] = {
    "MappingKernelManager": {"cull_idle_timeout": 2, "cull_interval": 1, "cull_connected": True}
}


@pytest.mark.root
def test_a_culled_kernel_comes_back_when_its_notebook_is_touched(shared: Path) -> None:
    home = Home(shared / "home")
    hurried = {
        "ServerApp": {
            "shutdown_no_activity_timeout": 3,
            "jpserver_extensions": {"tests.harness.hurried": True},
        }
    }
    environment = {"PYTHONPATH": str(REPOSITORY)}
    with (
        Node("node-a", [shared]) as node,
        JupyterServer(home, node=node, config=CULLER | hurried, environment=environment) as server,
    ):
        api, path = Api(server), home.add_notebook("book.ipynb")
        kernel = server.client.start(path)
        kernel.run("x = 41")
        process = psutil.Process(server.host_pid(kernel.pid))

        def sleeps() -> bool:
            return bool(api.get(f"/kernels/{kernel.id}")["execution_state"] == "hibernated")

        wait_for("it is culled", sleeps, 60)
        assert not process.is_running()
        assert server.client.states()[0]["reason"] == "cull"
        assert server.client.lost() == []  # nothing to ask about
        # Run a cell on the page that is open; open the notebook on another.
        assert kernel.run("print(x + 1)") == "42"
        wait_for("it is culled again", sleeps, 60)
        page = server.client.start(path)
        assert page.id == kernel.id
        assert page.run("print(x + 1)") == "42"
        # Such a kernel does not keep a server alive that stops when nobody uses it.
        server._popen.wait(60)
        assert "Only hibernated kernels" in server.log()
    with Node("node-b", [shared]) as node, JupyterServer(home, node=node) as server:
        (lost,) = server.client.wait_lost(1)
        assert (lost["kernel_id"], lost["why"]) == (kernel.id, "hibernated")
        server.client.restore_lost(kernel.id)
        assert server.client.connect(kernel.id).run("print(x + 1)") == "42"


def test_a_culled_kernel_is_saved_first_and_offered(home: Home) -> None:
    with JupyterServer(home, config={"AutoSave": {"cull_action": "end"}} | CULLER) as server:
        # Each has something to save before the culler may find the next one idle.
        home.add_notebook("opted-out.ipynb")
        home.choose("opted-out.ipynb", {"before_cull": False})
        opted_out = server.client.start("opted-out.ipynb")
        opted_out.run("x = 41")
        unsavable = server.client.start(home.add_notebook("other.ipynb"))
        unsavable.run("import subprocess; c = subprocess.Popen(['unshare', '-m', 'sleep', '600'])")
        kernel = server.client.start(home.add_notebook("book.ipynb"))
        kernel.run("x = 41")
        (lost,) = server.client.wait_lost(1)
        assert (lost["kernel_id"], lost["why"]) == (kernel.id, "cull")
        assert lost["state"]["reason"] == "cull"
        wait_for(
            "it is spared",
            lambda: f"{unsavable.id} is not culled, because" in server.log(),
            20,
        )
        wait_for("but not for ever", lambda: not server.client.get("api/kernels"), 30)
        assert server.client.states(kernel=opted_out.id) == []
        assert server.client.restore_lost(kernel.id)["state_id"] == lost["state"]["id"]
        assert server.client.connect(kernel.id).run("print(x + 1)") == "42"


#: A node's clock that is an hour fast, for every Python there.
FAST = "import time\n_right = time.time\ntime.time = lambda: _right() + 3600\n"


def test_who_comes_back_while_the_culler_looks_at_the_notebook_keeps_the_kernel(home: Home) -> None:
    """Also where nothing of it would have been saved."""
    config = CULLER | {
        "ServerApp": {"contents_manager_class": "tests.harness.contents.Slow"},
        "AutoSave": {"before_cull": False},
    }
    environment = {"PYTHONPATH": str(REPOSITORY)}
    (home.notebooks / SLOW).touch()
    with JupyterServer(home, config=config, environment=environment) as server:
        kernel = server.client.start(home.add_notebook("book.ipynb"))
        wait_for("it is looked at", lambda: "Slow: book.ipynb" in server.log(), 30)
        assert kernel.run("import time; time.sleep(3); print(6 * 7)") == "42"


def test_contents_that_keep_the_server_waiting_do_not_take_the_time_of_last_saves(
    home: Home,
) -> None:
    config = {
        "ServerApp": {"contents_manager_class": "tests.harness.contents.Blocking"},
        "AutoSave": {"shutdown_deadline": 10.0},
    }
    environment = {"PYTHONPATH": str(REPOSITORY)}
    with JupyterServer(home, config=config, environment=environment) as server:
        kernels = [server.client.start(home.add_notebook(f"{n}.ipynb")) for n in range(4)]
        for kernel in kernels:
            kernel.run("x = 41")
            server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}/autosave")
        (home.notebooks / SLOW).touch()
        server.stop()
        assert "Slow: 0.ipynb" in server.log()
        assert "Saved 4 of 4 kernels" in server.log()


@pytest.mark.root
def test_a_server_that_was_frozen_ends_its_copy_of_a_kernel_that_was_taken_over() -> None:
    config = {"GpuCkpt": {"lease_interval": 0.5, "lease_ttl": 3.0}}
    with shared_folder("fence") as shared:
        home = Home(shared / "home")
        (shared / "sitecustomize.py").write_text(FAST)
        fast = {"PYTHONPATH": str(shared)}
        with (
            Node("node-a", [shared]) as a,
            Node("node-b", [shared]) as b,
            JupyterServer(home, node=a, config=config) as one,
            JupyterServer(home, node=b, config=config, environment=fast) as other,
        ):
            kernel = one.client.start(home.add_notebook("book.ipynb"))
            kernel.run("x = 41")
            state = one.client.save(kernel)["state_id"]
            assert other.client.lost() == []  # it is elsewhere
            told = one.client.events()
            # Taken over on purpose: the other end lets go before it begins here.
            other.client.restore(state, take_over=True)
            told.wait_for("kernel", action="fenced", kernel_id=kernel.id)
            clocks = other.client.start()
            ahead = float(clocks.run("import time; print(time.time())")) - time.time()
            assert ahead > 3500, "the nodes' clocks differ"
            clocks.close()
            other.client.delete(f"api/kernels/{clocks.id}")
            assert other.client.connect(kernel.id).run("print(x + 1)") == "42"
            wait_for(
                "its copy is ended",
                lambda: kernel.id not in {k["id"] for k in one.client.get("api/kernels")},
                20,
            )
            assert one.client.lost() == []
            # And back, because the server that has it is frozen.
            told = other.client.events()
            other.process.send_signal(signal.SIGSTOP)
            one.client.wait_lost(1)
            one.client.restore_lost(kernel.id)
            again = one.client.connect(kernel.id)
            assert again.run("x += 1; print(x)") == "42"
            other.process.send_signal(signal.SIGCONT)
            other._popen.send_signal(signal.SIGCONT)  # nsenter had stopped with it
            wait_for(
                "its copy is ended",
                lambda: kernel.id not in {k["id"] for k in other.client.get("api/kernels")},
                20,
            )
            told.wait_for("kernel", action="fenced", kernel_id=kernel.id, path="book.ipynb")
            assert other.client.lost() == []  # elsewhere, not lost
            assert again.run("print(x)") == "42"
            assert kernel.id in {k["id"] for k in one.client.get("api/kernels")}
            # Its node dies: lost, and then ended in order: neither.
            a.kill()
            other.client.wait_lost(1)
            other.client.restore_lost(kernel.id)
            assert other.client.connect(kernel.id).run("print(x + 1)") == "42"
            other.client.delete(f"api/kernels/{kernel.id}")
            assert other.client.lost() == []
