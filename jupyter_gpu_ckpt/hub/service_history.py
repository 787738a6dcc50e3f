"""How much the users' states took over time: a small database of the service's own."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from .service_records import UserReport

_HOUR, _DAY = 3600.0, 86400.0
#: Hours are kept for so long, and after that days.
_HOURS_FOR: Final = 14 * _DAY
_DAYS_FOR: Final = 400 * _DAY
#: Stands for all users together; no user has this name.
ALL: Final = ""
#: The most that is noted, and fits: many states, or files full of holes, can add up to more.
_MOST: Final = 1 << 62
_LONGEST_WAIT: Final = 5.0


class Sample(NamedTuple):
    """What was there at a time (Unix seconds), in bytes and states."""

    at: float
    used: int
    size: int
    states: int


class History:
    """One sample an hour of each user, later one a day; a user's newest is replaced meanwhile.

    Thread-safe; every call takes milliseconds, and once an hour some more.

    Parameters
    ----------
    file
        The database, mode 0600; ``None``: in memory only.
    """

    def __init__(self, file: Path | None) -> None:
        self._lock = threading.Lock()
        self._tidied: int | None = None
        if file is not None:
            with suppress(FileExistsError):
                os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(
            ":memory:" if file is None else file, timeout=_LONGEST_WAIT, check_same_thread=False
        )
        with self._db:
            self._db.execute(
                "create table if not exists usage (user text, hour integer, at real, used integer,"
                " size integer, states integer, primary key (user, hour)) without rowid"
            )

    def add(self, reports: Iterable[UserReport], now: float) -> None:
        """Note what there is now, of those that have been read, and of all together.

        Raises
        ------
        sqlite3.Error
            It cannot be written.
        """
        known = [report for report in reports if report.read is not None]
        hour = int(now // _HOUR)
        rows = [(report.user, report.used, report.size, len(report.states)) for report in known]
        of_all = (
            ALL,
            sum(report.used for report in known),
            sum(report.size for report in known),
            sum(len(report.states) for report in known),
        )
        with self._lock, self._db:
            self._db.executemany(
                "insert or replace into usage values (?, ?, ?, ?, ?, ?)",
                [
                    (user, hour, now, min(used, _MOST), min(size, _MOST), states)
                    for user, used, size, states in (*rows, of_all)
                ],
            )
            if hour != self._tidied:
                self._tidy(now)
                self._tidied = hour

    def _tidy(self, now: float) -> None:
        """Remove what is too old: it goes through all samples, so once an hour has to do."""
        self._db.execute("delete from usage where at < ?", (now - _DAYS_FOR,))
        # The last hour of each day stays. The bounds are those of the key, which finds it at once.
        self._db.execute(
            "delete from usage where at < ? and exists (select 1 from usage as later where"
            " later.user = usage.user and later.hour > usage.hour"
            " and later.hour < (usage.hour / 24 + 1) * 24)",
            (now - _HOURS_FOR,),
        )

    def of(self, user: str, since: float) -> list[Sample]:
        """Samples of a user, or of :data:`ALL`, oldest first."""
        with self._lock:
            rows = self._db.execute(
                "select at, used, size, states from usage where user = ? and at >= ? order by at",
                (user, since),
            ).fetchall()
        return [Sample(*row) for row in rows]

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()
