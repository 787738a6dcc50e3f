"""The statistics of the benchmarks."""

from __future__ import annotations

import random

import pytest

from benchmarks.intervals import interval
from benchmarks.report import Row


def test_an_interval_holds_what_it_should() -> None:
    draw = random.Random(0)
    found = interval([[draw.gauss(1.1, 0.05)] for _ in range(100)])
    assert found.low < found.median < found.high
    assert found.low < 1.1 < found.high
    assert found.high - found.low < 0.05


def test_values_of_one_group_are_no_more_than_one_witness() -> None:
    groups = [[value] * 50 for value in (0.9, 1.0, 1.1)]
    assert interval(groups)[1:] == (0.9, 1.1)
    with pytest.raises(ValueError, match="nothing"):
        interval([[]])


@pytest.mark.parametrize(
    ("ours", "limit", "verdict"),
    [
        ([1.0, 1.01, 0.99], "1.00 +- 0.02", "met"),
        ([0.9, 1.0, 1.2], "1.00 +- 0.02", "not resolved"),
        ([1.1, 1.2, 1.3], "1.00 +- 0.02", "not met"),
        ([1.1, 1.12, 1.14], "<= 1.15", "met"),
        ([1.1, 1.12, 1.18], "<= 1.15", "not resolved"),
        ([1.1, 1.12, 1.18], "<= 0.3 s", ""),
    ],
)
def test_only_what_the_interval_shows_is_claimed(
    ours: list[float], limit: str, verdict: str
) -> None:
    assert Row("x", "y", ours, [1.0] * len(ours), limit).verdict == verdict


def test_it_does_not_matter_who_goes_first_in_more_rounds() -> None:
    second = 1.5  # so much slower is who comes after the other
    ours, theirs = [1.0, second] * 3, [second, 1.0] * 3
    row = Row("x", "y", [*ours, 1.0], [*theirs, second], "<= 1.15", rounds=2)
    assert row.ratio == (1.0, 1.0, 1.0)
    assert Row("x", "y", ours[:5], theirs[:5], "<= 1.15").ratio.median != 1.0
