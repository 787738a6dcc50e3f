"""Lists in messages: as many as can be read at a glance."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 5) -> str:
    """Name the first `most` of several things, and say whether there are more."""
    return ", ".join(names[:most]) + (" and others" if len(names) > most else "")
