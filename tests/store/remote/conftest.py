"""Servers for the session, and for each test a folder of a bucket behind a proxy of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest

from jupyter_gpu_ckpt.store.objects import Objects
from tests.harness.s3 import ObjectServer, Proxy

Connect = Callable[..., Objects]

#: For tests of what all systems must do. The others, of what happens above one system's client,
#: run on S3 alone.
everywhere = pytest.mark.parametrize("system", ["s3", "gcs", "azure"], indirect=True)


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[ObjectServer]:
    from tests.harness.gcs import GcsServer

    server = GcsServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def azure_server() -> Iterator[ObjectServer]:
    from tests.harness.azure import AzureServer

    server = AzureServer()
    yield server
    server.stop()


@pytest.fixture
def system(request: pytest.FixtureRequest) -> ObjectServer:
    """The server of a test: of S3, unless the test says otherwise."""
    server: ObjectServer = request.getfixturevalue(f"{getattr(request, 'param', 's3')}_server")
    return server


@pytest.fixture
def proxy(system: ObjectServer) -> Iterator[Proxy]:
    proxy = Proxy(system.port, system.options)
    yield proxy
    proxy.stop()


@pytest.fixture
def url(system: ObjectServer) -> str:
    """Where the store of one test lies."""
    return f"{system.protocol}://{system.bucket}/{secrets.token_hex(4)}/states"


@pytest.fixture
def connect(proxy: Proxy, url: str) -> Iterator[Connect]:
    """A connection through the proxy, with short deadlines."""
    made: list[Objects] = []

    def connect(timeout: float = 2.0, attempts: int = 5) -> Objects:
        made.append(Objects(url, proxy.options, timeout=timeout, attempts=attempts))
        return made[-1]

    yield connect
    for objects in made:
        objects.close()
