"""JupyterHub stops servers: their users find the kernels at the next start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import psutil
import pytest
import requests

from jupyter_gpu_ckpt.store import StateStore
from tests.harness.client import ApiError, Client, KernelClient, wait_for
from tests.harness.hub import Hub
from tests.harness.server import Home, free_port, shared_folder
from tests.hub.test_service import Browser

SLOW_TO_SAVE = """
import time
x = 41
%load_ext jupyter_gpu_ckpt
from jupyter_gpu_ckpt.hooks import before_save
before_save(lambda: time.sleep(3))
"""
#: Before each save it takes its time, and writes down when that was.
NOTES_ITS_SAVES = """
import json, time
%load_ext jupyter_gpu_ckpt
from jupyter_gpu_ckpt.hooks import before_save
def note():
    begin = time.monotonic()
    time.sleep(0.7)
    with open(PATH, "a") as file:
        print(json.dumps([begin, time.monotonic()]), file=file)
before_save(note)
x = 41
"""
PER_NODE = 2


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub with named servers, and a limit for the saves on its node."""
    with shared_folder("hub") as shared:
        fixed = {"GpuCkpt": {"node_turns_dir": str(shared / "turns"), "node_turn_timeout": 60}}
        config = {
            "JupyterHub": {"allow_named_servers": True},
            "Spawner": {"poll_interval": 1},
            "GpuCkptHub": {
                "store_url": str(shared / "states"), "saves_per_node": PER_NODE,
                "shutdown_deadline": 90, "server_config": fixed,
            },
        }  # fmt: skip
        with Hub(Home(shared / "home"), hub_config=config) as running:
            yield running


def environment_of(kernel: KernelClient) -> dict[str, str]:
    said = kernel.run("import os\nfor pair in os.environ.items(): print(*pair, sep='=')")
    return dict(line.partition("=")[::2] for line in said.splitlines())


@pytest.mark.parametrize("release", [5, 6])
def test_a_server_that_the_hub_culls_saves_its_kernels_first(
    home: Home, release: Literal[5, 6]
) -> None:
    # The hub sends SIGINT, and where that takes longer SIGTERM; here in the middle of a save.
    page = f"url='http://127.0.0.1:{free_port()}', folder={str(home.path / 'page')!r}, interval=1"
    more = f"""
c.LocalProcessSpawner.interrupt_timeout = 1
from jupyter_gpu_ckpt.hub import add_admin_page
add_admin_page(c, {page})
"""
    place = {"GpuCkptHub": {"store_url": str(home.path / "states")}}
    with Hub(home, hub_config=place, more=more, release=release) as hub:
        assert hub.version.startswith(f"{release}.")
        client = hub.start("alice")
        server = hub.server_environment("alice")
        kernel = client.start(home.add_notebook("book.ipynb"))
        kernel.run(SLOW_TO_SAVE)
        before = environment_of(kernel)
        client.close()
        with hub.culling(1):
            hub.wait_stopped("alice")
        assert "its kernels are saved first" in hub.log()

        client = hub.start("alice")
        (lost,) = client.wait_lost(1)
        assert (lost["kernel_id"], lost["why"]) == (kernel.id, "shutdown")
        assert lost["state"]["reason"] == "shutdown"
        client.restore_lost(kernel.id)
        kernel = client.connect(kernel.id)
        assert kernel.run("print(x + 1)") == "42"

        # No token of the hub is in a kernel, or its state; places are those of the new server.
        restarted, after = hub.server_environment("alice"), environment_of(kernel)
        assert restarted["JUPYTERHUB_API_TOKEN"] != server["JUPYTERHUB_API_TOKEN"]
        tokens = {server["JUPYTERHUB_API_TOKEN"], restarted["JUPYTERHUB_API_TOKEN"]}
        assert not tokens & {*before.values(), *after.values()}
        assert f"single-user server extension version {release}." in hub.log(2000)
        assert before["JUPYTERHUB_SERVICE_URL"] == server["JUPYTERHUB_SERVICE_URL"]
        assert after["JUPYTERHUB_SERVICE_URL"] == restarted["JUPYTERHUB_SERVICE_URL"]

        # The page of all states works with both releases, for who has logged in and for programs.
        url = f"{hub.url}/services/gpu-ckpt"
        alice = Browser(hub, "alice")
        mine = alice.get(f"{url}/", timeout=30)
        assert mine.url == f"{url}/users/alice" and "book.ipynb" in mine.text
        form = f"{url}/users/alice/states/{lost['state']['id']}/pin"
        assert "The state is pinned" in alice.post_form(form, mine.text, pinned="yes").text
        # It says how long it took to save them before the stop, and that all were.
        report = requests.get(
            f"{url}/api/users/alice",
            headers={"Authorization": f"token {hub.token_of('alice')}"},
            timeout=30,
        ).json()
        (stop,) = report["stops"]
        assert (stop["saved"], stop["kernels"]) == (1, 1) and 3 <= stop["seconds"] < 60
        hub.add_user("bob")
        headers = {"Authorization": f"token {hub.token_of('bob')}"}
        answer = requests.get(f"{url}/api/users/alice", headers=headers, timeout=30)
        assert answer.status_code == 404


