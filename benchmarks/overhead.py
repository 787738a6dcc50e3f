"""What the supervisor costs while a kernel runs, against the stock provisioner."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Row
from tests.harness.client import KernelClient
from tests.harness.server import Home, JupyterServer

LOOP = """
import time
began = time.perf_counter()
n = 0
for i in range(20_000_000):
    n += i
print(time.perf_counter() - began)
"""
LOOPS = 8
EXECUTES = 2000
#: The two kernels take turns after so many, so that whatever else the machine does hits both.
BLOCK = 50


def measure(folder: Path) -> list[Row]:
    """Run the same on two kernels of one server that differ in their provisioner only."""
    home = Home(folder)
    spec = home.data / "kernels" / "stock"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps(
            {
                "argv": ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": "Stock",
                "language": "python",
                "metadata": {"kernel_provisioner": {"provisioner_name": "local-provisioner"}},
            }
        )
    )
    with JupyterServer(home) as server:
        ours, theirs = server.client.start(), server.client.start(kernel="stock")
        for kernel, savable in ((ours, True), (theirs, False)):
            said = server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}")
            assert said["savable"] is savable, said
            _executes(kernel, BLOCK)  # warm up
        loops = _in_turn(ours, theirs, LOOPS, lambda kernel: float(kernel.run(LOOP)))
        blocks = _in_turn(ours, theirs, EXECUTES // BLOCK, lambda k: _executes(k, BLOCK))
    return [
        Row("CPU loop", "stock provisioner", *loops, limit="1.00 +- 0.02"),
        Row(f"{BLOCK} of {EXECUTES} empty executes", "stock provisioner", *blocks,
            limit="1.00 +- 0.02"),
    ]  # fmt: skip


def _in_turn(
    ours: KernelClient, theirs: KernelClient, times: int, once: Callable[[KernelClient], float]
) -> tuple[list[float], list[float]]:
    figures: tuple[list[float], list[float]] = ([], [])
    for number in range(times):
        pair = [(ours, figures[0]), (theirs, figures[1])]
        for kernel, into in pair if number % 2 else reversed(pair):
            into.append(once(kernel))
    return figures


def _executes(kernel: KernelClient, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        kernel.execute("")
    return time.perf_counter() - began
