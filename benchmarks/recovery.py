"""From a new server's first answer to the old variable, against running the notebook again."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.report import Row
from benchmarks.states import settle
from tests.harness.client import Client, KernelClient
from tests.harness.server import Home, JupyterServer

#: The notebook: what is cheap to make again, and what is not that cheap.
CELLS = [
    "import numpy as np\n"
    "rng = np.random.default_rng(0)\n"
    "data = [rng.standard_normal(8 << 20) for _ in range({arrays})]",
    "for array in data:\n    array.sort()",
]
SHOW = "print(data[0][0], data[-1][-1])"


def measure(folder: Path, size: float, rounds: int) -> list[Row]:
    """Measure with `size` GiB of data, `rounds` times; each time the server and its kernel die."""
    home = Home(folder)
    cells = [cell.format(arrays=max(1, round(size * 16))) for cell in CELLS]
    path = home.add_notebook("bench.ipynb", cells)
    restored: list[float] = []
    drawn: list[float] = []
    sorted_: list[float] = []
    with JupyterServer(home) as server:
        kernel = server.client.start(path)
        for cell in cells:
            kernel.run(cell, timeout=600)
        shown = kernel.run(SHOW)
        server.client.save(kernel, timeout=600)
        server.kill()
    for _ in range(rounds):
        settle(size)
        with JupyterServer(home) as server:
            restored.append(_restore(server.client, kernel, shown))
            server.kill()
        settle(size)
        with JupyterServer(home) as server:
            times = _run_again(server.client, cells, shown)
            drawn.append(times[0])
            sorted_.append(times[1])
            server.kill()
    what = f"new server to the old variable, {size:g} GiB"
    return [
        Row(what, "drawing it again", restored, drawn, "< 1"),
        Row(what, "drawing and sorting it again", restored, sorted_, "< 1"),
    ]


def _restore(client: Client, kernel: KernelClient, shown: str) -> float:
    """Return the seconds until a cell has printed the variable; the server answers by now."""
    began = time.perf_counter()
    client.wait_lost(1)
    client.restore_lost(kernel.id, timeout=600)
    assert client.connect(kernel.id).run(SHOW) == shown
    return time.perf_counter() - began


def _run_again(client: Client, cells: list[str], shown: str) -> list[float]:
    """Return the seconds after which each cell of a new kernel has ended, the variable shown."""
    began = time.perf_counter()
    kernel = client.start()
    ends = []
    for cell in cells:
        kernel.run(cell, timeout=600)
        printed = kernel.run(SHOW)
        ends.append(time.perf_counter() - began)
    assert printed == shown
    return ends
