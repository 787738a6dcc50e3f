"""The extension in its server: loading, configuration, an orderly end, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import requests

from jupyter_gpu_ckpt.app import GpuCkptApp
from tests.harness.server import Home, JupyterServer
from tests.server.rest import Api


@pytest.fixture
def jp_server_config() -> dict[str, Any]:
    return {
        "ServerApp": {
            "jpserver_extensions": {"jupyter_gpu_ckpt": True},
            "reraise_server_extension_failures": True,
        },
        "Keeper": {"lease_interval": 4.5},
    }


async def test_is_configured_in_files_and_on_the_command_line(
    jp_configurable_serverapp: Callable[..., Any],
) -> None:
    server = jp_configurable_serverapp(argv=["--GpuCkpt.hold_timeout=3.5"])
    (app,) = server.extension_manager.extension_apps["jupyter_gpu_ckpt"]
    assert isinstance(app, GpuCkptApp) and app.keeper is not None
    assert (app.keeper.lease_interval, app.keeper.hold_timeout) == (4.5, 3.5)
    assert app.current_activity() is None


@pytest.mark.parametrize("how", ["SIGTERM", "REST"])
def test_an_orderly_end_ends_the_kernels_and_loses_none(home: Home, how: str) -> None:
    with JupyterServer(home) as first:
        kernel = first.client.start(home.add_notebook("a.ipynb"))
        process = psutil.Process(kernel.pid)
        state = Api(first).done(f"/kernels/{kernel.id}/save")["state_id"]
        server = first.process
        if how == "REST":
            first.client.post("api/shutdown")
        else:
            server.terminate()
        server.wait(30)
        process.wait(30)
        assert "Traceback" not in first.log()
    with JupyterServer(home) as second:
        api = Api(second)
        # Not lost: offered, because nobody asked for the kernel's own end.
        (offered,) = api.get("/lost")
        assert offered["why"] == "shutdown"
        assert [s["id"] for s in api.get("/states")] == [state]


def test_a_server_whose_extension_cannot_load_works_as_without_it(home: Home) -> None:
    enabled = {"jpserver_extensions": {"jupyter_gpu_ckpt": True}}
    config = {"ServerApp": enabled, "GpuCkpt": {"owner": "x" * 300}}
    # extension=False: the harness is not to insist on it.
    with JupyterServer(home, extension=False, config=config) as server:
        assert "The owner of a store needs a name of sensible length" in server.log(2000)
        answer = requests.get(
            f"{server.base_url}gpu-ckpt/api/doctor",
            headers={"Authorization": f"token {server.token}"},
            timeout=30,
        )
        assert answer.status_code == 404
        kernel = server.client.start(home.add_notebook("a.ipynb"))
        assert kernel.run("print(6 * 7)") == "42"
        process = psutil.Process(kernel.pid)
        server.stop()
        process.wait(30)
