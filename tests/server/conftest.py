"""One real server for the tests of a file, and kernels in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.harness.client import KernelClient
from tests.harness.server import Home, JupyterServer, shared_folder
from tests.server.rest import Api


@pytest.fixture(scope="module")
def lasting_home() -> Iterator[Home]:
    """A home that the tests of a file share."""
    with shared_folder("server-tests") as path:
        yield Home(path / "home")


@pytest.fixture(scope="module")
def server(lasting_home: Home) -> Iterator[JupyterServer]:
    """A server that the tests of a file share."""
    with JupyterServer(lasting_home) as server:
        yield server
        for line in server.log_path.read_text().splitlines():
            assert "event not sent" not in line
            assert "Uncaught exception" not in line


@pytest.fixture(scope="module")
def api(server: JupyterServer) -> Api:
    return Api(server)


@pytest.fixture
def start(
    server: JupyterServer, lasting_home: Home, request: pytest.FixtureRequest
) -> Iterator[Callable[..., KernelClient]]:
    """Start a kernel with a notebook of the test's own name; it is shut down afterwards."""
    started: list[str] = []

    def start(name: str | None = None, kernel: str = "python3") -> KernelClient:
        name = name or f"{request.node.originalname}-{len(started)}.ipynb"
        client = server.client.start(lasting_home.add_notebook(name, kernel=kernel), kernel)
        started.append(client.id)
        return client

    yield start
    for running in server.client.get("api/kernels"):
        if running["id"] in started:
            server.client.delete(f"api/kernels/{running['id']}")


@pytest.fixture(scope="module")
def stock_kernelspec(lasting_home: Home) -> str:
    """Name of a kernelspec that opts out: its kernels cannot be saved."""
    folder = lasting_home.data / "kernels" / "stock"
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python, not savable",
        "language": "python",
        "metadata": {"kernel_provisioner": {"provisioner_name": "local-provisioner"}},
    }
    (folder / "kernel.json").write_text(json.dumps(spec))
    return folder.name
