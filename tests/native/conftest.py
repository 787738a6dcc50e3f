from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.native.driver import Capture, Kernel
from tests.native.gpu_node import HOLDER, PAIR, GpuNode, held

COUNTER = """
import time
i = 0
while True:
    i += 1
    print("tick", i, flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Start programs under the supervisor; all are ended after the test."""
    kernels: list[Kernel] = []

    def start(source: str = COUNTER, name: str = "kernel", **kwargs: Any) -> Kernel:
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        kernels.append(Kernel(folder, source, **kwargs))
        return kernels[-1]

    yield start
    for one in kernels:
        one.close()


@pytest.fixture
def capture() -> Iterator[Callable[..., Capture]]:
    """Start `kernel-capture` with any arguments; ended after the test."""
    started: list[Capture] = []

    def start(*args: Any, **kwargs: Any) -> Capture:
        started.append(Capture(*args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., GpuNode]]:
    """Start nodes with simulated GPUs; ended after the test."""
    nodes: list[GpuNode] = []

    def start(*gpus: dict[str, Any], **settings: Any) -> GpuNode:
        nodes.append(GpuNode(tmp_path / f"node-{len(nodes)}", *gpus, **settings))
        return nodes[-1]

    yield start
    for one in nodes:
        one.stop()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Start kernels on a node; ended after the test."""
    kernels: list[Kernel] = []

    def start(node: GpuNode, source: str = HOLDER, **environment: str) -> Kernel:
        kernels.append(node.kernel(tmp_path / f"kernel-{len(kernels)}", source, **environment))
        return kernels[-1]

    yield start
    for one in kernels:
        one.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GpuNode, Kernel, list[str]]]:
    """One kernel of two processes with CUDA for all that must leave it running.

    Its node, itself, and what `intact` looks for.
    """
    folder = tmp_path_factory.mktemp("pair")
    here = GpuNode(folder / "node")
    one = here.kernel(folder / "kernel", PAIR)
    yield here, one, held(one, 2)
    one.close()
    here.stop()
