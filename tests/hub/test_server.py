"""A real server with the settings of a hub, and a configuration of its user's that wants more."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_gpu_ckpt.hub.granting import limits
from jupyter_gpu_ckpt.hub.keys import VARIABLE as KEY
from jupyter_gpu_ckpt.hub.settings import GpuCkptHub
from jupyter_gpu_ckpt.limits import VARIABLE
from tests.harness.client import ApiError
from tests.harness.server import Home, JupyterServer


def test_a_server_keeps_to_what_the_hub_allows_and_says_so(home: Home, shared: Path) -> None:
    states = shared / "states"
    states.mkdir(mode=0o700)
    hub = GpuCkptHub(
        store_url=f"{states}/{{username}}", master_key_file="/hub/only", quota=1 << 30,
        users_may_change=["idle", "interval"], before_shutdown=True,
    )  # fmt: skip
    environment = {VARIABLE: limits(hub, "anna").encoded(), KEY: "7" * 64, "JUPYTERHUB_USER": "x"}
    mine = {
        "GpuCkpt": {"quota": None, "store_url": str(shared / "mine"), "key_env": None},
        "AutoSave": {"before_shutdown": False, "shortest": 0.1},
    }
    with JupyterServer(home, config=mine, environment=environment) as server:
        client = server.client
        kernel = client.start(home.add_notebook("mine.ipynb"))
        client.save(kernel)
        # Where the hub wants it, of whom the hub says, and with the hub's key.
        assert list(states.glob("anna/anna/kernels/*/states/*.json"))
        assert list(states.glob("anna/anna/keys/*.json"))
        assert not (shared / "mine").exists()
        assert kernel.run(f"import os; print(os.environ.get({KEY!r}))") == "None"
        autosave = client.get("gpu-ckpt/api/autosave")
        assert autosave["limits"]["shortest"] == 60
        assert "before_shutdown" in autosave["limits"]["locked"]
        assert autosave["policy"]["before_shutdown"] is True
        log = server.log()
        assert (
            "GpuCkpt.quota is 1073741824 and not None, as configured. "
            "The administrator allows no more than that." in log
        )
        assert "AutoSave.before_shutdown is True and not False, as configured." in log


def test_who_may_not_save_has_a_server_as_ever_and_is_told(home: Home) -> None:
    hub = GpuCkptHub(allowed_users=["bert"])
    environment = {VARIABLE: limits(hub, "anna").encoded()}
    mine = {"GpuCkptProvisioner": {"enabled": True}}
    with JupyterServer(home, config=mine, environment=environment) as server:
        client = server.client
        kernel = client.start(home.add_notebook("mine.ipynb"))
        assert kernel.run("print(6 * 7)") == "42"
        found = client.get(f"gpu-ckpt/api/kernels/{kernel.id}")
        assert found["savable"] is False
        with pytest.raises(ApiError, match="does not let your kernels be saved"):
            client.begin_save(kernel)
        doctor = client.get("gpu-ckpt/api/doctor")
        assert doctor["can_capture"] is False
        assert "does not let your kernels be saved" in str(doctor["checks"])
