"""Durations as people write and read them: ``10m``, ``10 min``."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """Read ``90``, ``90s``, ``1.5m``, ``2h``, or ``off`` for 0; ValueError for anything else."""
    if text == "off":
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration like 90s, 10m or 1h.")
    return float(match[1]) * _UNITS[match[2]]


def words(seconds: float) -> str:
    """Say seconds in the largest unit that divides them: ``90 s``, ``10 min``, ``2 h``."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"
