"""Medians of ratios with the interval in which they lie, by resampling."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

#: So many times is resampled, always the same way.
_TIMES = 2000
_SEED = 1


class Interval(NamedTuple):
    """A median, and between which values it lies with a probability of 95 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval(groups: Sequence[Sequence[float]]) -> Interval:
    """Return the median of all values.

    Values of one group share what differs between groups, as the same two processes do: so
    groups are drawn first, with replacement, and then values within each that was drawn.

    Raises
    ------
    ValueError
        When there is no value.
    """
    groups = [group for group in groups if group]
    if not groups:
        raise ValueError("there is nothing to take the median of")
    draw = random.Random(_SEED)
    medians = sorted(
        statistics.median(
            value
            for group in draw.choices(groups, k=len(groups))
            for value in draw.choices(group, k=len(group))
        )
        for _ in range(_TIMES)
    )
    tail = _TIMES // 40
    return Interval(
        statistics.median(value for group in groups for value in group),
        medians[tail],
        medians[-tail - 1],
    )
