"""What an idle server with kernels costs, against the same server without the extension."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Row
from tests.harness.client import wait_for
from tests.harness.server import Home, JupyterServer

KERNELS = 20
#: Over so many seconds.
SPAN = 60.0
#: Half a percent of one core.
LIMIT = f"<= {0.005 * SPAN:g} s"

#: Every kernel is saved once by the idle policy, and then left alone. Leases as by default.
CONFIG: dict[str, dict[str, Any]] = {
    "AutoSave": {"idle": 1.0},
    "GpuCkpt": {"lease_interval": 10.0, "lease_ttl": 30.0},
}


def measure(folder: Path) -> list[Row]:
    """Compare one server of each kind, one after the other."""
    ours = _cost(Home(folder / "ours"), extension=True)
    theirs = _cost(Home(folder / "theirs"), extension=False)
    what = f"CPU of an idle server with {KERNELS} kernels, {SPAN:g} s"
    return [Row(what, "without the extension", [ours], [theirs], LIMIT)]


def _cost(home: Home, *, extension: bool) -> float:
    """CPU seconds of the server, with what it runs beside the kernels themselves."""
    config = CONFIG if extension else {}
    with JupyterServer(home, config=config, extension=extension) as server:
        for number in range(KERNELS):
            kernel = server.client.start(home.add_notebook(f"{number}.ipynb"))
            kernel.run("x = 1")
            kernel.close()
        if extension:
            wait_for(
                "every kernel is saved once",
                lambda: len({s["kernel_id"] for s in server.client.states()}) == KERNELS,
                120,
            )
        time.sleep(5)  # what the last save left to be done
        before = _seconds(server.process)
        time.sleep(SPAN)
        return _seconds(server.process) - before


def _seconds(server: psutil.Process) -> float:
    """CPU seconds of the server and the supervisors of its kernels."""
    total = 0.0
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid == server.pid or process.name() == "kernel-capture":
                times = process.cpu_times()
                total += times.user + times.system
    return total
