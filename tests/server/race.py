"""Two servers that want the same kernel at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.harness.server import JupyterServer

Both = tuple[JupyterServer, JupyterServer]


def one_gets_it(
    both: Both, bring_back: Callable[[JupyterServer], dict[str, Any]]
) -> tuple[JupyterServer, JupyterServer, str]:
    """Let both bring a kernel back; the one that does, the other, and what that one is told."""
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(bring_back, both))
    assert sorted(end["status"] for end in ends) == ["done", "failed"], ends
    winner, loser = both if ends[0]["status"] == "done" else both[::-1]
    refused = next(end["error"] for end in ends if end["status"] == "failed")
    assert refused["reason"] == "not_restorable"
    assert loser.client.get("api/kernels") == []
    return winner, loser, refused["message"]
