"""All servers of a node upload at a rate that they have in common."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt.store.bandwidth import NodeShare
from tests.harness.client import Message, wait_for
from tests.harness.forked import ForkedServers
from tests.harness.s3 import S3Server, options
from tests.harness.server import Home

MIB = 1 << 20
#: Bytes a second, and how much each of two kernels has.
RATE, SIZE = 8.0 * MIB, 12 * MIB


@pytest.mark.root
def test_two_servers_take_no_more_than_one_would(shared: Path, s3_server: S3Server) -> None:
    homes = [Home(shared / name) for name in ("anna", "bert")]
    place = f"s3://{s3_server.bucket}/{secrets.token_hex(4)}/{{username}}"
    turns = shared / "turns"
    configs: list[dict[str, dict[str, Any]]] = [
        {
            "GpuCkpt": {
                "store_url": place, "store_options": options(s3_server.port),
                "owner": home.path.name, "upload_bandwidth_per_node": RATE,
                "node_turns_dir": str(turns),
            },
        }
        for home in homes
    ]  # fmt: skip
    watcher, shares = NodeShare(turns, RATE), []
    with ForkedServers(homes, configs) as servers, ThreadPoolExecutor(2) as pool:

        def begin(number: int) -> Any:
            kernel = servers.clients[number].start(homes[number].add_notebook("book.ipynb"))
            kernel.run(f"import os; x = os.urandom({SIZE})")
            return kernel

        kernels = list(pool.map(begin, range(2)))
        began = time.monotonic()
        # While the test has many parts nobody sends much, and both come to be at it at once.
        with ExitStack() as parts:
            for _ in range(64):
                parts.enter_context(NodeShare(turns, RATE).held())
            for client, kernel in zip(servers.clients, kernels, strict=True):
                client.begin_save(kernel)
            wait_for("both upload", lambda: watcher.rate() == RATE / 67, 60)

        def states() -> list[Message]:
            shares.append(watcher.rate())
            return [state for client in servers.clients for state in client.states()]

        def durable() -> bool:
            return len(found := states()) == 2 and all(state["durable"] for state in found)

        wait_for("both are uploaded", durable, 120, 0.1)
        took, size = time.monotonic() - began, sum(state["stored_size"] for state in states())
        assert shares[0] == RATE / 3, "at the same time: two, and the one who looks"
        assert size > 2 * SIZE
        assert took >= size / RATE - 1, (took, size / RATE, shares)
        assert watcher.rate() == RATE, "nobody uploads any more"
