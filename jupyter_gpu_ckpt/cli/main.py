"""The commands of ``jupyter gpu-ckpt``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from .. import __version__
from ..models import Doctor, Kernel, LostKernel, Operation
from . import autosave, drill, ending, follow, show, states
from .errors import CliError
from .options import report, server_options, wait_options
from .select import Target

PROGRAM: Final = "jupyter gpu-ckpt"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Save running Jupyter kernels whole, and restore them.

    KERNEL is a kernel's id, the beginning of one, or the path of its notebook. STATE is a
    state's id or the beginning of one.
    """


@cli.command()
@server_options
@click.option("--local", is_flag=True, help="Examine this machine even if a server runs here.")
def doctor(target: Target, as_json: bool, local: bool) -> None:
    """Say what this node can capture, and why not.

    Asks the running server; without one, examines this machine. Exit code 1: kernels cannot
    be saved here.
    """
    found = examine() if local else _doctor_of_server(target)
    if as_json:
        show.as_json(found)
    else:
        show.doctor(found)
    if not found.can_capture:
        raise click.exceptions.Exit(1)


def examine() -> Doctor:
    """Examine this machine; see :mod:`.local`, whose imports only this needs."""
    from . import local

    return local.examine()


def _doctor_of_server(target: Target) -> Doctor:
    try:
        return target.one().get(Doctor, "doctor")
    except CliError as error:
        if target.url or error.reason not in ("no_server", "ambiguous"):
            raise
        # Nobody to ask, or several on the same machine: look for ourselves.
        return examine()


@cli.command()
@server_options
def kernels(target: Target, as_json: bool) -> None:
    """List running kernels, and whether they can be saved."""
    found = target.one().get(list[Kernel], "kernels")
    if as_json:
        show.as_json(found)
    else:
        show.kernels(found)


@cli.command()
@click.argument("kernel", required=False)
@click.option("--label", metavar="TEXT", help="What to call the state.")
@click.option("--all", "every", is_flag=True, help="Save all kernels, because the server ends.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, max=ending.LONGEST),
    metavar="SECONDS",
    help="With --all: when the server ends.",
)
@wait_options
@server_options
def save(
    target: Target,
    as_json: bool,
    kernel: str | None,
    label: str | None,
    every: bool,
    deadline: float | None,
    no_wait: bool,
    timeout: float,
) -> None:
    """Save the state of KERNEL. Ctrl-C cancels, and the kernel runs on.

    --all --deadline SECONDS tells the server that it ends in so many seconds: it saves all its
    kernels, most valuable first. Exit code 1: not all of them are saved.
    """
    if every != (kernel is None) or every != (deadline is not None) or (every and label):
        raise click.UsageError("Give a KERNEL, or --all with --deadline and without --label.")
    if kernel is None or deadline is not None:
        ending.save_all(target.one(), deadline or 0.0, wait=not no_wait, as_json=as_json)
        return
    server, found = target.kernel(kernel)
    body = {"label": label} if label else {}

    def start() -> Operation:
        return server.post(Operation, "kernels", found.id, "save", body=body)

    report(follow.run(server, start, wait=not no_wait, timeout=timeout), as_json)


def _done(target: Target, kernel: str, action: str, *, wait: bool, timeout: float) -> Operation:
    """Have something done with a kernel, and follow it."""
    server, found = target.kernel(kernel)

    def start() -> Operation:
        return server.post(Operation, "kernels", found.id, action)

    return follow.run(server, start, wait=wait, timeout=timeout)


@cli.command()
@click.argument("kernel")
@wait_options
@server_options
def hibernate(target: Target, as_json: bool, kernel: str, no_wait: bool, timeout: float) -> None:
    """Save KERNEL and end its process until somebody needs it."""
    report(_done(target, kernel, "hibernate", wait=not no_wait, timeout=timeout), as_json)


@cli.command()
@click.argument("kernel")
@wait_options
@server_options
def wake(target: Target, as_json: bool, kernel: str, no_wait: bool, timeout: float) -> None:
    """Bring the hibernated KERNEL back; running a cell does it too."""
    report(_done(target, kernel, "wake", wait=not no_wait, timeout=timeout), as_json)


@cli.command()
@click.argument("kernel")
@wait_options
@server_options
def park(target: Target, as_json: bool, kernel: str, no_wait: bool, timeout: float) -> None:
    """Move the GPU memory of KERNEL to this machine's memory, which frees the GPU."""
    report(_done(target, kernel, "park", wait=not no_wait, timeout=timeout), as_json)


@cli.command()
@click.argument("kernel")
@wait_options
@server_options
def unpark(target: Target, as_json: bool, kernel: str, no_wait: bool, timeout: float) -> None:
    """Give the parked KERNEL its GPU back; running a cell does it too."""
    report(_done(target, kernel, "unpark", wait=not no_wait, timeout=timeout), as_json)


@cli.command()
@click.option("--restore", "restore_it", metavar="KERNEL", help="Bring this lost kernel back.")
@click.option("--dismiss", metavar="KERNEL", help="Stop offering it; its states stay.")
@wait_options
@server_options
def lost(
    target: Target,
    as_json: bool,
    restore_it: str | None,
    dismiss: str | None,
    no_wait: bool,
    timeout: float,
) -> None:
    """List kernels that ended without an orderly shutdown, bring one back, or dismiss one."""
    if restore_it is not None and dismiss is not None:
        raise click.UsageError("--restore and --dismiss do not go together.")
    if restore_it is not None:
        server, found = target.lost(restore_it)

        def start() -> Operation:
            return server.post(Operation, "lost", found.kernel_id, "restore")

        report(follow.run(server, start, wait=not no_wait, timeout=timeout), as_json)
    elif dismiss is not None:
        server, found = target.lost(dismiss)
        server.dismiss(found.kernel_id)
        if as_json:
            show.as_json({"dismissed": found.kernel_id})
        else:
            click.echo(f"Dismissed {found.kernel_id}. Its states stay.")
    else:
        every = target.one().get(list[LostKernel], "lost")
        if as_json:
            show.as_json(every)
        else:
            show.lost(every)


for command in states.commands:
    cli.add_command(command)
for command in (drill.drill, autosave.autosave):
    cli.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code: 0 done, 1 failed, 2 not understood."""
    try:
        result = cli.main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except CliError as error:
        error.show()
        if "--json" in arguments:
            show.as_json({"error": error.as_dict()})
        return error.code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has had enough; keep the interpreter from flushing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def main() -> None:
    """Entry point of the ``jupyter-gpu-ckpt`` script, and so of ``jupyter gpu-ckpt``."""
    sys.exit(run(sys.argv[1:]))
