"""Real kernels under the real ``kernel-capture``, saved and restored by the capture layer alone."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

from jupyter_gpu_ckpt.capture import files, images, transactions
from jupyter_gpu_ckpt.capture.files import NodeLocalEntry
from jupyter_gpu_ckpt.capture.native import KernelCapture, find_kernel_capture
from jupyter_gpu_ckpt.capture.peers import wait_for_peers
from jupyter_gpu_ckpt.capture.protocol import DumpResult, Probe
from jupyter_gpu_ckpt.capture.supervisor import Supervisor

T = TypeVar("T")
_addresses = itertools.count(1)
#: Tests beside these have kernels of their own.
_NETWORK = f"127.{random.randrange(1, 255)}"


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, away from this thread's loop, which the blocking client uses."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, work).result()


class RunningKernel:
    """An ipykernel below a supervisor, with a client that stays connected."""

    def __init__(
        self, kernel_capture: Path, folder: Path, env: dict[str, str], history: bool
    ) -> None:
        self.kernel_capture = kernel_capture
        self.folder = folder
        self.log = folder / "kernel.log"
        ip = f"{_NETWORK}.{next(_addresses)}.1"
        self.connection_file, _ = write_connection_file(str(folder / "kernel.json"), ip=ip)
        self.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", self.connection_file]
        if not history:
            self.argv.append("--HistoryManager.enabled=False")
        self.supervisor = Supervisor.run(
            kernel_capture, self.argv, env=env, cwd=str(folder), log=self.log
        )
        self.supervisors = [self.supervisor]
        self.pid = self.supervisor.wait_started(10)
        self.client = self.connect()
        self.states = itertools.count()

    def connect(self) -> BlockingKernelClient:
        client = BlockingKernelClient(connection_file=self.connection_file)
        client.load_connection_file()
        client.hb_channel.time_to_dead = 10  # a busy machine is not a dead kernel
        client.start_channels()
        client.wait_for_ready(timeout=30)
        return client

    def run(self, code: str, timeout: float = 20) -> str:
        """Run code; what it printed. Errors in the code fail the test."""
        return run(self.client, code, timeout)

    def dump(self, **options: Any) -> tuple[Path, DumpResult]:
        images_dir = self.folder / f"images-{next(self.states)}"
        images_dir.mkdir(mode=0o700)
        arguments = {"timeout": 30, "ghost_limit": 64 << 20, "window_dirs": (), **options}
        capture = KernelCapture(self.kernel_capture)
        return images_dir, finish(capture.dump(self.pid, images_dir, **arguments))

    def dump_between_transactions(self) -> Path:
        """A dump as the keeper makes it: not while IPython writes its history."""
        for _ in range(20):
            lasting = transactions.wait_for_end(self.pid, timeout=5)
            images_dir, _ = self.dump()
            if not transactions.in_images(images_dir, lasting=lasting, dirs=()):
                return images_dir
        raise AssertionError("the kernel writes its history all the time")

    def save(self, dirs: Sequence[str]) -> tuple[Path, list[NodeLocalEntry]]:
        """A dump with the node-local files below ``dirs``."""
        entries: list[NodeLocalEntry] = []
        folder = self.folder / f"images-{next(self.states)}"
        folder.mkdir(mode=0o700)
        finish(
            KernelCapture(self.kernel_capture).dump(
                self.pid,
                folder,
                timeout=30,
                ghost_limit=64 << 20,
                window_dirs=dirs,
                on_window=lambda: entries.extend(
                    files.collect(self.pid, folder, dirs, limit=64 << 20)
                ),
            )
        )
        return folder, entries

    def kill(self) -> None:
        self.supervisor.kill()
        self.supervisor.wait(10)

    def restore(self, images_dir: Path) -> None:
        """Restore, and release the main thread once the old client's sockets are back."""
        images.prepare_for_restore(images_dir)
        self.supervisor = Supervisor.restore(
            self.kernel_capture,
            images_dir,
            pids=images.all_pids(images_dir),
            cwd=None,
            hold=True,
            hold_timeout=20,
            timeout=30,
            log=self.log,
        )
        self.supervisors.append(self.supervisor)
        self.pid = self.supervisor.wait_started(40)
        self.wait_for_reconnection()
        self.supervisor.release()

    def wait_for_reconnection(self) -> None:
        """A client subscribes again only while its program looks at the socket, as servers do."""
        subscriber = self.client.iopub_channel.socket
        peers = wait_for_peers(self.client.ip, {self.client.iopub_port: 1}, timeout=10)
        with ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(asyncio.run, peers)
            while not waiting.done():
                subscriber.poll(10)
        assert waiting.result(), "the client did not reconnect"

    def close(self) -> None:
        self.client.stop_channels()
        for supervisor in self.supervisors:
            supervisor.kill()
        for supervisor in self.supervisors:
            supervisor.wait(10)


def run(client: BlockingKernelClient, code: str, timeout: float = 20) -> str:
    """Run code in a kernel; what it printed. Errors in the code fail the test."""
    printed: list[str] = []

    def output(message: dict[str, Any]) -> None:
        content = message["content"]
        printed.append(content.get("text", ""))
        printed.extend(content.get("traceback", []))

    reply = client.execute_interactive(code, timeout=timeout, output_hook=output)
    assert reply["content"]["status"] == "ok", "\n".join(printed)
    return "".join(printed)


@pytest.fixture(scope="session")
def kernel_capture() -> Path:
    path = find_kernel_capture(None)
    assert path is not None, "kernel-capture is not built: run 'make dev'"
    return path


@pytest.fixture
def probe(kernel_capture: Path) -> Probe:
    return finish(KernelCapture(kernel_capture).probe())


@pytest.fixture
def start_kernel(kernel_capture: Path, tmp_path: Path) -> Iterator[Callable[..., RunningKernel]]:
    kernels: list[RunningKernel] = []

    def start(*, history: bool = False, **env: str) -> RunningKernel:
        folder = tmp_path / f"kernel-{len(kernels)}"
        folder.mkdir()
        environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython"), **env}
        kernels.append(RunningKernel(kernel_capture, folder, environment, history))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def kernel(start_kernel: Callable[..., RunningKernel]) -> RunningKernel:
    return start_kernel()
