"""One comparison a row: ours, what it is compared with, and the ratio."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.intervals import Interval, interval

CRIU_CANDIDATES = ("/opt/jupyter-gpu-ckpt/criu/criu", "/usr/local/sbin/criu", "/usr/sbin/criu")


@dataclass(frozen=True)
class Row:
    """Measurements of one thing, in seconds, bytes or times, and the ratio that is allowed."""

    what: str
    other: str
    ours: list[float]
    theirs: list[float]
    limit: str
    unit: Literal["s", "MB", ""] = "s"
    #: So many rounds make one ratio: two where each side goes first in every second round, and
    #: it matters which does.
    rounds: int = 1

    @property
    def ratio(self) -> Interval:
        """Median of the ratios of measurements taken one right after the other."""
        ours, theirs = self._summed(self.ours), self._summed(self.theirs)
        return interval([[a / b] for a, b in zip(ours, theirs, strict=True)])

    def _summed(self, values: list[float]) -> list[float]:
        """The sums of each `rounds` values; too few for a sum at the end are left out."""
        starts = range(0, len(values) - self.rounds + 1, self.rounds)
        return [sum(values[at : at + self.rounds]) for at in starts]

    @property
    def verdict(self) -> str:
        """Whether the limit is met, as far as the measurements say: else empty."""
        parts = self.limit.split()
        if len(parts) == 2 and parts[0] == "<=":
            low, high = 0.0, float(parts[1])
        elif parts[1:2] == ["+-"]:
            low, high = float(parts[0]) - float(parts[2]), float(parts[0]) + float(parts[2])
        else:
            return ""
        ratio = self.ratio
        if low <= ratio.low and ratio.high <= high:
            return "met"
        return "not met" if ratio.high < low or ratio.low > high else "not resolved"

    def as_dict(self) -> dict[str, object]:
        return {
            "what": self.what, "other": self.other, "ours": self.ours, "theirs": self.theirs,
            "ratio": self.ratio.median, "interval": [self.ratio.low, self.ratio.high],
            "verdict": self.verdict, "limit": self.limit, "unit": self.unit,
        }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| what | ours | compared with | | ratio (95 %) | wanted | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, theirs = statistics.median(row.ours), statistics.median(row.theirs)
        if row.unit == "MB":
            ours, theirs = ours / 1e6, theirs / 1e6
        lines.append(
            f"| {row.what} | {ours:.3f} {row.unit} | {row.other} | {theirs:.3f} {row.unit} "
            f"| {row.ratio} | {row.limit} | {row.verdict} |"
        )
    return "\n".join(lines)


def criu() -> str:
    """Return the path of the CRIU that is compared with: the one that is used."""
    return next(path for path in CRIU_CANDIDATES if os.access(path, os.X_OK))


def machine() -> dict[str, str]:
    """Describe what the figures come from."""
    info = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
    )
    processor = next(v.strip() for k, v in info.items() if k.strip() == "model name")
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    system = platform.freedesktop_os_release()["PRETTY_NAME"]
    version = subprocess.run([criu(), "--version"], capture_output=True, text=True, check=True)
    return {
        "processor": f"{os.cpu_count()} x {processor}",
        "memory": f"{memory:.0f} GiB",
        "system": f"{system}, Linux {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "criu": version.stdout.split()[1],
    }
