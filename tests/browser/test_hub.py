"""Two users of a real JupyterHub whose servers run on nodes that die."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page, expect

from jupyter_gpu_ckpt.capture.native import find_kernel_capture
from tests.browser.test_kernel_dies import SAVED
from tests.harness.browser import NotebookPage
from tests.harness.client import ApiError, Client, Message, wait_for
from tests.harness.hub import PASSWORD, Hub
from tests.harness.server import Home, free_port, shared_folder
from tests.harness.user import User, privileged_copy

pytestmark = [pytest.mark.browser, pytest.mark.root, pytest.mark.timeout(300)]

CELLS = ["x = 41", "print(x + 1)", "import os; print(os.environ['JUPYTERHUB_API_TOKEN'])"]
MIB = 1 << 20


@dataclass
class Saved:
    """What a user left behind when her node died."""

    kernel_id: str
    state: Message
    token: str


@dataclass
class World:
    """The hub, and the folders of its users."""

    hub: Hub
    alice: Home
    bob: Home
    store: Path
    saved: Saved | None = None


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with shared_folder("hub") as shared:
        store = shared / "states"
        store.mkdir()
        store.chmod(0o1777)  # as /tmp: everybody makes a folder of his own, which is closed
        program = find_kernel_capture(None)
        assert program is not None, "kernel-capture was not built"
        alice = Home(shared / "alice", User())
        bob = Home(shared / "bob", User("jupyter-tester-b"))
        config: dict[str, dict[str, Any]] = {
            "GpuCkptProvisioner": {
                "kernel_capture": str(privileged_copy(program, shared / "libexec")),
                # Where kernels use the hub themselves, as with dask-gateway.
                "scrub_environment": [],
            },
        }
        limits: dict[str, dict[str, Any]] = {
            "GpuCkptHub": {"store_url": str(store), "quota": 400 * MIB},
            "Authenticator": {"admin_users": {"head"}},
        }
        page = f"url='http://127.0.0.1:{free_port()}', folder={str(shared / 'page')!r}, interval=1"
        with Hub(
            Home(shared / "hub"),
            config=config,
            hub_config=limits,
            accounts={"alice": alice, "bob": bob},
            lab=True,
            more=f"from jupyter_gpu_ckpt.hub import add_admin_page\nadd_admin_page(c, {page})",
        ) as hub:
            yield World(hub, alice, bob, store)


class _Server:
    """What a page needs to know of a server that needs no token in the address."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.token = ""


def log_in_and_start(page: Page, hub: Hub, user: str) -> Client:
    """Log in where needed, and click on Start where the hub does not start at once."""
    page.goto(f"{hub.url}/hub/spawn")
    if page.locator("#username_input").count():
        page.locator("#username_input").fill(user)
        page.locator("#password_input").fill(PASSWORD)
        page.locator("#login_submit").click()
    page.wait_for_url(re.compile(f"/user/{user}/"), timeout=90_000)
    return hub.started(user)


def test_a_user_whose_node_died_starts_again_on_another_and_goes_on(
    world: World, browser: Browser, request: pytest.FixtureRequest
) -> None:
    hub = world.hub
    path = world.alice.add_notebook("work.ipynb", CELLS)
    context = browser.new_context()
    tab = context.new_page()
    client = log_in_and_start(tab, hub, "alice")
    page = NotebookPage(tab, _Server(client.base_url))  # type: ignore[arg-type]
    request.node.open_pages = [page]
    page.open(path)
    page.run_cell(0)
    page.run_cell(2)
    token = page.output(2)
    page.press_save()
    page.notification(SAVED)
    (state,) = client.states()

    node = hub.kill_node("alice")
    hub.wait_stopped("alice")
    client = log_in_and_start(tab, hub, "alice")
    server = hub.server("alice")
    assert server is not None and server["state"]["hostname"] != node

    client.wait_lost(1)
    page.visit(path)
    prompt = page.dialog("Restore Lost Kernels")
    expect(prompt).to_contain_text(path)
    prompt.get_by_role("button", name="Restore", exact=True).click()
    page.notification(re.compile("^Kernel state restored"))
    page.wait_idle()
    page.run_cell(1)
    page.wait_output(1, "42")
    page.run_cell(2)
    page.wait_output(2, re.compile(r"^(?!" + token + r")\w{32}"))
    kernel = client.connect(state["kernel_id"])
    now = kernel.run("print(os.environ['JUPYTERHUB_API_TOKEN'])")
    me = hub.client("alice", token=now)
    assert now != token and me.get("api/status")
    world.saved = Saved(kernel.id, state, now)
    context.close()


def refused(status: int, call: Callable[..., Any], *args: Any) -> None:
    """Make a call that must be refused in this way."""
    with pytest.raises(ApiError) as caught:
        call(*args)
    assert caught.value.status == status, caught.value


