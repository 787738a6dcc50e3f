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
from tests.native.driver import Capture, Kernel, binary
from tests.simgpu.simgpu import SimulatedMachine

#: What every program begins with.
PRELUDE = "from tests.simgpu.api import *\nimport os, time, zlib\n"

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
        self.program = folder / "kernel-capture"
        self.program.write_text(
            f'#!/bin/sh\nexec nsenter --mount=/proc/{self._holder.pid}/ns/mnt {binary()} "$@"\n'
        )
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
