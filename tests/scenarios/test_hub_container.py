"""JupyterHub starts servers in containers of podman and runc, with no more rights than needed."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpu_ckpt.rights import NEEDED
from tests.harness.client import wait_for
from tests.harness.hub import Hub
from tests.harness.server import Home
from tests.harness.user import User

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


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
