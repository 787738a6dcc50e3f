"""A node with simulated GPUs: a mount namespace in which the driver lies where a real one would.

So programs and ``kernel-capture`` load it by its name from the linker's cache, as they do anywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.harness.node import REPOSITORY
from tests.native.driver import Capture, Event, Kernel, binary, wait_until
from tests.simgpu.simgpu import SimulatedMachine

#: What every program begins with.
PRELUDE = "from tests.simgpu.api import *\nimport os, time, zlib\n"

#: Holds 1 MiB of device memory and says, again and again, what is in it and on which GPU.
HOLDER = """
gpu = Gpu(int(os.environ.get("ORDINAL", 0)))
data = gpu.upload(os.urandom(1 << 20))
print("holds", gpu.checksum(data, 1 << 20), flush=True)
while True:
    print("sum", gpu.checksum(data, 1 << 20), "on", gpu.uuid, flush=True)
    time.sleep(0.02)
"""

#: The same in two processes.
PAIR = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-u", "-c", open(__file__).read().split("#child\\n")[1]])
#child
from tests.simgpu.api import *
import os, time
gpu = Gpu()
data = gpu.upload(os.urandom(1 << 20))
print(os.getpid(), "holds", gpu.checksum(data, 1 << 20), flush=True)
while True:
    print(os.getpid(), "sum", gpu.checksum(data, 1 << 20), flush=True)
    time.sleep(0.02)
"""

_UNSHARE = ("unshare", "--mount", "--propagation", "slave")
_MOUNT = (
    'mount --bind "$1" /etc/ld.so.cache && mount --bind "$2" /run/simgpu && echo ready && read x'
)


class GpuNode:
    """Started by the constructor; `variant` as for `SimulatedMachine.environment`."""

    def __init__(self, folder: Path, *gpus: dict[str, Any], variant: str = "", **settings: Any):
        folder.mkdir()
        self.machine = SimulatedMachine(folder / "machine", gpus, **settings)
        os.makedirs("/run/simgpu", exist_ok=True)
        cache, configuration = folder / "ld.so.cache", folder / "ld.so.conf"
        libraries = self.machine.libraries / variant
        configuration.write_text(f"{libraries}\ninclude /etc/ld.so.conf\n")
        ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")
        assert ldconfig
        subprocess.run([ldconfig, "-X", "-C", cache, "-f", configuration], check=True, timeout=60)
        self._holder = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _MOUNT, "sh", str(cache), str(self.machine.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        #: What a command begins with to run on this node.
        self.enter = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt"]
        self.program = folder / "kernel-capture"
        self.program.write_text(f'#!/bin/sh\nexec {" ".join(self.enter)} {binary()} "$@"\n')
        self.program.chmod(0o755)

    def kernel(self, folder: Path, source: str, **environment: str) -> Kernel:
        """A program under ``kernel-capture run`` on this node."""
        folder.mkdir(mode=0o700)
        return Kernel(
            folder,
            PRELUDE + source,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            program=self.program,
        )

    def capture(self, *args: str) -> Capture:
        """``kernel-capture`` with these arguments on this node."""
        return Capture(*args, program=self.program)

    def take(self, kernel: Kernel) -> None:
        """What is done with the kernel next is done here: its restore, above all."""
        kernel.kwargs["program"] = self.program

    def stop(self) -> None:
        """End the machine; programs that are still in the namespace stay in it."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.wait(30)
        self.machine.stop()


def reached(capture: Capture, step: str) -> Event:
    """The next event that tells of this step on a GPU."""
    while (event := capture.expect("gpu"))["step"] != step:
        pass
    return event


def held(kernel: Kernel, count: int = 1) -> list[str]:
    """The line beginnings that say that all data are what they were."""
    wait_until(lambda: sum("holds" in line for line in kernel.lines()) == count, "holds", 30)
    return [line.replace("holds", "sum") for line in kernel.lines() if "holds" in line]


def intact(kernel: Kernel, sums: list[str], end: str = "") -> None:
    """Assert that every process goes on to compute with its data: twice each, from now on."""
    seen = len(kernel.lines())
    wait_until(
        lambda: all(
            sum(line.startswith(one) and line.endswith(end) for line in kernel.lines()[seen:]) > 1
            for one in sums
        ),
        f"{sums} {end} after line {seen} of {kernel.lines()[-10:]}",
        30,
    )
