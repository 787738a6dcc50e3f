"""``autosave``: when kernels are saved without anybody asking."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from .. import durations
from ..models import AutoSaveChoice, AutoSaves
from . import show
from .errors import CliError
from .options import server_options
from .select import Target


def _seconds(text: str) -> float:
    try:
        return durations.seconds(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("kernel", required=False)
@click.option("--idle", type=_seconds, metavar="TIME", help="Save after so long without work.")
@click.option("--interval", type=_seconds, metavar="TIME", help="Save after so much work.")
@click.option(
    "--long-cell", type=_seconds, metavar="TIME", help="Save after cells that ran longer."
)
@click.option(
    "--hibernate", type=_seconds, metavar="TIME", help="Save and stop after so long without work."
)
@click.option(
    "--park", type=_seconds, metavar="TIME", help="Save and free its GPUs after so long idle."
)
@click.option(
    "--before-shutdown/--no-before-shutdown", default=None, help="Save before the server stops."
)
@click.option(
    "--before-preemption/--no-before-preemption",
    default=None,
    help="Save when the server's end is foretold.",
)
@click.option("--before-cull/--no-before-cull", default=None, help="Save before it is culled.")
@click.option("--on/--off", "enabled", default=None, help="Whether it is saved automatically.")
@click.option("--default", "reset", is_flag=True, help="Take back first what was chosen before.")
@server_options
def autosave(
    target: Target, as_json: bool, kernel: str | None, reset: bool, **options: Any
) -> None:
    """Show or change when KERNEL is saved automatically; without KERNEL, all of yours.

    TIME is 90s, 10m, 1h, or off. What is not given stays as it was. What may be chosen is the
    administrator's to say.
    """
    change = {name: value for name, value in options.items() if value is not None}
    if kernel is None:
        server, where = target.one(), ["autosave"]
    else:
        server, found = target.kernel(kernel)
        if found.error is not None and not found.savable:
            # It would be kept, and never do anything.
            raise CliError(found.error.message, found.error.reason, hint=found.error.hint)
        where = ["kernels", found.id, "autosave"]
    saves = server.get(AutoSaves, *where)
    if change or reset:
        own = AutoSaveChoice() if reset else saves.own
        chosen = msgspec.structs.replace(own, **change)
        saves = server.put(AutoSaves, *where, body=chosen)
    if as_json:
        show.as_json(saves)
    else:
        _show(saves)


def _show(saves: AutoSaves) -> None:
    """Print a policy: what counts, what of it was chosen here, what may not be changed."""
    policy, own = msgspec.structs.asdict(saves.policy), msgspec.structs.asdict(saves.own)
    rows = []
    for name, value in policy.items():
        said = ("yes" if value else "no") if isinstance(value, bool) else _time(value)
        locked = name in saves.limits.locked
        note = "locked" if locked else "chosen" if own[name] is not None else None
        rows.append([_WORDS[name], said, note])
    show.table(["Saved", "", "Note"], rows, "")
    if not saves.policy.enabled:
        click.echo("Switched off: nothing is saved automatically.")
    click.echo(f"(The shortest time that may be chosen: {durations.words(saves.limits.shortest)}.)")


def _time(value: float) -> str:
    return durations.words(value) if value else "off"


_WORDS = {
    "enabled": "automatically at all",
    "idle": "when idle for",
    "interval": "after work of",
    "long_cell": "after cells longer than",
    "hibernate": "and hibernated when idle for",
    "park": "and parked, with a GPU, when idle for",
    "before_shutdown": "before the server stops",
    "before_preemption": "when the server's end is foretold",
    "before_cull": "before it is culled",
}
