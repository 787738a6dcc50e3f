"""What the supervisor costs while a kernel runs, against the stock provisioner.

Three kernels of one server live at the same time: ours, and two stock ones, which show against
each other what the method resolves. In short turns, in an order drawn anew each time, they do the
same, all on one core with the server and the client: so whatever else the machine does hits all
alike, and what the server does for a kernel counts. That can only add to what a turn takes, so the
faster half of a kernel's turns stands for it. Many such sets of kernels take part, because two
processes that do the same differ by some percent, for where their memory lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from jupyter_client import BlockingKernelClient

from benchmarks.report import Row
from tests.harness.server import Home, JupyterServer

LOOP = """
import time
def loop():
    n = 0
    for i in range(1_000_000):
        n += i
wall, cpu = time.perf_counter(), time.thread_time()
loop()
wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
"""
#: Sets of kernels, unless said otherwise: some six minutes.
SETS = 48
#: Turns of each kernel of a set.
TURNS = 10
#: Empty cells in a turn: 130 in a set.
BLOCK = 13
#: Seconds after a turn until the server has done all of it: it hears a busy kernel in batches.
SETTLE = 0.1

LIMIT = "1.00 +- 0.02"
#: Both sides' memory is laid out alike.
ADDR_NO_RANDOMIZE = 0x0040000

Side = Literal["ours", "stock", "control"]
SIDES: tuple[Side, ...] = ("ours", "stock", "control")


class Cost(NamedTuple):
    """What a turn took, in seconds: by the clock, and of the processor."""

    wall: float
    cpu: float


#: What the turns of each kernel of one set took.
Taken = dict[Side, list[Cost]]


class Peer:
    """A kernel, and a client that speaks with it directly.

    A websocket's delays would hide what is looked for.
    """

    def __init__(self, client: BlockingKernelClient, server: int) -> None:
        self._client = client
        expression = {"pid": "__import__('os').getpid()"}
        reply = client.execute_interactive("", user_expressions=expression, timeout=60)
        self.pid = int(_value(reply, "pid"))
        self._server = server

    def loop(self) -> Cost:
        """Return what the loop took, measured in the kernel."""
        reply = self._client.execute_interactive(
            LOOP,
            user_expressions={"wall": "wall", "cpu": "cpu"},
            output_hook=lambda _: None,
            timeout=120,
        )
        return Cost(float(_value(reply, "wall")), float(_value(reply, "cpu")))

    def executes(self) -> Cost:
        """Return what a block of empty cells took, each to its end; CPU of kernel and server."""
        wall, cpu = time.perf_counter(), self._cpu()
        for _ in range(BLOCK):
            self._client.execute_interactive("", timeout=60)
        wall = time.perf_counter() - wall
        time.sleep(SETTLE)
        return Cost(wall, self._cpu() - cpu)

    def _cpu(self) -> float:
        return cpu_seconds(self.pid) + cpu_seconds(self._server)


def measure(folder: Path, sets: int = SETS) -> list[Row]:
    """Run the same on kernels of one server that differ in their provisioner only."""
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
    loops: list[Taken] = []
    blocks: list[Taken] = []
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)
    with (
        JupyterServer(home, environment={"PYTHONHASHSEED": "0"}) as server,
        on_one_core(server.process.pid) as core,
    ):
        for number in range(sets):
            order = random.Random(number).sample(SIDES, len(SIDES))
            with contextlib.ExitStack() as stack:
                peers = {side: stack.enter_context(running(server, side, core)) for side in order}
                loops.append(_turns(peers, Peer.loop, number))
                blocks.append(_turns(peers, Peer.executes, number))
    return [
        *_rows("CPU loop", loops),
        *_rows(f"one of {BLOCK * TURNS * sets} empty executes", blocks, BLOCK),
    ]


def _rows(what: str, taken: list[Taken], times: int = 1) -> list[Row]:
    """Compare ours with the mean of the stock kernels, and these with each other."""
    rows = []
    clocks: tuple[Literal["cpu", "wall"], ...] = ("cpu", "wall")
    for clock in clocks:
        per = [{side: _typical(each[side], clock) / times for side in SIDES} for each in taken]
        label = f"{what}, {'time' if clock == 'wall' else 'CPU time'}"
        stock = [(each["stock"] + each["control"]) / 2 for each in per]
        rows += [
            Row(label, "stock provisioner", [each["ours"] for each in per], stock, LIMIT),
            Row(
                f"{label}, a second stock kernel",
                "stock provisioner",
                [each["control"] for each in per],
                [each["stock"] for each in per],
                "1: shows what is resolved",
            ),
        ]
    return rows


def _typical(turns: list[Cost], clock: Literal["wall", "cpu"]) -> float:
    """Mean of the faster half."""
    values = sorted(turn.cpu if clock == "cpu" else turn.wall for turn in turns)
    return statistics.mean(values[: max(1, len(values) // 2)])


def _turns(peers: dict[Side, Peer], once: Callable[[Peer], Cost], seed: int) -> Taken:
    """Let the kernels take turns, `TURNS` each."""
    draw = random.Random(seed)
    for peer in peers.values():
        once(peer)  # warm
    taken: Taken = {side: [] for side in SIDES}
    for _ in range(TURNS):
        for side in draw.sample(SIDES, len(SIDES)):
            taken[side].append(once(peers[side]))
    return taken


@contextlib.contextmanager
def on_one_core(server: int) -> Iterator[int]:
    """Move this process and the server to one core; this one goes back afterwards."""
    before = os.sched_getaffinity(0)
    core = max(before)
    try:
        for pid in (os.getpid(), server):
            _pin(pid, core)
        yield core
    finally:
        for thread in psutil.Process().threads():
            os.sched_setaffinity(thread.id, before)


def _pin(pid: int, core: int) -> None:
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {core})


@contextlib.contextmanager
def running(server: JupyterServer, side: Side, core: int) -> Iterator[Peer]:
    """Yield a fresh kernel."""
    kernel = server.client.start(kernel="python3" if side == "ours" else "stock")
    said = server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}")
    assert said["savable"] is (side == "ours"), said
    kernel.close()
    (file,) = server.home.data.rglob(f"kernel-{kernel.id}.json")
    client = BlockingKernelClient(connection_file=str(file))
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        peer = Peer(client, server.process.pid)
        _pin(peer.pid, core)
        yield peer
    finally:
        client.stop_channels()
        server.client.delete(f"api/kernels/{kernel.id}")


def _value(reply: dict[str, object], name: str) -> str:
    content = reply["content"]
    assert isinstance(content, dict)
    return str(content["user_expressions"][name]["data"]["text/plain"])


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads, also of those that ended."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED: see clock_getcpuclockid(3)
