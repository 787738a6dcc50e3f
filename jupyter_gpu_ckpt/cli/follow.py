"""Waiting for an operation: progress, Ctrl-C, deadline."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ..models import Operation
from .client import Server
from .errors import CliError

#: Seconds between two questions, and how long a silent server is asked again.
POLL_SECONDS: Final = 0.2
SILENCE_SECONDS: Final = 15.0
#: How long a cancelled operation may take to put everything back, seconds.
CANCEL_SECONDS: Final = 60.0

_WORDS: Final = {
    "waiting": "Waiting",
    "checking": "Checking",
    "dumping": "Capturing the kernel",
    "gpu": "Waiting for the GPU to finish its work",
    "storing": "Storing",
    "reading": "Reading the state",
    "restoring": "Restoring the kernel",
    "connecting": "Connecting",
    "verifying": "Reading the state",
    "moving": "Moving GPU memory",
    "finished": "Finished",
}


class Interrupt:
    """Notes Ctrl-C and SIGTERM instead of being stopped by them; a second one stops."""

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[Interrupt]:
        """Take the signals over for the ``with`` block."""
        before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def run(server: Server, start: Callable[[], Operation], *, wait: bool, timeout: float) -> Operation:
    """Start an operation and see it through.

    Parameters
    ----------
    server
        Where it runs.
    start
        Starts it.
    wait
        Whether to wait for its end.
    timeout
        How long to wait, seconds. The operation goes on after that.

    Returns
    -------
    Operation
        Ended with status ``done``, or as started without `wait`.

    Raises
    ------
    CliError
        When it failed, was cancelled, or is not over in time.
    """
    with Interrupt().installed() as interrupt:
        operation = start()
        if wait:
            operation = _follow(server, operation, interrupt, timeout)
    if operation.status == "cancelled":
        raise CliError("Cancelled. Nothing has changed.", "cancelled")
    if operation.status == "failed":
        error = operation.error
        if error is None:
            raise CliError(
                "The operation failed.", "internal", hint="The server's log may say why."
            )
        raise CliError(error.message, error.reason, hint=error.hint, details=error.details)
    return operation


def _follow(
    server: Server, operation: Operation, interrupt: Interrupt, timeout: float
) -> Operation:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    deadline = time.monotonic() + timeout
    heard = time.monotonic()
    cancelling = False
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task(_WORDS["waiting"], total=1.0)
        while operation.status in ("pending", "running"):
            if interrupt.asked and not cancelling:
                cancelling = True
                deadline = time.monotonic() + CANCEL_SECONDS
                console.print("Cancelling...")
                _cancel(server, operation)
            word = "Cancelling" if cancelling else _word(operation)
            progress.update(bar, description=word, completed=operation.progress)
            if time.monotonic() > deadline:
                raise CliError(
                    f"The {operation.kind} is not over yet, and goes on in the server.",
                    "timeout",
                    hint=f"Its operation id is {operation.id}.",
                )
            time.sleep(POLL_SECONDS)
            try:
                operation = server.get(Operation, "operations", operation.id)
                heard = time.monotonic()
            except CliError as error:
                if error.reason != "unreachable" or time.monotonic() - heard > SILENCE_SECONDS:
                    raise
    return operation


def _word(operation: Operation) -> str:
    if (operation.kind, operation.phase) == ("unpark", "waiting"):
        return "Waiting for the GPU, or for room on it"
    return _WORDS[operation.phase]


def _cancel(server: Server, operation: Operation) -> None:
    try:
        server.delete("operations", operation.id)
    except CliError as error:
        # Too late to cancel: it ends by itself in a moment.
        if error.reason != "busy":
            raise
