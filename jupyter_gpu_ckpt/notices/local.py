"""Notices from this machine: a file that appears, a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any, Final

from traitlets import Float, TraitError, Unicode, validate

from .source import Notice, NoticeSource

_WEEK: Final = 7 * 24 * 3600.0
#: Most bytes of a file that are looked at for a number.
_LONGEST: Final = 64


class FileNotice(NoticeSource):
    """A file that appears, or is written anew, says that the server ends."""

    path = Unicode(
        None,
        allow_none=True,
        config=True,
        help="File whose appearing, or change, says that this server ends; default: none. It may "
        "hold the number of seconds that are left. One that is there before the server does not "
        "count.",
    )
    seconds = Float(
        60.0,
        min=0.0,
        max=_WEEK,
        config=True,
        help="Seconds that are left where the file does not say it. Default 60.",
    )
    poll = Float(
        1.0,
        min=0.05,
        max=3600.0,
        config=True,
        help="Seconds between two looks at the file. Default 1.",
    )

    def applies(self) -> bool:
        """Where a file is configured."""
        return bool(self.path)

    async def notices(self) -> AsyncIterator[Notice]:
        """One for each time that the file is written."""
        if not self.path:
            return
        path = os.path.expanduser(self.path)
        before = _version(path)
        while True:
            await asyncio.sleep(self.poll)
            now = _version(path)
            if now is not None and now != before:
                yield Notice(self._seconds(path), f"The file {path} says that the server ends.")
            before = now

    def _seconds(self, path: str) -> float:
        try:
            with open(path, "rb") as file:
                said = float(file.read(_LONGEST).decode("ascii").strip())
        except (OSError, ValueError):
            return self.seconds
        return said if 0 <= said <= _WEEK else self.seconds


def _version(path: str) -> tuple[int, int, int] | None:
    """What changes when a file is written; ``None``: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class SignalNotice(NoticeSource):
    """A signal to the server's process says that the server ends.

    Jupyter Server ends on SIGTERM and SIGINT, and prints its state on SIGUSR1: these are its own.
    """

    signal = Unicode(
        "SIGUSR2",
        config=True,
        help="Name of the signal that says that this server ends: SIGUSR2, or a real-time signal "
        "such as SIGRTMIN+1. Default SIGUSR2.",
    )
    seconds = Float(
        60.0,
        min=0.0,
        max=_WEEK,
        config=True,
        help="Seconds that are left when the signal comes. Default 60.",
    )

    @validate("signal")
    def _check_signal(self, proposal: dict[str, Any]) -> str:
        name: str = proposal["value"]
        _number(name)
        return name

    def applies(self) -> bool:
        """Where nobody else in this process listens to the signal.

        A server that inherited it as ignored, as from a job script that guards itself, listens.
        """
        return signal.getsignal(_number(self.signal)) in (signal.SIG_DFL, signal.SIG_IGN)

    async def notices(self) -> AsyncIterator[Notice]:
        """One for each signal."""
        number = _number(self.signal)
        came = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            loop.add_signal_handler(number, came.set)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            # A server in a thread of another program has no signals.
            self.log.debug("%s cannot be listened to: %s", self.signal, error)
            return
        try:
            while True:
                await came.wait()
                came.clear()
                yield Notice(self.seconds, f"{self.signal} says that the server ends.")
        finally:
            loop.remove_signal_handler(number)
            # The server is stopping: another one must not end it in the middle of its saves.
            signal.signal(number, signal.SIG_IGN)


def _number(name: str) -> int:
    """The number of a signal that nobody else needs; TraitError for another."""
    base, _, offset = name.partition("+")
    if name == "SIGUSR2":
        return signal.SIGUSR2
    if base == "SIGRTMIN" and (offset.isdecimal() or not offset):
        number = signal.SIGRTMIN + int(offset or 0)
        if number <= signal.SIGRTMAX:
            return number
    raise TraitError(
        f"SignalNotice.signal must be SIGUSR2 or SIGRTMIN+N, not {name!r}: "
        "the others have a meaning already."
    )
