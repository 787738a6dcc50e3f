"""What has happened lately, of all users: the tables below that of the users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from . import service_words as words
from .service_records import FailureRow, StateRow, StopRow, UserReport, seconds

_Row = TypeVar("_Row")

#: Why a state was saved, where something was about to end.
_ENDS: Final = ("shutdown", "preemption", "cull")
#: So many rows of a kind, the newest.
_FAILURES: Final = 50
_OTHERS: Final = 20
#: So many of them of one user: who writes many records hides nobody else's.
_FAILURES_OF_ONE: Final = 10
_OTHERS_OF_ONE: Final = 5
#: Seconds by which a clock may be ahead; what is later still was made up.
_AHEAD: Final = 86400.0


class Table(NamedTuple):
    """A table for a page: columns with whether they are numbers; rows of a user and of cells."""

    id: str
    title: str
    caption: str
    columns: list[tuple[str, bool]]
    rows: list[tuple[str, list[str]]]


def tables(reports: list[UserReport], now: float) -> list[Table]:
    """The tables; `now` in Unix seconds."""

    def age(when: str) -> str:
        return words.age(when, now)

    def failed(row: FailureRow) -> list[str]:
        path, count = row.path or row.kernel_id, str(row.count)
        return [path, age(row.at), count, words.cause(row.cause), row.message]

    def stopped(row: StopRow) -> list[str]:
        server, saved = row.server or words.UNKNOWN, f"{row.saved} of {row.kernels}"
        return [server, age(row.at), saved, words.exact(row.seconds)]

    def saved(row: StateRow) -> list[str]:
        path, stood = row.path or row.kernel_id, words.exact(row.frozen_seconds)
        return [path, words.cause(row.reason), age(row.created), stood, words.size(row.size)]

    failures = ((one.user, row.at, row) for one in reports for row in one.failures)
    stops = ((one.user, row.at, row) for one in reports for row in one.stops)
    ends = (
        (one.user, row.created, row) for one in reports for row in one.states if row.reason in _ENDS
    )
    until = now + _AHEAD
    return [
        Table(
            "failures",
            "Kernels whose last save failed",
            "Kernels whose last save failed, newest first",
            _columns("Notebook", "#Age", "#Times", "Wanted by", "Why"),
            _newest(failures, failed, until, _FAILURES, _FAILURES_OF_ONE),
        ),
        Table(
            "stops",
            "Stops of servers",
            "Servers that had something to save when they were stopped, newest first",
            _columns("Server", "#Age", "#Kernels saved", "#Took"),
            _newest(stops, stopped, until, _OTHERS, _OTHERS_OF_ONE),
        ),
        Table(
            "ends",
            "Saved before a stop",
            "States that were saved before a server or a kernel ended, newest first",
            _columns("Notebook", "Why", "#Age", "#Stood still", "#Logical size"),
            _newest(ends, saved, until, _OTHERS, _OTHERS_OF_ONE),
        ),
    ]


def _columns(*names: str) -> list[tuple[str, bool]]:
    """Columns; ``#`` marks those of numbers."""
    return [(name.removeprefix("#"), name.startswith("#")) for name in names]


def _newest(
    rows: Iterable[tuple[str, str, _Row]],
    cells: Callable[[_Row], list[str]],
    until: float,
    most: int,
    of_one: int,
) -> list[tuple[str, list[str]]]:
    """Rows of users by their times, which users write, newest first: so many, and of each user."""
    timed: list[tuple[float, str, _Row]] = []
    for user, when, row in rows:
        with suppress(ValueError, OverflowError):
            if (at := seconds(when)) <= until:
                timed.append((at, user, row))
    timed.sort(key=lambda one: one[0], reverse=True)
    users: Counter[str] = Counter()
    newest: list[tuple[str, list[str]]] = []
    for _, user, row in timed:
        users[user] += 1
        if users[user] <= of_one and len(newest) < most:
            newest.append((user, cells(row)))
    return newest
