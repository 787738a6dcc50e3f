"""Usage over time as an SVG drawing, made here: pages need no script for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Final
from xml.sax.saxutils import escape

from .service_history import Sample
from .service_words import moment, size

_WIDTH, _HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 14, 30
_DAY: Final = 86400.0


def usage_plot(samples: Sequence[Sample], *, title: str, quota: int | None = None) -> str:
    """Draw what was used; classes give the colours, so that it is fit for light and dark.

    Parameters
    ----------
    samples
        Oldest first, at least two.
    title
        What is shown.
    quota
        Bytes at which a line is drawn, if that is near enough to be seen.
    """
    first, last = samples[0].at, samples[-1].at
    highest = max(sample.used for sample in samples)
    if quota is not None and quota <= 4 * max(highest, 1):
        highest = max(highest, quota)
    else:
        quota = None
    step = _step(highest)
    top = step * max(1, math.ceil(highest / step))

    def x(at: float) -> float:
        return _LEFT + (at - first) / (last - first or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y(used: float) -> float:
        return _TOP + (1 - used / top) * (_HEIGHT - _TOP - _BOTTOM)

    peak = max(samples, key=lambda sample: sample.used)
    text = (
        f"From {moment(first)} to {moment(last)}. At the end {size(samples[-1].used)}; "
        f"at most {size(peak.used)}, at {moment(peak.at)}."
    )
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        ' aria-labelledby="plot-title plot-text">',
        f'<title id="plot-title">{escape(title)}</title><desc id="plot-text">{text}</desc>',
    ]
    value = 0.0
    while value <= top:
        height = f"{y(value):.1f}"
        parts.append(
            f'<path class="grid" d="M{_LEFT} {height}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{_LEFT - 8}" y="{height}" dy="0.35em" text-anchor="end">'
            f"{size(round(value))}</text>"
        )
        value += step
    for at in _times(first, last):
        parts.append(
            f'<text x="{x(at):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">'
            f"{_label(at, last - first)}</text>"
        )
    line = "L".join(f"{x(sample.at):.1f} {y(sample.used):.1f}" for sample in samples)
    base = f"{y(0):.1f}"
    parts.append(f'<path class="area" d="M{x(first):.1f} {base}L{line}L{x(last):.1f} {base}Z"/>')
    parts.append(f'<path class="line" d="M{line}"/>')
    if quota is not None:
        limit = y(quota)
        parts.append(
            f'<path class="limit" d="M{_LEFT} {limit:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{_WIDTH - _RIGHT}" y="{limit - 4:.1f}" text-anchor="end">quota</text>'
        )
    return "".join([*parts, "</svg>"])


def _step(highest: int) -> int:
    """Bytes between two lines: 1, 2 or 5 of a binary unit (or 10, 20, …), three to six of them."""
    unit = 1
    while highest >= 1024 * unit:
        unit *= 1024
    rough = max(highest / unit / 5, 1 / 5)
    power = 10.0 ** math.floor(math.log10(rough))
    factor = next(f for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    return max(1, round(factor * power * unit))


def _times(first: float, last: float) -> list[float]:
    count = 5
    return [first + (last - first) * (number + 0.5) / count for number in range(count)]


def _label(at: float, length: float) -> str:
    when = datetime.fromtimestamp(at, timezone.utc)
    return when.strftime("%H:%M" if length < 2 * _DAY else "%b %d")
