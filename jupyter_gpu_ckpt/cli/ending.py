"""Telling a server that it ends, and waiting until its kernels are saved."""

from __future__ import annotations

import time
from typing import Final

import click

from ..models import Ending
from . import show
from .client import Server
from .errors import CliError

#: Longest deadline that a server takes, in seconds.
LONGEST: Final = 604800.0

_POLL: Final = 0.2
#: Seconds that the server may take after the deadline to say what was not saved.
_GRACE: Final = 5.0


def save_all(server: Server, seconds: float, *, wait: bool, as_json: bool) -> None:
    """Have all kernels of a server saved which ends in so many seconds.

    Parameters
    ----------
    server
        The server.
    seconds
        Until it ends.
    wait
        Whether to wait until all is saved, or the time is over.
    as_json
        Whether to print JSON.

    Raises
    ------
    CliError
        When the server does not answer, or not in time.
    click.exceptions.Exit
        With 1 when not all is saved, and where all nodes can read it.
    """
    until = time.monotonic() + seconds + _GRACE
    ending = server.post(Ending, "endings", body={"seconds": seconds})
    while wait and ending.phase != "done":
        if time.monotonic() > until:
            raise CliError("The server did not say in time what it saved.", "timeout")
        time.sleep(_POLL)
        for found in server.get(list[Ending], "endings"):
            if found.id == ending.id:
                ending = found
    if as_json:
        show.as_json(ending)
    elif wait:
        show.ending(ending)
    else:
        click.echo("The kernels are being saved.")
    if ending.not_uploaded or not all(kernel.saved for kernel in ending.kernels):
        raise click.exceptions.Exit(1)
