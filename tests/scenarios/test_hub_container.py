"""JupyterHub starts servers in containers of podman and runc, with no more rights than needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt.rights import NEEDED
from tests.harness.client import ApiError, wait_for
from tests.harness.hub import Hub
from tests.harness.server import Home
from tests.harness.user import User

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


def test_a_container_of_another_user_has_no_use_of_her_states(home: Home, user: User) -> None:
    alice = Home(home.path.parent / "alice", user)
    bob = Home(home.path.parent / "bob", User("jupyter-tester-b"))
    store = home.path.parent / "states"
    store.mkdir()
    store.chmod(0o1777)
    config: dict[str, dict[str, Any]] = {
        "NodeSpawner": {"capabilities": list(NEEDED)},
        "GpuCkptHub": {"store_url": str(store), "idle": 0.0, "interval": 0.0, "long_cell": 0.0},
    }
    with Hub(home, hub_config=config, accounts={"alice": alice, "bob": bob}) as hub:
        client = hub.start("alice")
        hers = client.start(alice.add_notebook("work.ipynb"))
        hers.run("x = 'of alice'")
        state = client.save(hers)["result"]["state_id"]

        other = hub.start("bob")
        his = other.start(bob.add_notebook("mine.ipynb"))
        own = other.save(his)["result"]["state_id"]
        assert [found["id"] for found in other.states()] == [own]
        for trick in (state, f"..%2F..%2F..%2Falice%2Fkernels%2F{hers.id}%2Fstates%2F{state}"):
            with pytest.raises(ApiError) as refused:
                other.post(f"gpu-ckpt/api/states/{trick}/restore", {"mode": "new"})
            assert refused.value.status == 404
        intruder = hub.client("alice", token=hub.token_of("bob"))
        with pytest.raises(ApiError) as refused:
            intruder.get("gpu-ckpt/api/states")
        assert refused.value.status == 403
        said = his.run(f"import os; print(os.access({str(store / 'alice')!r}, os.R_OK | os.X_OK))")
        assert said == "False"

        # Not even a copy of her files is of use, as it is or forged to be of his own kernel.
        def no_use(manifest: Path) -> None:
            assert bob.user is not None
            bob.user.own(store / "bob")
            found = {found["id"]: found["restorable"] for found in other.states()}
            assert found.get(state) in (None, False)
            with pytest.raises((ApiError, AssertionError), match=r"damaged|no saved state"):
                other.restore(state, mode="new")
            manifest.unlink()

        kernels = store / "bob" / "kernels"
        copy = kernels / hers.id
        shutil.copytree(store / "alice" / "kernels" / hers.id, copy)
        forged = (copy / "states" / f"{state}.json").read_text().replace(hers.id, his.id)
        no_use(copy / "states" / f"{state}.json")
        shutil.rmtree(copy)
        manifest = kernels / his.id / "states" / f"{state}.json"
        manifest.write_text(forged)
        no_use(manifest)
        (left,) = client.states()
        assert left["id"] == state and left["damage"] is None
        assert hers.run("print(x)") == "of alice"


def test_a_user_whose_container_died_goes_on_in_the_next_one(home: Home, user: User) -> None:
    mine = Home(home.path.parent / "alice", user)
    config: dict[str, dict[str, Any]] = {
        "NodeSpawner": {"capabilities": list(NEEDED)},
        "GpuCkptHub": {"idle": 0.0, "interval": 0.0, "long_cell": 0.0},
    }
    # Nodes die under the release before as well; under this one in tests/browser/test_hub.py.
    with Hub(home, hub_config=config, accounts={"alice": mine}, release=5) as hub:
        assert hub.version.startswith("5.")
        client = hub.start("alice")
        assert client.get("gpu-ckpt/api/doctor")["rights"]["row"] == "minimal"
        kernel = client.start(mine.add_notebook("work.ipynb"))
        said = kernel.run("import os, socket; x = 41; print(os.getuid(), socket.gethostname())")
        uid, first = said.split()
        assert int(uid) == user.uid != 0
        client.save(kernel)
        client.close()
        assert hub.kill_node("alice") == first

        # The hub notices; the next start lands in another container.
        hub.wait_stopped("alice")
        client = hub.start("alice")
        client.wait_lost(1)
        client.restore_lost(kernel.id)
        kernel = client.connect(kernel.id)
        assert kernel.run("x += 1; print(x)") == "42"

        # Stopped from the hub's page, the container ends with its server, and loses nothing.
        client.close()
        hub.stop("alice")
        wait_for("it is saved", lambda: "Saved 1 of 1 kernels" in hub.log(2000), 30)
        client = hub.start("alice")
        (lost,) = client.wait_lost(1)
        assert lost["why"] == "shutdown"
        client.restore_lost(kernel.id)
        kernel = client.connect(kernel.id)
        assert kernel.run("print(x)") == "42"
        hub.stop("alice")
