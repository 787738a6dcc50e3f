"""What an idle server with kernels costs, against the same server without the extension."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.overhead import cpu_seconds
from benchmarks.report import Row
from tests.harness.client import wait_for
from tests.harness.server import Home, JupyterServer

KERNELS = 20
#: Over so many seconds, several times.
SPAN = 20.0
SPANS = 6
#: Half a percent of one core.
LIMIT = f"<= {0.005 * SPAN:g} s"

#: Every kernel is saved once by the idle policy, and then left alone. Leases as by default.
CONFIG: dict[str, dict[str, Any]] = {
    "AutoSave": {"idle": 1.0},
    "GpuCkpt": {"lease_interval": 10.0, "lease_ttl": 30.0},
}


def measure(folder: Path) -> list[Row]:
    """Compare one server of each kind, both at the same time."""
    with (
        _server(Home(folder / "theirs"), extension=False) as theirs,
        _server(Home(folder / "ours"), extension=True) as ours,
    ):
        wait_for(
            "every kernel is saved once",
            lambda: len({s["kernel_id"] for s in ours.client.states()}) == KERNELS,
            120,
        )
        time.sleep(5)  # what the last save left to be done
        cost: list[float] = []
        theirs_cost: list[float] = []
        kinds = ((ours.process, cost), (theirs.process, theirs_cost))
        for _ in range(SPANS):
            before = [_seconds(process) for process, _ in kinds]
            time.sleep(SPAN)
            for (process, seconds), used in zip(kinds, before, strict=True):
                seconds.append(_seconds(process) - used)
    what = f"CPU of an idle server with {KERNELS} kernels, {SPAN:g} s"
    return [Row(what, "without the extension", cost, theirs_cost, LIMIT)]


@contextlib.contextmanager
def _server(home: Home, *, extension: bool) -> Iterator[JupyterServer]:
    """Yield a server whose kernels ran a cell each."""
    config = CONFIG if extension else {}
    with JupyterServer(home, config=config, extension=extension) as server:
        for number in range(KERNELS):
            kernel = server.client.start(home.add_notebook(f"{number}.ipynb"))
            kernel.run("x = 1")
            kernel.close()
        yield server


def _seconds(server: psutil.Process) -> float:
    """CPU seconds of the server and the supervisors of its kernels."""
    total = 0.0
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid == server.pid or process.name() == "kernel-capture":
                total += cpu_seconds(process.pid)
    return total
