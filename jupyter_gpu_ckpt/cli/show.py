"""What the commands print: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..models import (
    CONTENTS_WORDS,
    Contents,
    ContentsItem,
    Doctor,
    Ending,
    Kernel,
    LostKernel,
    Operation,
    OperationResult,
    State,
)
from ..moments import read_moment
from ..outside import Outside
from ..saved_gpus import SavedGpus

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
#: So many of what is in a state are shown.
_ITEMS = 20
#: Width of the page when nobody looks at it: no line is cut or folded in a pipe.
_PIPE_WIDTH = 100_000


def as_json(value: Any) -> None:
    """Print `value` as JSON on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def warnings(lines: Iterable[str]) -> None:
    """Print warnings on stderr."""
    for line in lines:
        click.echo(f"Warning: {clean(line)}", err=True)


def kernels(found: Sequence[Kernel]) -> None:
    """Print running kernels as a table."""
    rows = []
    for kernel in found:
        saved = age(kernel.last_state.created) if kernel.last_state else "never"
        if kernel.error is not None:
            can = f"no: {kernel.error.message}"
        elif kernel.operation is not None:
            can = f"not now: {kernel.operation.kind}, {kernel.operation.progress:.0%}"
        else:
            can = "yes"
        rows.append([kernel.id, kernel.path, kernel.display_name, _status(kernel), saved, can])
    head = ["Kernel", "Notebook", "Name", "Status", "Saved", "Can be saved"]
    table(head, rows, "No kernel is running.")
    warnings(f"Kernel {kernel.id}: {kernel.gpu_lost}" for kernel in found if kernel.gpu_lost)


def _status(it: Kernel) -> str:
    """What a kernel does, and where its GPU's memory is if not on the GPU."""
    if it.gpu_lost is not None:
        return f"{it.execution_state}, GPU lost"
    if it.parked is None:
        return it.execution_state
    return f"parked: {it.parked.waiting}" if it.parked.waiting else "parked"


def states(found: Sequence[State]) -> None:
    """Print states as a table."""
    rows = [
        [
            s.id,
            s.path,
            s.kernel_id,
            age(s.created),
            s.label or s.reason,
            size(s.size),
            None if s.cost is None else size(s.cost),
            ", ".join(_marks(s)) or None,
            s.node.hostname,
        ]
        for s in found
    ]
    head = ["State", "Notebook", "Kernel", "Saved", "Why", "Size", "Frees", "Marks", "Node"]
    table(head, rows, "There is no saved state.")
    warnings(f"State {s.id} is damaged: {s.damage}" for s in found if s.damage is not None)


def _marks(it: State) -> list[str]:
    """What is special about a state, in words."""
    found = {
        "unreadable" if not it.kernel_name else "damaged": it.damage is not None,
        "pinned": it.pinned,
        "local only": not it.durable,
        "encrypted": it.encrypted,
    }
    return [word for word, is_so in found.items() if is_so]


#: How a kernel ended without its user's wish.
_ENDED: Final = {
    "lost": "lost",
    "shutdown": "server stopped",
    "cull": "idle",
    "hibernated": "hibernated",
}


def lost(found: Sequence[LostKernel]) -> None:
    """Print lost kernels as a table; with the names of their servers, where there are any."""
    named = any(k.server for k in found)
    rows = [
        [
            k.kernel_id,
            k.path,
            k.display_name,
            *([k.server or None] if named else []),
            k.node,
            _ENDED[k.why],
            age(k.last_seen),
            age(k.state.created),
            size(k.state.size),
        ]
        for k in found
    ]
    where = ["Server", "Node"] if named else ["Node"]
    head = ["Kernel", "Notebook", "Name", *where, "Ended", "Last seen", "Saved", "Size"]
    table(head, rows, "No kernel was lost.")


def ending(it: Ending) -> None:
    """Print what was saved before a server ends; on stderr what was not."""
    saved = [kernel for kernel in it.kernels if kernel.saved]
    click.echo(f"{len(saved)} of {len(it.kernels)} kernels are saved.")
    for kernel in it.kernels:
        if not kernel.saved:
            name = clean(kernel.path or kernel.kernel_id)
            click.echo(f"Not saved: {name}: {clean(kernel.message or '')}", err=True)
    for state_id in it.not_uploaded:
        click.echo(f"On this node only: state {state_id}", err=True)