def test_another_user_neither_sees_nor_restores_her_states(world: World) -> None:
    assert world.saved is not None
    kernel_id, state_id = world.saved.kernel_id, world.saved.state["id"]
    hub, mine = world.hub, world.store / "bob"
    bob = hub.start("bob")
    kernel = bob.start(world.bob.add_notebook("mine.ipynb"))
    kernel.run("import os; x = 'of bob'")
    own = bob.save(kernel)["result"]["state_id"]

    # Her server lets him not in: neither with his token nor with that of his own server.
    tokens = (hub.token_of("bob"), kernel.run("print(os.environ['JUPYTERHUB_API_TOKEN'])"))
    for token in tokens:
        intruder = hub.client("alice", token=token)
        for what in ("states", f"states/{state_id}", "lost", "kernels"):
            refused(403, intruder.get, f"gpu-ckpt/api/{what}")
        refused(403, intruder.post, f"gpu-ckpt/api/states/{state_id}/restore", {"mode": "new"})

    # His own server knows nothing of hers, however it is asked.
    assert [state["id"] for state in bob.states()] == [own]
    assert bob.states(kernel=kernel_id) == [] == bob.states(path="work.ipynb") == bob.lost()
    refused(404, bob.get, f"gpu-ckpt/api/states/{state_id}")
    refused(404, bob.restore, state_id)
    refused(404, bob.restore_lost, kernel_id)

    # Tricks with paths, in every place where an id goes.
    above = "..%2F..%2F..%2Falice%2Fkernels%2F"
    for trick in (
        f"{above}{kernel_id}%2Fstates%2F{state_id}", f"..%2F{state_id}", f"{state_id}%00",
        f"%2e%2e%2falice%2f{state_id}",
    ):  # fmt: skip
        for way in ("", "/contents"):
            refused(404, bob.get, f"gpu-ckpt/api/states/{trick}{way}")
        for way in ("states", "lost"):
            refused(404, bob.post, f"gpu-ckpt/api/{way}/{trick}/restore")
    refused(404, bob.get, f"gpu-ckpt/api/states?kernel=..%2F..%2Falice%2Fkernels%2F{kernel_id}")

    # What is hers that has come into his hands: as it is, and as if it were his own kernel's.
    def no_use() -> None:
        found = [state for state in bob.states() if state["id"] != own]
        assert all(state["restorable"] is False for state in found), found
        with pytest.raises((ApiError, AssertionError), match=r"damaged|no saved state"):
            bob.restore(state_id, mode="new")
        refused(404, bob.restore_lost, kernel_id)

    theirs = world.store / "alice" / "kernels" / kernel_id
    copy = mine / "kernels" / kernel_id
    shutil.copytree(theirs, copy)
    assert world.bob.user is not None
    world.bob.user.own(mine)
    no_use()
    manifest = copy / "states" / f"{state_id}.json"
    forged = manifest.read_text().replace(kernel_id, kernel.id)
    shutil.rmtree(copy)
    manifest = mine / "kernels" / kernel.id / "states" / manifest.name
    manifest.write_text(forged)
    world.bob.user.own(mine)
    no_use()
    manifest.unlink()

    # Links to what is hers lead nowhere: her folder is closed to his account.
    kernel.run(f"os.symlink({str(theirs)!r}, {str(copy)!r})")
    code = f"import os; print(os.access({str(world.store / 'alice')!r}, os.R_OK | os.X_OK))"
    assert kernel.run(code) == "False"
    with pytest.raises(ApiError, match="Permission denied"):
        bob.restore(state_id, mode="new")
    copy.unlink()

    # Hers is as it was, and so is his.
    (state,) = hub.client("alice").states()
    assert state["id"] == state_id and state["damage"] is None
    assert kernel.run("print(x)") == "of bob"


def test_a_save_beyond_the_quota_is_refused_in_words(world: World) -> None:
    hub = world.hub
    client = hub.client("bob") if hub.server("bob") else hub.start("bob")
    kernel = client.start(world.bob.add_notebook("large.ipynb"))
    kernel.run(f"import os; large = os.urandom({500 * MIB})")
    operation = client.finished(client.begin_save(kernel))
    assert operation["status"] == "failed"
    said = operation["error"]
    assert said["reason"] == "over_quota"
    assert re.search(r"it needs about [\d,]+ MiB.* of the quota of 400 MiB", said["message"])
    assert "Delete states or unpin them" in said["hint"]
    assert kernel.run("print(len(large) >> 20)") == "500"


def test_the_administrators_page_shows_both(world: World) -> None:
    assert world.saved is not None
    headers = {"Authorization": f"token {world.hub.token_of('head')}"}

    def report(user: str) -> dict[str, Any]:
        url = f"{world.hub.url}/services/gpu-ckpt/api/users/{user}"
        answer = requests.get(url, headers=headers, timeout=60)
        answer.raise_for_status()
        return dict(answer.json())

    # It reads the store once a second: the last thing that happened was the save that failed.
    wait_for(
        "both are read", lambda: not report("alice")["problem"] and report("bob")["failures"], 30
    )
    (state,) = report("alice")["states"]
    assert state["id"] == world.saved.state["id"] and state["path"] == "work.ipynb"
    (kernel,) = report("alice")["kernels"]
    assert (kernel["kernel_id"], kernel["status"]) == (world.saved.kernel_id, "running")
    bob = report("bob")
    assert [state["path"] for state in bob["states"]] == ["mine.ipynb"]
    assert [(failure["path"], failure["reason"]) for failure in bob["failures"]] == [
        ("large.ipynb", "over_quota")
    ]
    assert bob["quota"] == 400 * MIB and 0 < bob["used"] < bob["quota"]
