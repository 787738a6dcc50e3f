"""Errors that GPUs report (NVIDIA's Xid), as the reason for a kernel's death.

They are heard by a process of its own (:mod:`.xids`), which runs only while a kernel is known to
have something on a GPU.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from .asking import command, driver_present
from .fit import in_use
from .inventory import GpuUse

#: Seconds before a kernel's death within which an error counts as its reason.
_RECENT: Final = 60.0
_LOST: Final = 79
#: Seconds between two looks whether the program before has ended.
_LOOK: Final = 1.0
_PROGRAM: Final = Path(__file__).with_name("xids.py")
_NONE: Final[Mapping[str, str]] = MappingProxyType({})

#: What the commoner codes mean, as NVIDIA's list of them says at length.
_MEANING: Final = {
    13: "its program made an error there",
    31: "its program used memory there that it has no right to",
    43: "the GPU stopped what its program ran",
    45: "what its program ran there was ended",
    48: "memory of the GPU has an error that cannot be corrected",
    74: "the connection between GPUs failed",
    94: "memory of the GPU has an error, which hit this program",
    95: "memory of the GPU has an error, which may hit every program",
    119: "the GPU's own processor does not answer",
    120: "the GPU's own processor failed",
}


def _nobody(_kernel_id: str) -> None:
    """Who hears of lost GPUs, where nobody wants to."""


class Fault(msgspec.Struct, frozen=True):
    """An error that a GPU reported: NVIDIA's number of its kind (Xid)."""

    uuid: str
    code: int


class Reason(NamedTuple):
    """Why a kernel may have died, as half a sentence; ``lost``: the GPU (UUID) that has gone."""

    words: str
    lost: str | None


class GpuFaults:
    """What GPUs reported while kernels had something on them; may be used by several threads.

    Parameters
    ----------
    log
        For what is heard.
    on_lost
        Called with a kernel's id when a GPU is lost that its process uses, as :meth:`reason`
        says: from any thread, and maybe more than once for one GPU. By the time that it is acted
        upon, another process may have taken that one's place.
    """

    def __init__(self, log: logging.Logger | Any, on_lost: Callable[[str], None] = _nobody) -> None:
        self._log = log
        self._on_lost = on_lost
        self._lock = threading.Lock()
        #: By kernel id: its GPUs' names by UUID, and since when its process may have used them.
        self._users: dict[str, tuple[dict[str, str], float]] = {}
        self._heard: deque[tuple[float, Fault]] = deque(maxlen=64)
        self._listener: _Listener | None = None
        #: Whose program runs, or is about to end.
        self._turn = threading.Lock()

    def saved(self, kernel_id: str, use: GpuUse | None, began: float) -> None:
        """A kernel was saved: listen for as long as it has something on a GPU.

        Returns at once, and starts nothing where there is no driver.

        Parameters
        ----------
        use
            What the state has of GPUs.
        began
            When the save began (``time.monotonic``): the process is the same before and after.
        """
        self._uses(kernel_id, use, _NONE, self._users.get(kernel_id, ({}, began))[1])
        self._tell_lost(kernel_id)  # meanwhile

    def restored(
        self, kernel_id: str, use: GpuUse | None, pairs: Mapping[str, str] = _NONE
    ) -> list[str]:
        """A kernel came out of a state: listen as after a save, for what happens from now on.

        Called at once when the new process has taken the place of the old one. ``pairs``: which
        GPU (UUID) stands for one of the save. Returns what its user is to be told of a GPU that
        was lost.
        """
        before = self.reason(kernel_id)
        self._uses(kernel_id, use, pairs, time.monotonic())
        if before is None or before.lost is None:
            return []
        now, _ = self._users.get(kernel_id, ({}, 0.0))
        moved = now and before.lost not in now
        return [f"{before.words}{': restored on another GPU' if moved else ''}."]

    def _uses(
        self, kernel_id: str, use: GpuUse | None, pairs: Mapping[str, str], since: float
    ) -> None:
        on = in_use(use) if use is not None else set()
        if use is None or not on or not driver_present():
            self.gone(kernel_id)
            return
        names = {pairs.get(one.uuid, one.uuid): one.name for one in use.gpus if one.uuid in on}
        with self._lock:
            self._users[kernel_id] = names, since
            if self._listener is None or not self._listener.is_alive():
                self._listener = _Listener(self._hear, self._turn)
                self._listener.start()

    def gone(self, kernel_id: str) -> None:
        """The kernel's process ended, or has nothing on GPUs.

        When no other kernel has, nothing is listened to.
        """
        with self._lock:
            self._users.pop(kernel_id, None)
            listener = None
            if not self._users:
                listener, self._listener = self._listener, None
        if listener is not None:
            listener.end()

    def close(self) -> None:
        """Listen no more; called when the server ends."""
        for kernel_id in list(self._users):
            self.gone(kernel_id)

    def reason(self, kernel_id: str) -> Reason | None:
        """The error of its GPU that may have ended this kernel just now, if any."""
        names, since = self._users.get(kernel_id, ({}, 0.0))
        now = time.monotonic()
        found = [
            fault
            for when, fault in list(self._heard)
            if fault.uuid in names
            and when >= since
            and (fault.code == _LOST or now - when <= _RECENT)
        ]
        if not found:
            return None
        # What follows from the first error says less.
        first = next((fault for fault in found if fault.code == _LOST), found[0])
        gpu = f"The kernel's GPU ({names[first.uuid]})"
        if first.code == _LOST:
            return Reason(f"{gpu} fell off the bus (Xid {_LOST})", first.uuid)
        meaning = _MEANING.get(first.code)
        what = f"Xid {first.code}: {meaning}" if meaning else f"Xid {first.code}"
        return Reason(f"{gpu} had reported an error ({what})", None)

    def _hear(self, fault: Fault) -> None:
        self._heard.append((time.monotonic(), fault))
        self._log.warning("The GPU %s reports an error: Xid %d", fault.uuid, fault.code)
        if fault.code == _LOST:
            with self._lock:
                users = [one for one, (names, _) in self._users.items() if fault.uuid in names]
            for kernel_id in users:
                self._tell_lost(kernel_id)

    def _tell_lost(self, kernel_id: str) -> None:
        reason = self.reason(kernel_id)
        if reason is not None and reason.lost is not None:
            self._on_lost(kernel_id)


class _Listener(threading.Thread):
    """Runs the program and reads what it says, when it is its turn."""

    def __init__(self, hear: Callable[[Fault], None], turn: threading.Lock) -> None:
        super().__init__(name="gpu-faults", daemon=True)
        self._hear = hear
        self._turn = turn
        self._lock = threading.Lock()
        self._ended = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        # A driver that hangs keeps the program before although that was told to end.
        while not self._turn.acquire(timeout=_LOOK):
            if self._ended:
                return
        try:
            self._listen()
        finally:
            self._turn.release()

    def _listen(self) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                self._process = process = subprocess.Popen(
                    command(_PROGRAM),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                )
            except OSError:
                return
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    fault = msgspec.json.decode(line, type=Fault)
                except (msgspec.ValidationError, msgspec.DecodeError):
                    continue  # the first, which has nothing
                self._hear(fault)

    def end(self) -> None:
        """Have the program end; does not wait for that."""
        with self._lock:
            self._ended = True
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
