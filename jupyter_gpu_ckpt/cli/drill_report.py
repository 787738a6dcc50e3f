"""What a drill found, as JSON and as tables."""

from __future__ import annotations

import click
import msgspec

from . import show


class Recovery(msgspec.Struct):
    """How long each step took after the failure, in seconds.

    ``detection`` until the server began to act, ``placement`` to find out whether the state can be
    restored on this node and to prepare that, ``read`` to open it, ``restore`` to make the
    processes, which takes the memory from the store, and ``first_reply`` to connect with them
    until a cell was answered.
    """

    detection: float
    placement: float
    read: float
    restore: float
    first_reply: float
    total: float


class Check(msgspec.Struct):
    """What an expression printed before the failure and after the recovery."""

    expression: str
    before: str
    after: str
    same: bool


class Report(msgspec.Struct):
    """What a drill found; ``--json`` prints it.

    ``rerun_seconds`` is what it takes to start a kernel and run the notebook from the top,
    ``rerun_measured`` whether that was measured after the recovery, or is the first run's.
    """

    path: str
    cells: int
    state_bytes: int
    save_seconds: float
    frozen_seconds: float
    run_seconds: float
    recovery: Recovery
    rerun_seconds: float
    rerun_measured: bool
    checks: list[Check]
    same: bool


def show_report(it: Report) -> None:
    """Print a report as tables."""
    steps = it.recovery
    rows: list[tuple[str, float]] = [
        ("Detection", steps.detection),
        ("Placement", steps.placement),
        ("Read", steps.read),
        ("Restore", steps.restore),
        ("First reply", steps.first_reply),
        ("Recovery in all", steps.total),
        ("Running it again" if it.rerun_measured else "The first run", it.rerun_seconds),
    ]
    lines = [[name, f"{s:.2f} s", f"{s / it.rerun_seconds:.1%}"] for name, s in rows]
    show.table(["Step", "Time", "Of a re-run"], lines, "")
    click.echo(
        f"\nA state of {show.size(it.state_bytes)}, saved in {it.save_seconds:.1f} s; the kernel "
        f"stood still for {it.frozen_seconds:.2f} s."
    )
    if it.checks:
        click.echo()
        found = [[c.expression, c.before, c.after, "yes" if c.same else "NO"] for c in it.checks]
        show.table(["Check", "Before", "After", "Same"], found, "")
    if not it.same:
        click.echo("What was restored differs from what was saved.", err=True)
