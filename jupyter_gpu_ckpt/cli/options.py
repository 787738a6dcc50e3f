"""What commands have in common: which server, how to wait, what to print at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from ..models import Operation
from . import show
from .select import Target


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--url``, ``--token`` and ``--json``; it gets a `Target` and a flag."""

    @click.option("--url", metavar="URL", help="The server; default: the one that runs here.")
    @click.option(
        "--token",
        metavar="TOKEN",
        envvar="JUPYTER_TOKEN",
        help="The server's token; better put into JUPYTER_TOKEN, where 'ps' does not show it.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(command)
    def with_target(url: str | None, token: str | None, as_json: bool, **options: Any) -> None:
        command(Target(url, token), as_json, **options)

    return with_target


def timeout_option(help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command ``--timeout``, an hour unless it is given."""
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=3600.0,
        show_default=True,
        metavar="SECONDS",
        help=help,
    )


def wait_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that starts an operation ``--no-wait`` and ``--timeout``."""
    command = timeout_option("How long to wait for the end; the operation goes on after that.")(
        command
    )
    return click.option(
        "--no-wait", is_flag=True, help="Return as soon as the operation has begun."
    )(command)


def report(operation: Operation, as_json: bool) -> None:
    """Print an operation that has ended, or has only begun."""
    if as_json:
        show.as_json(operation)
    else:
        show.operation(operation)