def test_a_culler_with_the_hook_lets_a_save_end_first(hub: Hub) -> None:
    client = hub.start("carol")
    kernel = client.start(hub.home.add_notebook("culled.ipynb"))
    kernel.run(SLOW_TO_SAVE)
    wait_for("the server is idle", lambda: kernel.execute("pass").idle, 30)
    before = len(hub.log_path.read_text(errors="replace"))
    with hub.culling(1, spare_saving=True):
        client.begin_save(kernel)
        client.close()
        wait_for("the culler spares it", lambda: "not culled now: a save is" in hub.log(), 30)
        hub.wait_stopped("carol")
    said = hub.log_path.read_text(errors="replace")[before:]
    assert "before the server stops" not in said, "all was saved before it was to stop"
    client = hub.start("carol")
    (lost,) = client.wait_lost(1)
    assert lost["kernel_id"] == kernel.id
    assert lost["state"]["reason"] == "user", "the save that was under way, and no other"
    hub.stop("carol")


def test_a_users_servers_share_states_and_have_kernels_of_their_own(hub: Hub) -> None:
    with ThreadPoolExecutor(2) as pool:
        default, other = pool.map(lambda name: hub.start("dave", name), ["", "other"])
    mine = default.start(hub.home.add_notebook("mine.ipynb"))
    mine.run("x = 'default'")
    theirs = other.start(hub.home.add_notebook("theirs.ipynb"))
    theirs.run("x = 'other'")
    default.save(mine)
    state = other.save(theirs)["result"]["state_id"]

    # The states are the user's: each server lists both. The kernels are each server's own.
    for client, kernel in ((default, mine), (other, theirs)):
        assert {found["kernel_id"] for found in client.states()} == {mine.id, theirs.id}
        assert [found["id"] for found in client.get("api/kernels")] == [kernel.id]
        assert client.lost() == []
    with pytest.raises((ApiError, AssertionError), match="in another Jupyter server"):
        default.restore(state, mode="rollback")
    other.done(other.post(f"gpu-ckpt/api/kernels/{theirs.id}/hibernate"))
    assert default.lost() == [], "it sleeps in the other server"
    assert theirs.run("print(x)") == "other"

    # One is stopped from the hub's page: its kernel is saved, and found by the next one.
    theirs.run("x += ', later'")
    hub.stop("dave", "other")
    assert mine.run("print(x)") == "default"
    assert re.search(r"Saved 1 of 1 kernels in \d", hub.log())
    other = hub.start("dave", "other")
    (lost,) = other.wait_lost(1)
    assert (lost["kernel_id"], lost["why"]) == (theirs.id, "shutdown")
    other.restore_lost(theirs.id)
    assert other.connect(theirs.id).run("print(x)") == "other, later"
    assert default.lost() == [] and mine.run("print(x)") == "default"
    hub.stop("dave", "other")
    hub.stop("dave")


def test_servers_that_all_end_at_once_save_in_turns_on_their_node(hub: Hub, tmp_path: Path) -> None:
    users = ["erin", "frank", "grace", "heidi"]
    notes = tmp_path / "notes"

    def begin(user: str) -> tuple[Client, KernelClient]:
        client = hub.start(user)
        kernel = client.start(hub.home.add_notebook(f"{user}.ipynb"))
        kernel.run(NOTES_ITS_SAVES.replace("PATH", repr(str(notes))))
        return client, kernel

    with ThreadPoolExecutor(2) as pool:
        begun = dict(zip(users, pool.map(begin, users), strict=True))
    processes = hub.servers()
    assert len(processes) == len(users)
    for process in processes:
        process.terminate()
    assert psutil.wait_procs(processes, timeout=90)[1] == []

    times = [json.loads(line) for line in notes.read_text().splitlines()]
    assert len(times) == len(users)
    at_once = [sum(begin <= moment < end for begin, end in times) for moment, _ in times]
    assert max(at_once) <= PER_NODE, times
    # Each was saved, whatever its turn, and the next server of its user offers it.
    for user in users:
        (record,) = StateStore(hub.home.path.parent / "states", user).kernels()
        assert (record.kernel_id, record.offer) == (begun[user][1].id, "shutdown")
        assert record.stop is not None and (record.stop.saved, record.stop.kernels) == (1, 1)
    hub.wait_stopped(users[-1])
    (lost,) = hub.start(users[-1]).wait_lost(1)
    assert (lost["kernel_id"], lost["why"]) == (begun[users[-1]][1].id, "shutdown")
