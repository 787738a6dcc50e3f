"""Waking a hibernated kernel for a cell, against a plain restore of the same state.

``python -m benchmarks.wake [MiB] [repeats]``: seconds from the request to the answer of a cell that
uses what was saved. A plain restore is a roll-back of the hibernated kernel, and the cell after it.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.harness.client import KernelClient, wait_for
from tests.harness.server import Home, JupyterServer


def main(size: int, repeats: int) -> None:
    """Measure and print both, alternately, as medians and smallest values."""
    seconds: dict[str, list[float]] = {"wake": [], "restore": []}
    with TemporaryDirectory() as folder, JupyterServer(Home(Path(folder) / "home")) as server:
        kernel = server.client.start(server.home.add_notebook("book.ipynb"))
        kernel.run(f"import os; x = os.urandom({size} << 20)")
        for _ in range(repeats):
            for how, taken in seconds.items():
                state = hibernate(server, kernel)
                began = time.monotonic()
                if how == "restore":
                    server.client.restore(state)
                assert kernel.run("print(len(x))").strip() == str(size << 20)
                taken.append(time.monotonic() - began)
    for how, taken in seconds.items():
        print(f"{how:8} median {statistics.median(taken):.2f} s, least {min(taken):.2f} s")
    ratio = statistics.median(seconds["wake"]) / statistics.median(seconds["restore"])
    print(f"a wake takes {ratio:.2f} times as long")


def hibernate(server: JupyterServer, kernel: KernelClient) -> str:
    """Hibernate the kernel; returns its state."""
    client = server.client
    done = client.done(client.post(f"gpu-ckpt/api/kernels/{kernel.id}/hibernate"))
    wait_for("no operation", lambda: not running(server, kernel), 10)
    return str(done["result"]["state_id"])


def running(server: JupyterServer, kernel: KernelClient) -> bool:
    """Whether an operation is under way."""
    return bool(server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}")["operation"])


if __name__ == "__main__":
    main(*(int(argument) for argument in (sys.argv[1:] or ["256", "5"])))
