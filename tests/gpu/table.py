"""The table of the check: a row for each step, with a deadline of its own, whatever happens."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

#: Seconds in which what a step has started is to end.
_ENDING = 10.0


class NotPossibleError(Exception):
    """The machine lacks something: nothing is wrong with what is checked."""


class StepTimeoutError(BaseException):
    """A step had no more time."""


class Table:
    """The rows, one after the other.

    Parameters
    ----------
    seconds
        For all of them together.
    json_path
        Where they are written too, with what the check finds out about the machine.
    only
        Rows without this in their name are left out, but for the first two.
    """

    def __init__(self, *, seconds: float, json_path: Path | None, only: str = "") -> None:
        self.json_path, self.only = json_path, only
        self.end = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        #: Ends what the present step has started.
        self.cleanup = contextlib.ExitStack()
        signal.signal(signal.SIGALRM, _over)

    def row(self, name: str, seconds: float, step: Callable[[], dict[str, Any]]) -> None:
        """Carry out a step; what it returns is what its row tells besides."""
        # What is measured first is what the others are judged by.
        if self.only not in name and not name.startswith(("probe", "plain copy")):
            return
        row: dict[str, Any] = {"name": name, "verdict": "passed", "seconds": 0.0}
        began = time.monotonic()
        limit = min(seconds, self.end - began)
        try:
            if limit < 2:
                raise NotPossibleError("no time was left")
            signal.setitimer(signal.ITIMER_REAL, limit)
            with contextlib.ExitStack() as self.cleanup:
                try:
                    row |= step()
                finally:
                    # What is ended may not end either; each of it has that long.
                    signal.setitimer(signal.ITIMER_REAL, _ENDING, _ENDING)
        except NotPossibleError as error:
            row |= {"verdict": "not possible here", "note": str(error)}
        except (Exception, StepTimeoutError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            row |= {"verdict": "failed", "note": text[:600], "error": traceback.format_exc()}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        row["seconds"] = round(time.monotonic() - began, 2)
        self.rows.append(row)
        print(self.line(row), flush=True)
        if self.json_path is not None:  # after each, should the next one be the last
            found = json.dumps({"rows": self.rows, **self.facts}, indent=1)
            self.json_path.write_text(found)

    def line(self, row: dict[str, Any]) -> str:
        """A row of the table."""
        speed = f"{row['speed'] / 1e9:.2f} GB/s" if row.get("speed") else ""
        cells = row["name"], row["verdict"], f"{row['seconds']:.2f} s", speed, row.get("note", "")
        return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"

    def keep_logs(self, name: str, folder: Path) -> None:
        """Copy a step's logs, CRIU's among them, beside the rows: there may be no second try."""
        if self.json_path is None:
            return
        kept = self.json_path.parent / "logs" / name
        for path in folder.rglob("*.log"):
            with contextlib.suppress(OSError):
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept / path.name)


def _over(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise StepTimeoutError("it took too long")
