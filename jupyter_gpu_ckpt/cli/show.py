"""What the commands print: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..models import Doctor, Kernel, LostKernel, Operation, State

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
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
        rows.append(
            [kernel.id, kernel.path, kernel.display_name, kernel.execution_state, saved, can]
        )
    head = ["Kernel", "Notebook", "Name", "Status", "Saved", "Can be saved"]
    table(head, rows, "No kernel is running.")


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
            s.node.hostname,
        ]
        for s in found
    ]
    head = ["State", "Notebook", "Kernel", "Saved", "Why", "Size", "Node"]
    table(head, rows, "There is no saved state.")


def lost(found: Sequence[LostKernel]) -> None:
    """Print lost kernels as a table."""
    rows = [
        [
            k.kernel_id,
            k.path,
            k.display_name,
            k.node,
            age(k.last_seen),
            age(k.state.created),
            size(k.state.size),
        ]
        for k in found
    ]
    head = ["Kernel", "Notebook", "Name", "Node", "Last seen", "Saved", "Size"]
    table(head, rows, "No kernel was lost.")


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
        ("Size", f"{size(it.size)}, {size(it.stored_size)} in the store"),
        ("Kernel stood still", f"{it.frozen_seconds:.2f} s"),
        ("Was doing", it.execution_state),
        ("Execution count", it.execution_count),
        ("Node", f"{it.node.hostname} ({it.node.id})"),
        ("Linux kernel", it.node.kernel_release),
        ("CPU", it.node.cpu),
        ("CRIU", it.node.criu),
        ("GPUs", ", ".join(it.node.gpus) or "none"),
        ("Restorable here", here),
    ]
    if not it.durable:
        facts.append(("Uploaded", "not yet: it is on this node only"))
    table(None, [list(fact) for fact in facts], "")
    for difference in it.differences:
        word = "Problem" if difference.blocking else "Differs"
        click.echo(f"{word}: {clean(difference.message)}")
        if difference.saved is not None or difference.here is not None:
            click.echo(f"  saved: {clean(difference.saved or '-')}")
            click.echo(f"  here:  {clean(difference.here or '-')}")
    warnings(it.warnings)


def doctor(found: Doctor) -> None:
    """Print what this node can capture."""
    console = _console()
    for check in found.checks:
        line = Text(f"{check.status:8}", style=_STYLES[check.status])
        line.append(f" {clean(check.name)}: {clean(check.message)}", style="none")
        console.print(line)
        if check.hint and check.status != "ok":
            console.print(Text(f"         {clean(check.hint)}", style="italic"))
    verdict = "can" if found.can_capture else "cannot"
    console.print(Text(f"Kernels {verdict} be saved on this node.", style="bold"))


def operation(it: Operation) -> None:
    """Print how an operation ended, or that it has begun."""
    what = clean(it.path or f"kernel {it.kernel_id}")
    if it.result is None:
        click.echo(f"The {it.kind} of {what} has begun, as operation {it.id}.")
        return
    result = it.result
    amount = f"{size(result.size)} in {result.seconds:.1f} s"
    if it.kind == "save":
        stood = f", the kernel stood still for {result.frozen_seconds or 0:.2f} s"
        click.echo(f"Saved {what} as state {result.state_id}: {amount}{stood}.")
    else:
        click.echo(f"Restored {what} from state {result.state_id}: {amount}.")
    warnings(result.warnings)


def size(count: int) -> str:
    """Bytes in a reader's units."""
    return decimal(count)


def age(moment: str) -> str:
    """How long ago an ISO 8601 time was, in words."""
    try:
        then = datetime.fromisoformat(moment.replace("Z", "+00:00"))
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
