"""Asks the NVIDIA driver, without ever waiting for it for long.

A driver that hangs keeps whoever calls it, and such a process cannot even be killed. So a process
of its own asks, for a bounded time, and no second one while a first one is stuck.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from .inventory import Inventory

#: Seconds: without persistence mode, the first question wakes each GPU up.
DEADLINE: Final = 20.0
#: Seconds for which it is believed that a driver does not answer.
_SILENT: Final = 60.0
_LIBRARY: Final = "libnvidia-ml.so.1"
_PROGRAM: Final = Path(__file__).with_name("nvml.py")


def driver_present() -> bool:
    """Whether it is worth asking: there is a device, or a library that a program would find.

    Takes well under a millisecond, and starts nothing.
    """
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/proc/driver/nvidia"):
        return True
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    if any(os.path.exists(os.path.join(folder, _LIBRARY)) for folder in folders):
        return True
    try:
        return _LIBRARY.encode() in Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        return False


def command(program: Path) -> list[str]:
    """How a program is run that talks to the driver: it finds modules where the server does."""
    return [sys.executable, "-I", "-S", str(program), *filter(None, sys.path)]


class Asker:
    """Asks, and remembers the answer; may be used by several threads.

    Parameters
    ----------
    deadline
        Seconds until a driver counts as one that does not answer.
    """

    def __init__(self, deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        self._lock = threading.Lock()
        self._last: tuple[float, Inventory] | None = None
        self._stuck: subprocess.Popen[bytes] | None = None

    def inventory(self, max_age: float = 5.0) -> Inventory:
        """What the driver says of this node; blocks for the deadline and a second at most.

        Nothing is raised: what went wrong is in the inventory's ``error``.

        Parameters
        ----------
        max_age
            How old the answer may be, seconds.
        """
        if not driver_present():
            return Inventory()
        with self._lock:
            if self._last is not None:
                when, answer = self._last
                keeps = _SILENT if answer.error is not None else max_age
                if time.monotonic() - when <= keeps:
                    return answer
            answer = self._ask()
            self._last = (time.monotonic(), answer)
            return answer

    def _ask(self) -> Inventory:
        if self._stuck is not None and self._stuck.poll() is None:
            return Inventory(error="The NVIDIA driver does not answer.")
        self._stuck = None
        try:
            process = subprocess.Popen(
                command(_PROGRAM),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
            )
        except OSError as error:
            return Inventory(error=f"The NVIDIA driver could not be asked: {error}")
        try:
            out, said = process.communicate(timeout=self._deadline)
        except subprocess.TimeoutExpired:
            self._give_up(process)
            waited = f"{self._deadline:g} s"
            return Inventory(error=f"The NVIDIA driver did not answer within {waited}.")
        try:
            return msgspec.json.decode(out, type=Inventory)
        except (msgspec.ValidationError, msgspec.DecodeError):
            why = said.decode(errors="replace").strip().rpartition("\n")[2]
            return Inventory(error=f"The NVIDIA driver could not be asked: {why or 'no answer'}")

    def _give_up(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
            return
        self._stuck = process


_asker: Final = Asker()


def inventory(max_age: float = 5.0) -> Inventory:
    """This node's GPUs (:meth:`Asker.inventory`); call it in a worker thread."""
    return _asker.inventory(max_age)
