"""What the support for GPUs adds to a server's start, where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.report import Row

#: Seconds that it may add.
ALLOWED = 0.020
PACKAGE = "jupyter_gpu_ckpt"
#: What is there for the sake of GPUs only.
GPU_MODULES = tuple(
    f"{PACKAGE}.{name}"
    for name in ("gpus", "parking", "parked", "saved_gpus", "capture.gpu_use", "capture.gpu_words")
)
SOURCE = f"""
import time
import {PACKAGE}.app
from {PACKAGE}.gpus.asking import inventory
began = time.perf_counter()
inventory()
print(time.perf_counter() - began)
"""


class Imported(NamedTuple):
    """Seconds that imports took: all of them, and those for GPUs with what only they need."""

    whole: float
    gpu: float


def read(lines: Iterable[str]) -> Imported:
    """Read what Python writes with ``-X importtime``: what a module imports comes before it."""
    rows = []
    for line in lines:
        before, _, rest = line.partition("import time:")
        cells = rest.split("|")
        if before.strip() or len(cells) != 3 or not cells[0].strip().isdigit():
            continue
        name = cells[2][1:]
        depth = (len(name) - len(name.lstrip())) // 2
        rows.append((name.strip(), depth, int(cells[0]) / 1e6))
    whole = gpu = 0.0
    above: list[bool] = []  # of the modules that are being imported: whether they count
    for name, depth, seconds in reversed(rows):
        del above[depth:]
        own = any(name == one or name.startswith(f"{one}.") for one in GPU_MODULES)
        counts = own or (bool(above) and above[-1] and not name.startswith(PACKAGE))
        above += [counts] * (depth - len(above) + 1)
        whole += seconds
        gpu += seconds if counts else 0.0
    return Imported(whole, gpu)


def once() -> Imported:
    """Import the extension as a server does, in a fresh Python, and ask once for the GPUs."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", SOURCE],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    imported, asked = read(done.stderr.splitlines()), float(done.stdout)
    return Imported(imported.whole + asked, imported.gpu + asked)


def measure(rounds: int) -> list[Row]:
    """Compare what is for GPUs with what is allowed, and the whole with the rest."""
    measured = [once() for _ in range(max(rounds, 9))]
    added = [one.gpu for one in measured]
    whole = [one.whole for one in measured]
    rest = [one.whole - one.gpu for one in measured]
    allowed = [ALLOWED] * len(measured)
    return [
        Row("start of a server, for GPUs", "what is allowed", added, allowed, "<= 1"),
        Row("start of a server, imports", "without those for GPUs", whole, rest, "<= 1.02"),
    ]
