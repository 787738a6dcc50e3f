"""Machines with simulated GPUs for tests: `SimulatedMachine`, and the libraries' folder."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.simgpu import machine as wire

SOURCE = Path(__file__).parent
BUILD = SOURCE.parents[1] / "build" / "simgpu"


@functools.cache
def libraries() -> Path:
    """The folder with ``libcuda.so.1`` and ``libnvidia-ml.so.1``, built where they are not yet.

    ``r550`` below it has a ``libcuda.so.1`` without functions for checkpoints.
    """
    meson = shutil.which("meson", path=f"{Path(sys.executable).parent}:{os.defpath}")
    assert meson, "Meson is missing: pip install meson ninja"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    BUILD.parent.mkdir(parents=True, exist_ok=True)
    with open(BUILD.parent / "simgpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        commands = [[meson, "compile", "-C", str(BUILD)]]
        if not (BUILD / "build.ninja").exists():
            commands.insert(0, [meson, "setup", str(BUILD), str(SOURCE)])
        for command in commands:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stdout
    return BUILD


def gpu(number: int = 0, **settings: Any) -> dict[str, Any]:
    """A GPU's description; its UUID is made from the number."""
    name = uuid.uuid5(uuid.NAMESPACE_OID, f"simulated GPU {number}")
    return {"uuid": f"GPU-{name}", "memory": 64 << 20, **settings}


class SimulatedMachine:
    """A running machine: its GPUs exist until `stop`.

    Processes are on it that have `environment()`, or its folder at ``/run/simgpu``.

    Parameters
    ----------
    folder
        Where it is made; nothing else may be in it.
    gpus
        Their descriptions (`gpu`).
    popen
        Starts the process that plays the machine: `subprocess.Popen`, or a test node's.
    settings
        What else the description says (README.md).
    """

    def __init__(
        self,
        folder: Path,
        gpus: Iterable[dict[str, Any]] = (),
        *,
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.libraries = libraries()
        self._popen = popen
        self._describe(gpus, settings)
        self.start()

    def _describe(self, gpus: Iterable[dict[str, Any]], settings: dict[str, Any]) -> None:
        self.gpus = list(gpus) or [gpu()]
        self.description = {"gpus": self.gpus, **settings}

    def become(self, *gpus: dict[str, Any], **settings: Any) -> None:
        """Have other GPUs, or another driver; nothing that runs may use them."""
        self.stop()
        self._describe(gpus, settings)
        self.start()

    def start(self) -> None:
        (self.folder / "machine.json").write_text(json.dumps(self.description))
        self.process = self._popen(
            [sys.executable, str(SOURCE / "machine.py"), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def environment(self, variant: str = "") -> dict[str, str]:
        """What a process needs to find this machine and its libraries."""
        return {
            "SIMGPU_MACHINE": str(self.folder),
            "LD_LIBRARY_PATH": str(self.libraries / variant),
        }

    def faults(self, *lines: str) -> None:
        """Replace the faults, at once for every process: ``"FUNCTION WHICH ACTION [NUMBER]"``."""
        new = self.folder / "faults.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.folder / "faults")

    def xid(self, code: int, gpu: int = 0, *, lost: bool = False) -> None:
        """Let a GPU report an Xid error; `lost`: it is gone from then on."""
        self._ask(wire.INJECT, gpu, code, int(lost))

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """For the block, no ``spin()`` ends that was launched in it, however short it is."""
        flag = self.folder / wire.BUSY
        flag.touch()
        try:
            yield
        finally:
            flag.unlink()

    def used(self, gpu: int = 0) -> int:
        """How much of a GPU's memory is taken, in bytes."""
        payload = self._ask(wire.MEMORY, gpu)
        free, total = (int.from_bytes(payload[i : i + 8], "little") for i in (0, 8))
        return total - free

    def pids(self, gpu: int = 0) -> list[int]:
        """The processes that have a context on a GPU."""
        payload = self._ask(wire.PROCESSES, gpu)
        return sorted(pid for pid, _, _ in wire.PROCESS.iter_unpack(payload))

    def _ask(self, op: int, gpu: int, a: int = 0, b: int = 0) -> bytes:
        name = uuid.UUID(self.gpus[gpu]["uuid"].removeprefix("GPU-")).bytes
        folder = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(30)
                connection.connect(f"/proc/self/fd/{folder}/{wire.DEVICE}")
                connection.sendall(wire.REQUEST.pack(op, 0, name, a, b, 0, 0))
                stream = connection.makefile("rb")
                with stream:
                    status, _, _, length = wire.REPLY.unpack(stream.read(wire.REPLY.size))
                    payload = stream.read(length)
                assert status == 0, status
                return payload
        finally:
            os.close(folder)

    def stop(self) -> None:
        """End the machine: processes that use its GPUs get errors."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)
        (self.folder / wire.DEVICE).unlink(missing_ok=True)
