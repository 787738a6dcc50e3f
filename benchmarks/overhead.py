"""What the supervisor costs while a kernel runs, against the stock provisioner.

Three kernels of one server live at the same time: ours, a stock one, and another stock one, which
shows what the method resolves. In short turns, forth and back, they do the same, all on one core
with the server and the client: so whatever else the machine does hits all alike, and what the
server does for a kernel counts in the time. Several such sets of kernels take part, because two
processes that do the same differ by some percent, for where their memory lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
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
SETS = 16
#: Rounds of each set; in each the three kernels have two turns.
ROUNDS = 5
#: Empty cells in a turn: 2,080 a kernel in all.
BLOCK = 13

LIMIT = "1.00 +- 0.02"
#: Both sides' memory is laid out alike.
ADDR_NO_RANDOMIZE = 0x0040000

Side = Literal["ours", "stock", "control"]
SIDES: tuple[Side, ...] = ("ours", "stock", "control")


class Cost(NamedTuple):
    """What a turn took, in seconds: by the clock, and of the processor."""

    wall: float
    cpu: float

    def plus(self, other: Cost) -> Cost:
        return Cost(self.wall + other.wall, self.cpu + other.cpu)


#: Of each set, of each round: what each kernel's two turns took.
Taken = list[list[dict[Side, Cost]]]


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
        """Return what a block of empty cells took, each to its end; of kernel and server."""
        wall, cpu = time.perf_counter(), self._cpu()
        for _ in range(BLOCK):
            self._client.execute_interactive("", timeout=60)
        return Cost(time.perf_counter() - wall, self._cpu() - cpu)

    def _cpu(self) -> float:
        return _cpu_seconds(self.pid) + _cpu_seconds(self._server)


def measure(folder: Path) -> list[Row]:
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
    loops: Taken = []
    blocks: Taken = []
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)
    with (
        JupyterServer(home, environment={"PYTHONHASHSEED": "0"}) as server,
        on_one_core(server.process.pid) as core,
    ):
        for number in range(SETS):
            order = random.Random(number).sample(SIDES, len(SIDES))
            with contextlib.ExitStack() as stack:
                peers = {side: stack.enter_context(running(server, side, core)) for side in order}
                loops.append(_turns(peers, Peer.loop, number))
                blocks.append(_turns(peers, Peer.executes, number))
    return [
        *_rows("CPU loop", loops),
        *_rows(f"{2 * BLOCK} of {2 * BLOCK * ROUNDS * SETS} empty executes", blocks),
    ]


def _rows(what: str, taken: Taken) -> list[Row]:
    compared: list[tuple[str, Side, str]] = [
        (what, "ours", LIMIT),
        (f"{what}, a second stock kernel", "control", "1: shows what is resolved"),
    ]
    return [
        Row(
            f"{label}, {'time' if clock == 'wall' else 'CPU time'}",
            "stock provisioner",
            [getattr(each[side], clock) for rounds in taken for each in rounds],
            [getattr(each["stock"], clock) for rounds in taken for each in rounds],
            limit,
            group=ROUNDS,
        )
        for label, side, limit in compared
        for clock in ("wall", "cpu")
    ]


def _turns(
    peers: dict[Side, Peer], once: Callable[[Peer], Cost], seed: int
) -> list[dict[Side, Cost]]:
    """Let the kernels take turns in a random order and in the reverse of it, `ROUNDS` times."""
    draw = random.Random(seed)
    for peer in peers.values():
        once(peer)  # warm
    rounds = []
    for _ in range(ROUNDS):
        order = draw.sample(SIDES, len(SIDES))
        sums = dict.fromkeys(SIDES, Cost(0.0, 0.0))
        for side in (*order, *reversed(order)):
            sums[side] = sums[side].plus(once(peers[side]))
        rounds.append(sums)
    return rounds


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


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads, also of those that ended."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED: see clock_getcpuclockid(3)
