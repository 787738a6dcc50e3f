"""Encryption and retention in a real server: configured as an administrator would."""

from __future__ import annotations

import getpass
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from jupyter_server.services.sessions.sessionmanager import SessionManager
from traitlets.config import Config, LoggingConfigurable

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.keeper import Keeper
from jupyter_gpu_ckpt.store import KernelRecord, Lease, StateStore
from jupyter_gpu_ckpt.store.keys import KeyFile, KeyRing, new_key_file
from jupyter_gpu_ckpt.store.upkeep import Look
from tests.harness.client import wait_for
from tests.harness.server import Home, JupyterServer
from tests.server.shell import Shell
from tests.store.conftest import make_meta


def test_states_are_encrypted_and_only_those_stay_that_a_rule_keeps(
    home: Home, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    new_key_file(key)
    rules = {"keep_last": 2, "keep_hourly": 0, "keep_daily": 0}
    config = {"GpuCkpt": {"key_file": str(key)} | rules}
    with JupyterServer(home, config=config) as server:
        client = server.client
        kernel = client.start()
        kernel.run("password = 'hunter' + str(2)")
        states = [client.save(kernel)["result"]["state_id"] for _ in range(2)]
        store = StateStore(home.store, getpass.getuser(), sealing=KeyRing(KeyFile(key)))
        store.mark(states[0], pinned=True)
        states += [client.save(kernel)["result"]["state_id"] for _ in range(3)]
        left = {states[0], *states[-2:]}
        wait_for(
            "old states are removed", lambda: {s["id"] for s in client.states()} == left, timeout=30
        )
        kernel.run("password = None")
        client.restore(states[0])
        assert kernel.run("print(password)") == "hunter2"
        for path in home.store.rglob("*"):
            assert not path.is_file() or b"hunter2" not in path.read_bytes()
        with pytest.raises(CkptError, match="encrypted"):
            StateStore(home.store, getpass.getuser()).open(states[0])


def test_a_quota_takes_the_oldest_that_is_not_pinned(home: Home) -> None:
    """And space is given back while kernels are saved: of what they need nothing goes."""
    states: list[str] = []
    digests: list[str] = []
    with JupyterServer(home) as server:
        client, shell = server.client, Shell(home)
        kernel = client.start()
        kernel.run("import os, hashlib")
        for _ in range(4):
            kernel.run("data = os.urandom(8 << 20)")
            digests.append(kernel.run("print(hashlib.sha256(data).hexdigest())"))
            begun = client.begin_save(kernel)
            rounds = 0
            while client.get(f"gpu-ckpt/api/operations/{begun['id']}")["status"] == "running":
                client.post("gpu-ckpt/api/gc", {"dry_run": False})
                rounds += 1
            assert rounds
            states.append(client.done(begun)["result"]["state_id"])
        shell.run("pin", states[0])
        shell.run("label", states[1], "a label is no pin")
        server.kill()
    used = StateStore(home.store, getpass.getuser()).listing().used
    with JupyterServer(home, config={"GpuCkpt": {"quota": used}}) as server:
        client = server.client
        client.wait_lost(1)
        client.restore_lost(kernel.id)
        again = client.connect(kernel.id)
        newest = client.save(again)["state_id"]

        def left() -> set[str]:
            return {state["id"] for state in client.states()}

        wait_for("the oldest goes", lambda: states[1] not in left(), timeout=30)
        assert {states[0], states[3], newest} <= left()
        for state, digest in ((states[3], digests[3]), (states[0], digests[0])):
            client.restore(state)
            assert again.run("print(hashlib.sha256(data).hexdigest())") == digest


def test_only_a_pin_keeps_a_state_of_some_age(home: Home) -> None:
    with JupyterServer(home, config={"GpuCkpt": {"max_age": 3.0}}) as server:
        client, shell = server.client, Shell(home)
        kernel = client.start()
        # A newest state stays, however long this takes.
        pinned = client.save(kernel)["state_id"]
        shell.run("pin", pinned)
        labelled = client.save(kernel)["state_id"]
        shell.run("label", labelled, "a label is no pin")

        def gone() -> bool:
            """The rules are applied after each save."""
            newest = client.save(kernel)["state_id"]
            left = {state["id"] for state in client.states()}
            assert {pinned, newest} <= left
            return labelled not in left

        wait_for("the older one goes", gone, timeout=60)


def test_a_save_that_the_quota_has_no_room_for_leaves_the_kernel_alone(home: Home) -> None:
    with JupyterServer(home, config={"GpuCkpt": {"quota": 1 << 20}}) as server:
        client = server.client
        kernel = client.start()
        kernel.run("x = 1")
        operation = client.finished(client.begin_save(kernel))
        assert operation["status"] == "failed"
        assert operation["error"]["reason"] == "over_quota"
        assert "quota" in operation["error"]["hint"]
        assert kernel.run("print(x)") == "1"
        assert client.states() == []


#: A lease of another node's server.
ELSEWHERE = Lease(
    node_id="elsewhere",
    hostname="elsewhere",
    boot_id="another",
    server_pid=1,
    server_start=1.0,
    renewed=0.0,
    ttl=3600.0,
)
LOST = msgspec.structs.replace(ELSEWHERE, ttl=0.0)


def keeper_of(folder: Path, **settings: Any) -> Keeper:
    """The keeper of a server without kernels."""
    kernels = AsyncMappingKernelManager()
    contents = AsyncLargeFileManager(root_dir=str(folder))
    return Keeper(
        parent=LoggingConfigurable(config=Config({"GpuCkpt": settings})),
        kernel_manager=kernels,
        session_manager=SessionManager(kernel_manager=kernels, contents_manager=contents),
    )


def put(store: StateStore, kernel_id: str, lease: Lease) -> None:
    store.put_kernel(
        KernelRecord(
            kernel_id=kernel_id, kernel_name="python3", display_name="Python 3", lease=lease
        )
    )


@pytest.mark.parametrize("starts", [True, False], ids=["start", "save"])
@pytest.mark.parametrize(
    "rules", [{"max_age": 1e-6}, {"keep_last": 1, "keep_hourly": 0, "keep_daily": 0}]
)
async def test_what_is_needed_since_the_server_looked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any], starts: bool
) -> None:
    """A look, and the removals after it, take minutes where there are many states."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "local-provisioner")
    image = tmp_path / "image"
    image.mkdir()
    (image / "pages-1.img").write_bytes(b"data")
    keeper = keeper_of(tmp_path, **rules)
    store = keeper.store

    def saved() -> tuple[str, list[str]]:
        """A kernel, and its states, oldest first."""
        kernel_id = str(uuid.uuid4())
        for _ in range(3):
            with store.begin(kernel_id) as writer:
                writer.add_tree(image)
                meta = make_meta(kernel_id)
                meta.label = None
                writer.commit(meta)
        return kernel_id, [state.id for state in reversed(store.states(kernel_id))]

    (_, ended), (moved, of_moved), (found, of_found) = (saved() for _ in range(3))
    put(store, moved, LOST)
    look = store.look

    def looked() -> Look:
        seen = look()
        store.mark(ended[0], pinned=True)
        store.mark(ended[1], label="a label is no pin")
        # Another server brings one back, maybe from an older state, and loses another.
        put(store, moved, ELSEWHERE)
        put(store, found, LOST)
        return seen

    monkeypatch.setattr(store, "look", looked)
    await (keeper.tidying.begin() if starts else keeper.tidying.apply())
    left = {ended[0], *of_moved, of_found[-1]} | ({*ended} if "keep_last" in rules else set())
    assert {state.id for state in store.states()} == left
