"""An S3 server for the session, and for each test a bucket behind a proxy of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest

from jupyter_gpu_ckpt.store.objects import Objects
from tests.harness.s3 import Proxy, S3Server

Connect = Callable[..., Objects]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    proxy = Proxy(s3_server.port)
    yield proxy
    proxy.stop()


@pytest.fixture
def url(s3_server: S3Server) -> str:
    """Where the store of one test lies."""
    return f"s3://{s3_server.bucket}/{secrets.token_hex(4)}/states"


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
