"""Test nodes with simulated GPUs (`tests/simgpu`): the driver lies where a real one would."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import Client, KernelClient, wait_for
from tests.harness.node import REPOSITORY, Node
from tests.simgpu.simgpu import SimulatedMachine

#: What a notebook runs first: device memory of its own, and what is in it.
PRELUDE = f"""
import os, sys, subprocess, time
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.simgpu.api import *
MIB = 1 << 20
"""


class GpuNode(Node):
    """A node with these GPUs; `folder` must be one of the shared ones."""

    def __init__(self, hostname: str, folder: Path, *gpus: dict[str, Any], **settings: Any) -> None:
        super().__init__(hostname, [folder])
        own = folder / hostname
        own.mkdir()
        try:
            # A process of the node, so that both know processes by the same numbers.
            self.machine = SimulatedMachine(own / "machine", gpus, popen=self.popen, **settings)
            configuration, cache = own / "ld.so.conf", own / "ld.so.cache"
            configuration.write_text(f"{self.machine.libraries}\ninclude /etc/ld.so.conf\n")
            ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")
            assert ldconfig
            subprocess.run([ldconfig, "-X", "-C", cache, "-f", configuration], check=True)
            self.run(["mkdir", "-p", "/run/simgpu"])
            self.run(["mount", "--bind", str(self.machine.folder), "/run/simgpu"])
            self.run(["mount", "--bind", str(cache), "/etc/ld.so.cache"])
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> GpuNode:
        return self

    def kill(self) -> None:
        """Let the node die with its GPUs."""
        super().kill()
        machine = getattr(self, "machine", None)
        if machine is not None and machine.process.stdin:
            machine.stop()
            machine.process.stdin = None

    def wait_free(self, gpu: int = 0) -> None:
        """Wait until nobody has memory of a GPU."""
        wait_for(f"GPU {gpu} is free", lambda: self.machine.used(gpu) == 0, 30)


@contextlib.contextmanager
def here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, Any], **settings: Any
) -> Iterator[SimulatedMachine]:
    """Let this process be on a machine with these GPUs."""
    machine = SimulatedMachine(folder / "machine", gpus, **settings)
    try:
        for name, value in machine.environment().items():
            monkeypatch.setenv(name, value)
        yield machine
    finally:
        machine.stop()


def end_all(client: Client, node: GpuNode) -> None:
    """Let the driver work, end all kernels, and wait until the GPUs are free."""
    node.machine.faults()
    for one in client.get("api/kernels"):
        client.delete(f"api/kernels/{one['id']}")
    for number in range(len(node.machine.gpus)):
        node.wait_free(number)


def hold(kernel: KernelClient, mib: int = 1, ordinal: int = 0, name: str = "data") -> str:
    """Have the kernel put random bytes onto a GPU; returns their checksum."""
    return str(
        kernel.run(
            f"{PRELUDE}\ngpu_{name} = Gpu({ordinal})\n"
            f"{name} = gpu_{name}.upload(os.urandom({mib} * MIB))\n"
            f"print(gpu_{name}.checksum({name}, {mib} * MIB))"
        )
    )


def checksum(kernel: KernelClient, mib: int = 1, name: str = "data") -> str:
    """Have the GPU compute what is in its memory now."""
    return str(kernel.run(f"gpu_{name}.use(); print(gpu_{name}.checksum({name}, {mib} * MIB))"))
