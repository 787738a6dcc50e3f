"""The commands of ``jupyter gpu-ckpt``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import click
import msgspec

from .. import __version__
from ..models import Doctor, Kernel, LostKernel, Operation, State
from . import follow, show
from .client import LONG_TIMEOUT
from .errors import CliError
from .select import Target, api_path

PROGRAM: Final = "jupyter gpu-ckpt"


class GcAnswer(msgspec.Struct, frozen=True):
    """The answer to ``POST /gc``."""

    packs: int
    bytes: int
    dry_run: bool


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


def wait_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that starts an operation ``--no-wait`` and ``--timeout``."""
    command = click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=3600.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for the end; the operation goes on after that.",
    )(command)
    return click.option(
        "--no-wait", is_flag=True, help="Return as soon as the operation has begun."
    )(command)


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
@click.argument("kernel")
@click.option("--label", metavar="TEXT", help="What to call the state.")
@wait_options
@server_options
def save(
    target: Target, as_json: bool, kernel: str, label: str | None, no_wait: bool, timeout: float
) -> None:
    """Save the state of KERNEL. Ctrl-C cancels, and the kernel runs on."""
    server, found = target.kernel(kernel)
    body = {"label": label} if label else {}

    def start() -> Operation:
        return server.post(Operation, "kernels", found.id, "save", body=body)

    _report(follow.run(server, start, wait=not no_wait, timeout=timeout), as_json)


@cli.command()
@click.option("--kernel", metavar="KERNEL", help="Only states of this kernel (its id).")
@click.option("--path", metavar="PATH", help="Only states of this notebook.")
@server_options
def states(target: Target, as_json: bool, kernel: str | None, path: str | None) -> None:
    """List saved states, newest first."""
    server = target.one()
    found = server.get(list[State], "states")
    if path is not None:
        found = [s for s in found if s.path == api_path(path, server.root_dir)]
    if kernel is not None:
        exact = [s for s in found if s.kernel_id == kernel]
        found = exact or [s for s in found if s.kernel_id.startswith(kernel)]
    if as_json:
        show.as_json(found)
    else:
        show.states(found)


@cli.command()
@click.argument("state")
@server_options
def inspect(target: Target, as_json: bool, state: str) -> None:
    """Show what STATE is, and whether it can be restored here."""
    server, state_id = target.state(state)
    found = server.get(State, "states", state_id)
    if as_json:
        show.as_json(found)
    else:
        show.state(found)


@cli.command()
@click.argument("state")
@click.option("--new", is_flag=True, help="Open it as a new kernel instead of rolling back.")
@click.option("--path", metavar="PATH", help="Notebook path of the new kernel's session.")
@wait_options
@server_options
def restore(
    target: Target,
    as_json: bool,
    state: str,
    new: bool,
    path: str | None,
    no_wait: bool,
    timeout: float,
) -> None:
    """Restore STATE: roll its kernel back to it, or open it as a new kernel."""
    if path is not None and not new:
        raise click.UsageError("--path goes with --new: a roll-back keeps the kernel's notebook.")
    server, state_id = target.state(state)
    body = {"mode": "new" if new else "rollback"}
    if path is not None:
        body["path"] = api_path(path, server.root_dir)

    def start() -> Operation:
        return server.post(Operation, "states", state_id, "restore", body=body)

    _report(follow.run(server, start, wait=not no_wait, timeout=timeout), as_json)


@cli.command()
@click.argument("states", nargs=-1, required=True, metavar="STATE...")
@server_options
def rm(target: Target, as_json: bool, states: tuple[str, ...]) -> None:
    """Delete states for good."""
    # All of them are looked up first: a mistyped one stops the command before it deletes.
    chosen = [target.state(state) for state in states]
    for server, state_id in chosen:
        try:
            server.get(State, "states", state_id)
        except CliError as error:
            if error.reason != "state_damaged":
                raise
    deleted = []
    for server, state_id in chosen:
        server.delete("states", state_id)
        deleted.append(state_id)
        if not as_json:
            click.echo(f"Deleted {show.clean(state_id)}.")
    if as_json:
        show.as_json({"deleted": deleted})


@cli.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@server_options
def gc(target: Target, as_json: bool, dry_run: bool) -> None:
    """Remove data from the store that no state needs any more."""
    server = target.one()
    found = server.post(GcAnswer, "gc", body={"dry_run": dry_run}, timeout=LONG_TIMEOUT)
    if as_json:
        show.as_json(found)
        return
    word = "Would remove" if dry_run else "Removed"
    click.echo(f"{word} {show.size(found.bytes)} in {found.packs} packs.")


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

        _report(follow.run(server, start, wait=not no_wait, timeout=timeout), as_json)
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


def _report(operation: Operation, as_json: bool) -> None:
    if as_json:
        show.as_json(operation)
    else:
        show.operation(operation)


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
