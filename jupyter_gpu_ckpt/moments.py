"""Times as text: ISO 8601, in UTC, with `Z`."""

from __future__ import annotations

from datetime import datetime


def read_moment(text: str) -> datetime:
    """Understand a time in ISO 8601; without a time zone where the text has none.

    Raises
    ------
    ValueError
        It is none.
    """
    return datetime.fromisoformat(text.replace("Z", "+00:00"))  # Python 3.10 knows no `Z`
