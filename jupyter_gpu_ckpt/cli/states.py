"""The commands about saved states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from ..errors import CkptError
from ..models import Contents, Operation, State
from . import follow, show
from .client import LONG_TIMEOUT, Server
from .errors import CliError
from .options import report, server_options, wait_options
from .select import Target, api_path


class GcAnswer(msgspec.Struct, frozen=True):
    """The answer to ``POST /gc``."""

    packs: int
    bytes: int
    dry_run: bool


@click.command()
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


@click.command()
@click.argument("state")
@server_options
def inspect(target: Target, as_json: bool, state: str) -> None:
    """Show what STATE is and what is in it, and whether it can be restored here."""
    server, state_id = target.state(state)
    found = server.get(State, "states", state_id)
    contents: Contents | None = None
    try:
        contents = server.get(Contents, "states", state_id, "contents")
    except CliError as error:
        if error.reason != "state_damaged":
            raise
    if as_json:
        show.as_json({**msgspec.to_builtins(found), "contents": contents})
        return
    show.state(found)
    if contents is not None:
        click.echo()
        show.contents(contents)


@click.command()
@click.argument("state", required=False)
@click.option("--all", "every", is_flag=True, help="Check all states of the server's store.")
@wait_options
@server_options
def verify(
    target: Target, as_json: bool, state: str | None, every: bool, no_wait: bool, timeout: float
) -> None:
    """Read all of STATE and say whether it is whole, and if not, what is lost.

    Exit code 1: it is damaged.
    """
    if (state is None) != every:
        raise click.UsageError("Give one STATE, or --all.")
    if state is not None:
        server, state_id = target.state(state)
        operation = _verify(server, state_id, not no_wait, timeout)
        if as_json:
            show.as_json(operation)
        elif operation.result is None:
            show.operation(operation)
        else:
            show.verification(operation.result)
        whole = _is_whole(operation)
    else:
        whole = _verify_all(target.one(), as_json, not no_wait, timeout)
    if not whole:
        raise click.exceptions.Exit(1)


def _verify(server: Server, state_id: str, wait: bool, timeout: float) -> Operation:
    def start() -> Operation:
        return server.post(Operation, "states", state_id, "verify")

    return follow.run(server, start, wait=wait, timeout=timeout)


def _is_whole(operation: Operation) -> bool:
    result = operation.result
    return result is None or result.verification is None or result.verification.intact


def _verify_all(server: Server, as_json: bool, wait: bool, timeout: float) -> bool:
    """Check one state after the other, whatever the others are like."""
    whole = True
    answers: list[Any] = []
    for state in server.get(list[State], "states"):
        try:
            operation = _verify(server, state.id, wait, timeout)
        except CliError as error:
            if error.reason not in ("state_damaged", "unknown_state"):
                raise
            # Not even what it consists of can be read, or it was deleted meanwhile.
            if error.reason == "state_damaged":
                whole = False
                answers.append({"state_id": state.id, "error": error.as_dict()})
                if not as_json:
                    click.echo(f"State {state.id} is damaged: {show.clean(error.message)}")
            continue
        answers.append(operation)
        whole = whole and _is_whole(operation)
        if not as_json and operation.result is not None:
            show.verification(operation.result)
    if as_json:
        show.as_json(answers)
    return whole


@click.command()
@click.argument("states", nargs=-1, required=True, metavar="STATE...")
@server_options
def pin(target: Target, as_json: bool, states: tuple[str, ...]) -> None:
    """Keep states until they are deleted by hand, whatever the rules and the quota say."""
    _mark(target, as_json, states, {"pinned": True}, "Pinned")


@click.command()
@click.argument("states", nargs=-1, required=True, metavar="STATE...")
@server_options
def unpin(target: Target, as_json: bool, states: tuple[str, ...]) -> None:
    """Let the rules decide again how long states are kept."""
    _mark(target, as_json, states, {"pinned": False}, "Unpinned")


@click.command()
@click.argument("state")
@click.argument("text")
@server_options
def label(target: Target, as_json: bool, state: str, text: str) -> None:
    """Call STATE by TEXT in lists; an empty TEXT takes the label away."""
    _mark(target, as_json, (state,), {"label": text or None}, "Labelled")


def _mark(
    target: Target, as_json: bool, states: tuple[str, ...], body: dict[str, Any], word: str
) -> None:
    # All of them are looked up first: a mistyped one stops the command before it changes any.
    chosen = [target.state(state) for state in states]
    marked = [server.patch(State, "states", state_id, body=body) for server, state_id in chosen]
    if as_json:
        show.as_json(marked)
        return
    for state in marked:
        click.echo(f"{word} {show.clean(state.id)}.")


@click.command("new-key")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def new_key(file: str, as_json: bool) -> None:
    """Make a key for encrypting states, in a new FILE that only you can read."""
    from ..store.keys import new_key_file  # the server's side: of no use to the other commands

    try:
        key_id = new_key_file(Path(file))
    except CkptError as error:
        raise CliError.of(error) from None
    if as_json:
        show.as_json({"file": file, "key_id": key_id})
        return
    click.echo(f"Made the key {key_id} in {show.clean(file)}.")
    click.echo("Set c.GpuCkpt.key_file to it, and keep a copy in a safe place: without the key")
    click.echo("nobody can read the states, and whoever has it can.")


@click.command()
@click.argument("state")
@click.option("--new", is_flag=True, help="Open it as a new kernel instead of rolling back.")
@click.option("--path", metavar="PATH", help="Notebook path of the new kernel's session.")
@click.option("--take-over", is_flag=True, help="Also from another server that runs the kernel.")
@click.option(
    "--gpu-map",
    "gpu_map",
    metavar="OLD=NEW",
    multiple=True,
    help="The GPU that is to stand for one of the save, by UUID; may be given more than once.",
)
@wait_options
@server_options
def restore(
    target: Target,
    as_json: bool,
    state: str,
    new: bool,
    path: str | None,
    take_over: bool,
    gpu_map: tuple[str, ...],
    no_wait: bool,
    timeout: float,
) -> None:
    """Restore STATE: roll its kernel back to it, or open it as a new kernel."""
    if path is not None and not new:
        raise click.UsageError("--path goes with --new: a roll-back keeps the kernel's notebook.")
    if take_over and new:
        raise click.UsageError("--take-over is for the kernel itself, --new makes another one.")
    pairs = dict(_gpu_pair(pair) for pair in gpu_map)
    if len(pairs) < len(gpu_map):
        raise click.UsageError("--gpu-map names a GPU of the save more than once.")
    server, state_id = target.state(state)
    body: dict[str, Any] = {"mode": "new" if new else "rollback", "take_over": take_over}
    if path is not None:
        body["path"] = api_path(path, server.root_dir)
    if pairs:
        body["gpu_map"] = pairs

    def start() -> Operation:
        return server.post(Operation, "states", state_id, "restore", body=body)

    report(follow.run(server, start, wait=not no_wait, timeout=timeout), as_json)


def _gpu_pair(text: str) -> tuple[str, str]:
    old, _, new = text.partition("=")
    if not (old.startswith("GPU-") and new.startswith("GPU-")):
        raise click.UsageError(f"--gpu-map takes two UUIDs, GPU-...=GPU-..., not '{text}'.")
    return old, new


@click.command()
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


@click.command()
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


commands = [states, inspect, verify, restore, pin, unpin, label, rm, gc, new_key]
