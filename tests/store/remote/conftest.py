"""For each test a folder of a bucket behind a proxy of its own; the servers are the session's."""

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