def state(it: State) -> None:
    """Print everything about one state."""
    here = {True: "yes", False: "no", None: "not checked"}[it.restorable]
    if it.modes is not None and len(it.modes) == 1:
        here = {"new": "only as a new kernel", "rollback": "only in its place"}[it.modes[0]]
    facts = [
        ("State", it.id),
        ("Kernel", f"{it.kernel_id} ({it.display_name})"),
        ("Notebook", it.path),
        ("Saved", f"{it.created} ({age(it.created)})"),
        ("Why", it.reason),
        ("Label", it.label),
        ("Size", f"{size(it.size)}, of which {size(it.stored_size)} were stored for it"),
        ("Marks", ", ".join(_marks(it)) or None),
        ("Checked", "never" if it.verified is None else f"whole, {age(it.verified)}"),
        ("Kernel stood still", f"{it.frozen_seconds:.2f} s"),
        ("Was doing", it.execution_state),
        ("Execution count", it.execution_count),
        ("Node", f"{it.node.hostname} ({it.node.id})"),
        ("Linux kernel", it.node.kernel_release),
        ("CPU", it.node.cpu),
        ("CRIU", it.node.criu),
        ("GPUs", ", ".join(it.node.gpus) or "none"),
        ("GPU memory", None if it.gpu is None else _of_gpus(it.gpu)),
        ("Restorable here", here),
    ]
    if not it.durable:
        facts.append(("Uploaded", "not yet: it is on this node only"))
    table(None, [list(fact) for fact in facts], "")
    if it.damage is not None:
        click.echo(f"Problem: {clean(it.damage)}")
    if it.outside is not None:
        outside(it.outside)
    for difference in it.differences:
        word = "Problem" if difference.blocking else "Differs"
        click.echo(f"{word}: {clean(difference.message)}")
        if difference.saved is not None or difference.here is not None:
            click.echo(f"  saved: {clean(difference.saved or '-')}")
            click.echo(f"  here:  {clean(difference.here or '-')}")
    warnings(it.warnings)


def _of_gpus(saved: SavedGpus) -> str:
    where = ", ".join(f"{gpu.name} ({gpu.uuid})" for gpu in saved.gpus if gpu.used)
    several = f" of {saved.processes} processes" if saved.processes > 1 else ""
    return f"{size(saved.memory)}{several} on {where or 'no GPU'}, driver {saved.driver}"


def outside(found: Outside) -> None:
    """Print what a kernel had that is not in its state."""
    for thing in found.closed():
        click.echo(f"Will not come back: {clean(thing)}")
    for thing in found.needed():
        click.echo(f"Not in the state: {clean(thing)}")
    if found.left_out:
        click.echo(f"... and {found.left_out} more that are not in the state")


def contents(found: Contents) -> None:
    """Print what is in a state: by kind, then the largest items."""
    head = ["In it", "Size", "New"]
    rows = [[CONTENTS_WORDS[k.kind], size(k.size), size(k.new)] for k in found.kinds if k.size]
    table(head, [*rows, ["all", size(found.size), size(found.new)]], "")
    compared = f"state {clean(found.parent)}" if found.parent else "no earlier state"
    click.echo(f"(New: stored for it, compared with {compared}.)\n")
    head = ["Largest", "Kind", "Process", "Address", "Size", "New"]
    shown = found.items[:_ITEMS]
    table(head, [_item(item, size(item.new)) for item in shown], "")
    left = found.left_out + len(found.items) - len(shown)
    if left:
        click.echo(f"... and {left} more, the first of them with --json")


def _item(it: ContentsItem, *more: str) -> list[Any]:
    return [it.name, CONTENTS_WORDS[it.kind], it.pid, it.start, size(it.size), *more]


