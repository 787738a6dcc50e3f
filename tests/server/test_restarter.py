"""A kernel that dies is restored when it has a state, and starts empty when that is better."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jupyter_gpu_ckpt.deaths import DeathPolicy
from tests.harness.client import EventStream, KernelClient, wait_for
from tests.harness.server import Home, JupyterServer

Start = Callable[..., KernelClient]


@pytest.fixture
def events(server: JupyterServer) -> EventStream:
    return server.client.events()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_for("the process is gone", lambda: not psutil.pid_exists(pid), 20)


def kill_and_restore(events: EventStream, kernel: KernelClient) -> None:
    """Kill a kernel that has a state, and wait until it was restored."""
    before = len(events.of("kernel", action="restored", kernel_id=kernel.id))
    os.kill(kernel.pid, signal.SIGKILL)
    events.wait(
        "it is restored",
        lambda: len(events.of("kernel", action="restored", kernel_id=kernel.id)) > before,
        30,
    )


def restores(process: psutil.Process) -> list[int]:
    """PIDs of the restores below a process, also of those that ended and were not reaped yet."""
    found = []
    for child in process.children():
        try:
            if "restore" in child.cmdline():
                found.append(child.pid)
        except psutil.ZombieProcess:
            found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def fresh(server: JupyterServer, kernel: KernelClient) -> KernelClient:
    """Wait until an empty kernel answers under the same id, and connect to it."""

    def restarted() -> bool:
        return any(
            message["header"]["msg_type"] == "status"
            and message["content"]["execution_state"] == "restarting"
            for message in kernel.messages
        )

    kernel.wait("the server restarts the kernel", restarted, 30)
    client = server.client.connect(kernel.id)
    cell = client.execute("x")
    assert cell.error is not None and "NameError" in cell.error
    return client


def test_goes_on_over_the_same_connection(
    server: JupyterServer, start: Start, events: EventStream
) -> None:
    kernel = start()
    kernel.run("x = 41")
    pid = kernel.pid
    state = server.client.save(kernel)["state_id"]
    os.kill(pid, signal.SIGKILL)
    events.wait_for("operation", phase="reading", kernel_id=kernel.id)
    # Typed while it is dead: answered by the restored kernel, with its number.
    cell = kernel.execute("x + 1")
    assert cell.text == "42"
    assert cell.reply is not None and cell.reply["execution_count"] == 3
    assert "unique" not in cell.stderr + cell.text  # IPython's history
    assert kernel.run("print(In[1], In[3], Out, _, _i)") == "x = 41 x + 1 {3: 42} 42 x + 1"
    assert kernel.pid == pid
    event = events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert (event["cause"], event["state_id"]) == ("death", state)
    assert (event["execution_count"], event["in_flight_msg_id"]) == (2, None)
    # A page saw neither a restart nor a death.
    states = [
        m["content"]["execution_state"]
        for m in kernel.messages
        if m["header"]["msg_type"] == "status"
    ]
    assert not {"restarting", "autorestarting", "dead"} & set(states)
    server.client.wait_state(kernel.id, "idle")


def test_history_goes_on_after_many_lines_of_another_life(
    server: JupyterServer, start: Start, events: EventStream
) -> None:
    kernel = start()
    kernel.run("a = 1")
    server.client.save(kernel)
    for number in range(5):
        kernel.run(f"a = {number}")
    kill_and_restore(events, kernel)
    for number in range(8):
        cell = kernel.execute(f"b = {number}")
        assert (cell.error, cell.text, cell.stderr) == (None, "", "")
    assert "b = 7" in kernel.run("%history")


def test_dies_again_and_again(server: JupyterServer, start: Start, events: EventStream) -> None:
    kernel = start()
    kernel.run("n = 0")
    for number in range(1, 4):
        kernel.run("n += 1")
        server.client.save(kernel)
        kill_and_restore(events, kernel)
        assert kernel.run("print(n)") == str(number)
    assert len(server.client.states(kernel=kernel.id)) == 3


@pytest.mark.parametrize("how", ["roll-back", "restart"])
def test_a_death_does_not_undo_what_its_user_does(
    server: JupyterServer, start: Start, events: EventStream, how: str
) -> None:
    """The user's own wish ends the restore that a death began; it happens once, and stays."""
    client = server.client
    kernel = start()
    kernel.run("import os; data = os.urandom(64 << 20)")  # so that reading it takes a moment
    state = client.save(kernel)["state_id"]
    pid = kernel.pid
    if how == "roll-back":
        operation = client.post(f"gpu-ckpt/api/states/{state}/restore")
        os.kill(pid, signal.SIGKILL)
        client.done(operation)
    else:
        os.kill(pid, signal.SIGKILL)
        events.wait_for("operation", phase="reading", kernel_id=kernel.id)
        client.post(f"api/kernels/{kernel.id}/restart")
    again = client.connect(kernel.id)
    again.run("mine = 1")
    supervisors = server.process.children()

    def over() -> bool:
        operations = client.get("gpu-ckpt/api/operations")
        return all(x["status"] != "running" for x in operations if x["kernel_id"] == kernel.id)

    wait_for("all is over", over, 30)
    assert again.run("print(mine)") == "1"
    assert server.process.children() == supervisors
    assert len(events.of("kernel", action="restored", kernel_id=kernel.id)) == (how == "roll-back")


