"""Numbers, times and reasons in a reader's words, for pages."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Final

from .service_records import seconds

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))

#: Stands in a table's cell for what is not known, or is not there.
UNKNOWN: Final = "-"

#: Who wanted a save, or why it was made.
CAUSES: Final = {
    "user": "the user",
    "idle": "idle",
    "interval": "interval",
    "long_cell": "after a long cell",
    "shutdown": "before a shutdown",
    "preemption": "before a preemption",
    "cull": "before culling",
    "hibernate": "hibernation",
}


def size(count: int | None) -> str:
    """Bytes in binary units, three digits at most before the unit; a dash for what is unknown."""
    if count is None:
        return UNKNOWN
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1
    return f"{value:.{digits}f} {_UNITS[unit]}"


def percent(share: float | None) -> str:
    """A share of a quota."""
    return UNKNOWN if share is None else f"{share:.0%}"


def span(length: float) -> str:
    """Seconds in the largest unit that fits."""
    for unit, name in _SPANS:
        if length >= unit:
            return f"{length / unit:.0f} {name}"
    return "0 s"


def exact(length: float | None) -> str:
    """Seconds to the tenth; a dash for what is unknown."""
    return UNKNOWN if length is None else f"{length:.1f} s"


def age(when: str | None, now: float) -> str:
    """How long ago a time in ISO 8601 was."""
    return UNKNOWN if when is None else span(max(0.0, now - seconds(when)))


def moment(when: str | float | None) -> str:
    """A time, ISO 8601 or Unix seconds, to the minute."""
    if when is None:
        return UNKNOWN
    at = seconds(when) if isinstance(when, str) else when
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def cause(name: str | None) -> str:
    """Who wanted a save."""
    return UNKNOWN if name is None else CAUSES.get(name, name)
