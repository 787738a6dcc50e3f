"""Waking a hibernated kernel for a cell, against a plain restore of the same state.

Seconds from the request to the answer of a cell that uses what was saved. A plain restore is a
roll-back of the hibernated kernel, and the cell after it.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.report import Row
from tests.harness.client import KernelClient, wait_for
from tests.harness.server import Home, JupyterServer

#: MiB of random bytes that the kernel holds.
SIZE = 256


def measure(folder: Path, rounds: int) -> list[Row]:
    """Measure both alternately."""
    seconds: dict[str, list[float]] = {"wake": [], "restore": []}
    with JupyterServer(Home(folder / "home")) as server:
        kernel = server.client.start(server.home.add_notebook("book.ipynb"))
        kernel.run(f"import os; x = os.urandom({SIZE} << 20)")
        for _ in range(rounds):
            for how, taken in seconds.items():
                state = hibernate(server, kernel)
                began = time.monotonic()
                if how == "restore":
                    server.client.restore(state)
                assert kernel.run("print(len(x))") == str(SIZE << 20)
                taken.append(time.monotonic() - began)
    what = f"cell that wakes a kernel of {SIZE} MiB"
    return [Row(what, "restore, then the cell", seconds["wake"], seconds["restore"], "<= 1.3")]


def hibernate(server: JupyterServer, kernel: KernelClient) -> str:
    """Hibernate the kernel; returns its state."""
    client = server.client
    done = client.done(client.post(f"gpu-ckpt/api/kernels/{kernel.id}/hibernate"))
    wait_for("no operation", lambda: not running(server, kernel), 10)
    return str(done["result"]["state_id"])


def running(server: JupyterServer, kernel: KernelClient) -> bool:
    """Whether an operation is under way."""
    return bool(server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}")["operation"])