def test_without_a_state_it_starts_empty(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("x = 1")
    kill(kernel.pid)
    fresh(server, kernel)


def test_a_restart_makes_older_states_another_story(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("x = 1")
    server.client.save(kernel)
    server.client.post(f"api/kernels/{kernel.id}/restart")
    again = server.client.connect(kernel.id)
    assert again.execute("x").error is not None
    kill(again.pid)
    client = fresh(server, again)
    # ... but a roll-back on request still finds it.
    (state,) = server.client.states(kernel=kernel.id)
    server.client.restore(state["id"])
    assert client.run("print(x)") == "1"


def test_a_deleted_state_is_not_restored(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("x = 1")
    state = server.client.save(kernel)["state_id"]
    server.client.delete(f"gpu-ckpt/api/states/{state}")
    kill(kernel.pid)
    fresh(server, kernel)


def test_a_damaged_state_gives_an_empty_kernel_and_says_so(
    server: JupyterServer, start: Start, events: EventStream, lasting_home: Home
) -> None:
    kernel = start()
    kernel.run("x = list(range(100000))")
    state = server.client.save(kernel)["state_id"]
    (packs,) = lasting_home.store.glob("*/packs")
    kept = lasting_home.path / "packs-kept"
    packs.rename(kept)
    try:
        kill(kernel.pid)
        event = events.wait_for("kernel", action="restore_failed", kernel_id=kernel.id)
        assert (event["state_id"], event["cause"]) == (state, "death")
        assert "damaged" in event["message"]
        client = fresh(server, kernel)
    finally:
        shutil.rmtree(packs, ignore_errors=True)
        kept.rename(packs)
    server.client.restore(state)
    assert client.run("print(len(x))") == "100000"


@pytest.mark.parametrize("how", ["manifest", "block", "known"])
def test_a_damaged_state_is_passed_over_for_the_one_before_it(
    server: JupyterServer, start: Start, events: EventStream, lasting_home: Home, how: str
) -> None:
    kernel = start()
    kernel.run("x = 1")
    older = server.client.save(kernel)["state_id"]
    kernel.run("import os; x, data = 2, os.urandom(4 << 20)")
    newer = server.client.save(kernel)["state_id"]
    if how == "manifest":
        (manifest,) = lasting_home.store.glob(f"*/kernels/*/states/{newer}.json")
        manifest.write_bytes(manifest.read_bytes()[:-20])
    else:
        for pack in lasting_home.store.glob(f"*/packs/*/{newer}-*.pack"):
            with pack.open("r+b") as file:
                file.seek(1 << 20)
                file.write(bytes(4096))
        if how == "known":
            server.client.done(server.client.post(f"gpu-ckpt/api/states/{newer}/verify"))

    os.kill(kernel.pid, signal.SIGKILL)

    event = events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert (event["state_id"], event["cause"]) == (older, "death")
    assert newer in event["message"] and "damaged" in event["message"]
    assert kernel.run("print(x)") == "1"
    assert not events.of("kernel", action="restore_failed", kernel_id=kernel.id)
    (operation,) = [
        op
        for op in server.client.get("gpu-ckpt/api/operations")
        if op["kernel_id"] == kernel.id and op["kind"] == "restore"
    ]
    assert (operation["status"], operation["state_id"]) == ("done", older)
    states = {state["id"]: state for state in server.client.states(kernel=kernel.id)}
    assert states[newer]["damage"] and states[older]["damage"] is None
    # It goes on as any other: saved again, it comes back from what it was then.
    kernel.run("x += 40")
    server.client.save(kernel)
    kill_and_restore(events, kernel)
    assert kernel.run("print(x)") == "41"


def test_a_state_that_only_dies_is_left_alone(
    server: JupyterServer, start: Start, events: EventStream, lasting_home: Home
) -> None:
    kernel = start()
    saved = lasting_home.path / "it-is-saved"
    kernel.run(
        "import threading, os, time\n"
        "def die():\n"
        f"    while not os.path.exists({str(saved)!r}): time.sleep(0.05)\n"
        "    time.sleep(0.5)\n"
        "    os._exit(7)\n"
        "threading.Thread(target=die, daemon=True).start()\n"
        "x = 1"
    )
    server.client.save(kernel)
    saved.touch()
    fresh(server, kernel)  # in the end
    assert len(events.of("kernel", action="restored", kernel_id=kernel.id)) == 3


def test_shutting_down_ends_a_restore(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("data = bytearray(os.urandom(1 << 20)) * 200 if (os := __import__('os')) else 0")
    pid = kernel.pid
    server.client.save(kernel)
    os.kill(pid, signal.SIGKILL)
    wait_for(
        "a restore runs",
        lambda: server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}")["operation"],
        20,
        interval=0.01,
    )
    server.client.delete(f"api/kernels/{kernel.id}")
    assert kernel.id not in [k["id"] for k in server.client.get("api/kernels")]
    wait_for(
        "nothing of it runs",
        lambda: not psutil.pid_exists(pid) and not restores(server.process),
        30,
    )


def test_switched_off_it_starts_empty(home: Home) -> None:
    with JupyterServer(home, config={"GpuCkpt": {"restore_on_death": False}}) as server:
        kernel = server.client.start()
        kernel.run("x = 1")
        server.client.save(kernel)
        kill(kernel.pid)
        client = fresh(server, kernel)
        (state,) = server.client.states()
        server.client.restore(state["id"])
        assert client.run("print(x)") == "1"


class TestPolicy:
    """The decision alone, with a clock that a test can move."""

    def policy(self, tmp_path: Path) -> DeathPolicy:
        self.time = 0.0
        return DeathPolicy(30, 2, lambda: self.time)

    def test_newest_of_its_own(self, tmp_path: Path) -> None:
        policy = self.policy(tmp_path)
        assert policy.states_to_restore() == []
        policy.saved("a")
        policy.saved("b")
        assert policy.states_to_restore() == ["b", "a"]
        policy.restored("a")  # a roll-back: what came after it is another story
        assert policy.states_to_restore() == ["a"]
        policy.saved("c")
        policy.forget("c")
        assert policy.states_to_restore() == ["a"]
        policy.started_fresh()
        assert policy.states_to_restore() == []

    def test_quick_deaths_are_counted_in_a_row(self, tmp_path: Path) -> None:
        policy = self.policy(tmp_path)
        policy.saved("a")
        for _ in range(3):
            assert policy.states_to_restore() == ["a"]
            policy.restored("a")
            self.time += 29
        assert policy.states_to_restore() == []
        policy.restored("a")
        self.time += 31
        assert policy.states_to_restore() == ["a"]
