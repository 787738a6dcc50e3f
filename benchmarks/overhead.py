"""What the supervisor costs while a kernel runs, against the stock provisioner."""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jupyter_client import BlockingKernelClient

from benchmarks.report import Row
from tests.harness.server import Home, JupyterServer

LOOP = """
import time
def loop():
    n = 0
    for i in range(3_000_000):
        n += i
began = time.perf_counter()
loop()
took = time.perf_counter() - began
"""
LOOPS = 60
EXECUTES = 2000
#: Pairs of kernels over which all of it is spread: two processes that do the same differ by some
#: percent in their speed, for where their memory lies.
PAIRS = 10
#: The two kernels take turns after so many, so that whatever else the machine does hits both.
BLOCK = 50

#: Both sides' memory is laid out alike: where it lies makes a loop quicker or slower by percents.
ADDR_NO_RANDOMIZE = 0x0040000

Peers = tuple[BlockingKernelClient, BlockingKernelClient]
Figures = tuple[list[float], list[float]]


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
    loops: Figures = ([], [])
    blocks: Figures = ([], [])
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)
    with JupyterServer(home, environment={"PYTHONHASHSEED": "0"}) as server:
        for _ in range(PAIRS):
            with contextlib.ExitStack() as stack:
                ours = stack.enter_context(running(server, "python3", savable=True))
                theirs = stack.enter_context(running(server, "stock", savable=False))
                best((ours, theirs), LOOPS // PAIRS, loop, loops)
                best((ours, theirs), EXECUTES // BLOCK // PAIRS, executes, blocks)
    return [
        Row("CPU loop", "stock provisioner", *loops, limit="1.00 +- 0.02"),
        Row(f"{BLOCK} of {EXECUTES} empty executes", "stock provisioner", *blocks,
            limit="1.00 +- 0.02"),
    ]  # fmt: skip


@contextlib.contextmanager
def running(server: JupyterServer, name: str, *, savable: bool) -> Iterator[BlockingKernelClient]:
    """Yield a client of a fresh kernel, warmed up.

    It speaks with the kernel itself: a websocket's delays would hide what is looked for.
    """
    kernel = server.client.start(kernel=name)
    said = server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}")
    assert said["savable"] is savable, said
    kernel.close()
    (file,) = server.home.data.rglob(f"kernel-{kernel.id}.json")
    peer = BlockingKernelClient(connection_file=str(file))
    peer.load_connection_file()
    peer.start_channels()
    try:
        peer.wait_for_ready(timeout=60)
        executes(peer)
        yield peer
    finally:
        peer.stop_channels()
        server.client.delete(f"api/kernels/{kernel.id}")


def best(
    peers: Peers, times: int, once: Callable[[BlockingKernelClient], float], into: Figures
) -> None:
    """Add the best of so many measurements of each, taken in turn, each first in half of them.

    The best, because whatever else the machine does can only make one slower.
    """
    taken: Figures = ([], [])
    for number in range(times):
        for side in [0, 1] if number % 2 else [1, 0]:
            taken[side].append(once(peers[side]))
    for side in (0, 1):
        into[side].append(min(taken[side]))


def loop(peer: BlockingKernelClient) -> float:
    """Return the seconds that the loop took in the kernel."""
    reply = peer.execute_interactive(
        LOOP, user_expressions={"took": "took"}, output_hook=lambda _: None, timeout=120
    )
    return float(reply["content"]["user_expressions"]["took"]["data"]["text/plain"])


def executes(peer: BlockingKernelClient) -> float:
    """Return the seconds that a block of empty cells took, each to its end."""
    began = time.perf_counter()
    for _ in range(BLOCK):
        peer.execute_interactive("", timeout=60)
    return time.perf_counter() - began