def verification(result: OperationResult) -> None:
    """Print what a check of a state found."""
    found, state_id = result.verification, clean(result.state_id)
    if found is None or found.intact:
        click.echo(f"State {state_id} is whole: {size(result.size)} in {result.seconds:.1f} s.")
        return
    click.echo(f"State {state_id} is damaged: {size(found.lost)} of {size(result.size)} are lost.")
    head = ["Lost of", "Kind", "Process", "Address", "Size"]
    table(head, [_item(item) for item in found.items], "")
    head = ["In the file", "Lost", "First at", "Why"]
    rows = [
        [f.path, size(f.size), f.ranges[0].offset if f.ranges else None, f.why] for f in found.files
    ]
    table(head, rows, "")
    if found.older is None:
        click.echo("There is no older state of this kernel that is whole.")
    else:
        click.echo(f"The newest older state that is whole: {clean(found.older)}")


def doctor(found: Doctor) -> None:
    """Print what this node can capture."""
    console = _console()
    for check in found.checks:
        line = Text(f"{check.status:8}", style=_STYLES[check.status])
        line.append(f" {clean(check.name)}: {clean(check.message)}", style="none")
        console.print(line)
        if check.hint and check.status != "ok":
            console.print(Text(f"         {clean(check.hint)}", style="italic"))
    if found.rights is not None:
        console.print(f"Rights: {clean(found.rights.row)}. {clean(found.rights.works)}")
        if found.rights.adds is not None:
            missing = ", ".join(map(clean, found.rights.missing))
            console.print(f"        {missing} would add: {clean(found.rights.adds)}.")
    verdict = "can" if found.can_capture else "cannot"
    console.print(Text(f"Kernels {verdict} be saved on this node.", style="bold"))


def operation(it: Operation) -> None:
    """Print how an operation ended, or that it has begun."""
    what = clean(it.path or f"kernel {it.kernel_id}")
    if it.result is None:
        word = "check" if it.kind == "verify" else it.kind
        click.echo(f"The {word} of {what} has begun, as operation {it.id}.")
        return
    result = it.result
    amount = f"{size(result.size)} in {result.seconds:.1f} s"
    if it.kind == "save":
        stood = f", the kernel stood still for {result.frozen_seconds or 0:.2f} s"
        click.echo(f"Saved {what} as state {result.state_id}: {amount}{stood}.")
    elif it.kind in ("park", "unpark"):
        moved = "host memory" if it.kind == "park" else "the GPU"
        said = f"{size(result.size)} of GPU memory moved to {moved} in {result.seconds:.1f} s"
        click.echo(f"{it.kind.capitalize()}ed {what}: {said}.")
    else:
        click.echo(f"Restored {what} from state {result.state_id}: {amount}.")
    warnings(result.warnings)


def size(count: int) -> str:
    """Bytes in a reader's units."""
    return decimal(count)


def age(moment: str) -> str:
    """How long ago an ISO 8601 time was, in words."""
    try:
        then = read_moment(moment)
    except ValueError:
        return clean(moment)
    if then.tzinfo is None:
        then = then.replace(tzinfo=timezone.utc)
    seconds = max(0, int((datetime.now(timezone.utc) - then).total_seconds()))
    if seconds < 60:
        return "just now"
    for unit, length in (("day", 86400), ("hour", 3600), ("min", 60)):
        number = seconds // length
        if number:
            return f"{number} {unit}{'s' if number > 1 and unit != 'min' else ''} ago"
    raise AssertionError("unreachable")


def clean(text: str) -> str:
    """Take out what could steer a terminal: names and labels come from elsewhere."""
    return "".join(c if c.isprintable() else "?" for c in text)


def table(head: Sequence[str] | None, rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Print rows in columns; in a pipe nothing is cut or folded."""
    if not rows:
        click.echo(empty)
        return
    grid = Table(box=None, show_header=head is not None, header_style="bold", pad_edge=False)
    for number in range(len(rows[0])):
        # An id that is folded cannot be copied.
        grid.add_column(head[number] if head else "", no_wrap=number == 0, overflow="fold")
    for row in rows:
        grid.add_row(*(Text("-" if cell is None else clean(str(cell))) for cell in row))
    _console().print(grid)


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console
