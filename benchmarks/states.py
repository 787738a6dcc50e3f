"""Save and restore against plain ``criu dump`` and ``criu restore`` of the same kernel."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from jupyter_client import BlockingKernelClient
from jupyter_client.connect import KernelConnectionInfo

from benchmarks.report import Row, criu
from tests.harness.client import Client, KernelClient, wait_for
from tests.harness.server import Home, JupyterServer

DUMP_FLAGS = [
    "--file-locks", "--link-remap", "--ghost-limit", "1G", "--ext-unix-sk", "--tcp-established",
    "--network-lock", "skip", "--manage-cgroups=ignore",
]  # fmt: skip

#: Data as a notebook has it: floats that hardly compress, in arrays of 64 MiB. Beside them a
#: thread that notes the longest time for which it did not run: the frozen time as it is felt.
FILL = """
import threading, time
import numpy as np
rng = np.random.default_rng(0)
data = [rng.standard_normal(8 << 20) for _ in range(max(1, round({size} * 16)))]
gap = 0.0
def beat():
    global gap
    last = time.monotonic()
    while True:
        time.sleep(.001)
        now = time.monotonic()
        gap, last = max(gap, now - last), now
threading.Thread(target=beat, daemon=True).start()
"""


#: Up to so many GiB the freeze is short enough to be measured with the priority of real time, so
#: that what else the machine does is not in it. Longer ones depend on the system's own writing.
REAL_TIME = 0.25


def freezes(size: float, rounds: int) -> int:
    """How often each side freezes the kernel, an even number: each goes first in one half.

    The shorter, the more single ones differ; the longest depend on the system's own writing.
    """
    least = max(rounds, 16 if size <= REAL_TIME else 10 if size <= 1 else 14)
    return least + least % 2


def measure(folder: Path, size: float, rounds: int) -> list[Row]:
    """Measure with `size` GiB of data, restores `rounds` times, each side in turn."""
    home = Home(folder)
    config = {"GpuCkpt": {"restore_on_death": False}}
    frozen: dict[str, list[float]] = {"ours": [], "theirs": []}
    restored: dict[str, list[float]] = {"ours": [], "theirs": []}
    images = folder / "plain"
    with JupyterServer(home, config=config) as server:
        client = server.client
        stack = contextlib.ExitStack()
        if size <= REAL_TIME:
            stack.enter_context(real_time(server.process.pid))
        kernel = client.start(home.add_notebook("bench.ipynb"))
        kernel.run(FILL.format(size=size), timeout=300)
        pid = kernel.pid
        connection = _connection(home, kernel.id)

        def clear() -> None:
            """Leave nothing of either side, on the disk or in the memory that caches it."""
            shutil.rmtree(images, ignore_errors=True)
            for state in client.states(kernel=kernel.id):
                client.delete(f"gpu-ckpt/api/states/{state['id']}")
            for pack in (home.data / "gpu-ckpt" / "store").rglob("*.pack"):
                os.utime(pack, (0, 0))  # young garbage would stay, and fill the disk
            client.post("gpu-ckpt/api/gc")

        sides: dict[str, Callable[[], object]] = {
            "theirs": lambda: _plain_dump(pid, images),
            "ours": lambda: client.save(kernel, timeout=600),
        }
        with stack:
            for number in range(freezes(size, rounds)):
                # Each goes first in half of the rounds: a disk is quicker after a rest.
                for side in ("theirs", "ours") if number % 2 == 0 else ("ours", "theirs"):
                    clear()
                    with felt_freeze(kernel, size, frozen[side]):
                        sides[side]()
        clear()
        for make in sides.values():
            make()
        (state,) = client.states(kernel=kernel.id)
        state_id = state["id"]
        kernel.close()
        client.delete(f"api/kernels/{kernel.id}")
        _wait_gone(pid)
        for _ in range(rounds):
            settle(size)
            restored["theirs"].append(_plain_restore(pid, images, connection))
            settle(size)
            restored["ours"].append(_restore(client, state_id, kernel.id))
            _wait_gone(pid)
    return [
        Row(f"frozen, {size:g} GiB", "criu dump",
            frozen["ours"], frozen["theirs"], "<= 1.15", rounds=2),
        Row(f"restore to first reply, {size:g} GiB", "criu restore",
            restored["ours"], restored["theirs"], "<= 2"),
    ]  # fmt: skip


def settle(size: float) -> None:
    """Give both sides the same start: nothing is left to be written, and free memory is at hand.

    A virtual machine returns memory that it does not use to its host, and then waits for
    it page by page; so as much as is needed for data of `size` GiB is used once, right before.
    """
    os.sync()
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemFree"].split()[0]) << 10
    used = min(free * 9 // 10, int((2 * size + 0.5) * (1 << 30)))
    # 23 is MADV_POPULATE_WRITE, which Python does not name.
    use = f"import mmap; m = mmap.mmap(-1, {used}); m.madvise(23)"
    subprocess.run([sys.executable, "-c", use], check=True)


@contextlib.contextmanager
def real_time(server: int) -> Iterator[None]:
    """Let this process, the server, and what they start meanwhile go before everything else."""
    policy, before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        _schedule(server, os.SCHED_RR, os.sched_param(1))
        _schedule(os.getpid(), os.SCHED_RR, os.sched_param(1))
        yield
    finally:
        for pid in (os.getpid(), server):
            _schedule(pid, policy, before)


def _schedule(pid: int, policy: int, parameters: os.sched_param) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        for thread in psutil.Process(pid).threads():
            os.sched_setscheduler(thread.id, policy, parameters)


@contextlib.contextmanager
def felt_freeze(kernel: KernelClient, size: float, into: list[float]) -> Iterator[None]:
    """Add the longest time for which the kernel stood still during the block."""
    kernel.run("gap = 0.0")
    settle(size)
    yield
    # The thread learns how long it did not run when it does again.
    into.append(float(kernel.run("time.sleep(.05); print(gap)")))


def _plain_dump(pid: int, images: Path) -> None:
    images.mkdir()
    subprocess.run(
        [criu(), "dump", "-t", str(pid), "-D", str(images), "--leave-running", *DUMP_FLAGS],
        check=True,
        capture_output=True,
    )


def _plain_restore(pid: int, images: Path, connection: KernelConnectionInfo) -> float:
    """Return the seconds from the start of ``criu restore`` to a kernel_info reply."""
    began = time.perf_counter()
    subprocess.run(
        # A child of this process: the kernel ends when its parent does.
        [
            criu(),
            "restore",
            "-d",
            "--restore-sibling",
            "-D",
            str(images),
            "--tcp-close",
            *DUMP_FLAGS,
        ],
        check=True,
        capture_output=True,
    )
    peer = BlockingKernelClient()
    peer.load_connection_info(connection)
    peer.start_channels()
    try:
        peer.wait_for_ready(timeout=60)
        return time.perf_counter() - began
    finally:
        peer.stop_channels()
        os.kill(pid, signal.SIGKILL)
        _wait_gone(pid)


def _restore(client: Client, state_id: str, kernel_id: str) -> float:
    """Return the seconds from the request to restore to a kernel_info reply."""
    began = time.perf_counter()
    client.restore(state_id, timeout=600)
    kernel = client.connect(kernel_id)
    seconds = time.perf_counter() - began
    assert kernel.run("print(len(data) > 0)") == "True"
    kernel.close()
    client.delete(f"api/kernels/{kernel_id}")
    return seconds


def _connection(home: Home, kernel_id: str) -> KernelConnectionInfo:
    (file,) = home.data.rglob(f"kernel-{kernel_id}.json")
    info: KernelConnectionInfo = json.loads(file.read_text())
    return info


def _wait_gone(pid: int) -> None:
    def gone() -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return not psutil.pid_exists(pid)

    wait_for("the kernel is gone", gone, 60, interval=0.01)
