"""One comparison a row: ours, what it is compared with, and the ratio."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CRIU_CANDIDATES = ("/opt/jupyter-gpu-ckpt/criu/criu", "/usr/local/sbin/criu", "/usr/sbin/criu")


@dataclass(frozen=True)
class Row:
    """Measurements of one thing, in seconds or bytes, and the ratio that is allowed."""

    what: str
    other: str
    ours: list[float]
    theirs: list[float]
    limit: str
    unit: Literal["s", "MB"] = "s"

    @property
    def ratio(self) -> float:
        """Median of the ratios of measurements taken one right after the other."""
        return statistics.median(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    def as_dict(self) -> dict[str, object]:
        return {
            "what": self.what, "other": self.other, "ours": self.ours, "theirs": self.theirs,
            "ratio": self.ratio, "limit": self.limit, "unit": self.unit,
        }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| what | ours | compared with | | ratio | wanted |", "|---|---|---|---|---|---|"]
    for row in rows:
        ours, theirs = statistics.median(row.ours), statistics.median(row.theirs)
        if row.unit == "MB":
            ours, theirs = ours / 1e6, theirs / 1e6
        lines.append(
            f"| {row.what} | {ours:.3f} {row.unit} | {row.other} | {theirs:.3f} {row.unit} "
            f"| {row.ratio:.3f} | {row.limit} |"
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
