from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.node import REPOSITORY
from tests.native.driver import wait_until
from tests.simgpu.api import CudaError
from tests.simgpu.simgpu import SimulatedMachine, libraries


class Program:
    """A process with CUDA: `source` after a prelude, with `gpu` (the first GPU) at hand.

    Its output goes to a file, and its input is empty, so that CRIU can save it.
    """

    IMPORTS = """
from tests.simgpu.api import *
import os, time, zlib
def say(*words):  # a line in one piece, whoever else writes
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
    PRELUDE = IMPORTS + "gpu = Gpu()\n"

    def __init__(
        self,
        folder: Path,
        machine: SimulatedMachine,
        source: str,
        prelude: str = PRELUDE,
        **environment: str,
    ) -> None:
        folder.mkdir()
        self.log = folder / "log"
        _free_numbers()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", prelude + source],
                env={
                    **os.environ,
                    **machine.environment(),
                    "PYTHONPATH": str(REPOSITORY),
                    **environment,
                },
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def lines(self) -> list[str]:
        return self.log.read_text().split("\n")[:-1]

    def wait_line(self, text: str, after: int = 0) -> str:
        """The first line with that text among those after the first `after`."""
        try:
            line: str = wait_until(
                lambda: next((line for line in self.lines()[after:] if text in line), None),
                repr(text),
                timeout=30,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}; the last lines: {self.lines()[-20:]}") from None
        return line

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)  # with its children: it has a session of its own
            self.process.wait()


def _free_numbers() -> None:
    """Let the next processes have numbers that nobody has when CRIU wants them again."""
    limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    with contextlib.suppress(OSError):  # an ordinary user may not
        number = random.randrange(limit // 2, limit * 7 // 8)
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(number))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., SimulatedMachine]]:
    """Start machines with simulated GPUs; ended after the test."""
    started: list[SimulatedMachine] = []

    def start(*gpus: dict[str, Any], **settings: Any) -> SimulatedMachine:
        folder = tmp_path / f"machine-{len(started)}"
        started.append(SimulatedMachine(folder, gpus, **settings))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Start programs with CUDA; ended after the test."""
    started: list[Program] = []

    def start(machine: SimulatedMachine, source: str, **settings: str) -> Program:
        folder = tmp_path / f"program-{len(started)}"
        started.append(Program(folder, machine, source, **settings))
        return started[-1]

    yield start
    for one in started:
        one.close()


class Outside:
    """A process of its own that calls the driver's functions about others, as tools do.

    The library knows one machine a process, and keeps what it counted for faults.
    """

    def __init__(self, machine: SimulatedMachine, variant: str = "", init: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.simgpu.api"],
            env={
                **os.environ,
                **machine.environment(variant),
                "PYTHONPATH": str(REPOSITORY),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if init:
            self.call("cuInit", 0)

    def call(self, function: str, *arguments: Any) -> Any:
        """What `Driver`'s method of that name returns; raises its `CudaError`."""
        self.start(function, *arguments)
        return self.result(function)

    def start(self, function: str, *arguments: Any) -> None:
        """`call` without waiting for its `result`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()

    def result(self, function: str = "") -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended within {function}: {self.process.wait(30)}"
        code, value = json.loads(line)
        if code:
            raise CudaError(function, code)
        return value

    def code(self, function: str, *arguments: Any) -> int:
        """The error's code, 0 for success."""
        try:
            self.call(function, *arguments)
        except CudaError as error:
            return error.code
        return 0

    def save(self, pid: int) -> None:
        self.call("lock", pid, 30_000)
        self.call("checkpoint", pid)

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def outside() -> Iterator[Callable[..., Outside]]:
    """Start processes that act on others; ended after the test."""
    started: list[Outside] = []

    def start(*arguments: Any, **settings: Any) -> Outside:
        started.append(Outside(*arguments, **settings))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    libraries()
