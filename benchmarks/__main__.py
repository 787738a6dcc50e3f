"""``python -m benchmarks [part ...]``: measure, print a table, write JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import hub, idle, many, overhead, recovery, start, states, store, wake
from benchmarks.report import Row, machine, table
from tests.harness.server import shared_folder

#: What can be measured by itself, in this order.
PARTS: dict[str, Callable[[Path, argparse.Namespace], list[Row]]] = {
    "states": lambda folder, options: [
        row
        for size in options.sizes
        for row in states.measure(folder / f"{size:g}", size, options.rounds)
    ],
    "store": lambda folder, options: store.measure(folder, options.store_size, options.rounds),
    "many": lambda folder, options: many.measure(folder),
    "recovery": lambda folder, options: recovery.measure(
        folder, options.recovery_size, options.rounds
    ),
    "wake": lambda folder, options: wake.measure(folder, options.rounds),
    "start": lambda folder, options: start.measure(options.rounds),
    "idle": lambda folder, options: idle.measure(folder),
    "hub": lambda folder, options: hub.measure(folder, options.rounds),
    "overhead": lambda folder, options: overhead.measure(folder, options.sets),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="part",
        help=f"what to measure: {', '.join(PARTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", type=float, nargs="*", default=[0.1, 1, 4], metavar="GIB",
        help="states: data held by the kernel, in GiB (default: 0.1 1 4)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=3,
        help="states, store, recovery, start, wake, hub: measurements of each (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--store-size", type=float, default=4, metavar="GIB",
        help="store: data, in GiB (default: 4)",
    )  # fmt: skip
    parser.add_argument(
        "--recovery-size", type=float, default=1, metavar="GIB",
        help="recovery: data of the notebook that is run again, in GiB (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--sets", type=int, default=overhead.SETS,
        help=f"overhead: sets of kernels; eight take a minute (default: {overhead.SETS})",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, default=Path("build/benchmarks.json"),
        help="where the figures go; those of other parts stay",
    )  # fmt: skip
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    if os.geteuid() != 0:
        parser.error("plain criu, which is compared with, needs root")
    # Ended by a signal it still removes its folder, and ends its servers.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    measured: dict[str, list[Row]] = {}
    with shared_folder("bench") as folder:
        for part in options.parts or PARTS:
            (folder / part).mkdir()
            measured[part] = PARTS[part](folder / part, options)
    about = machine()
    print("\n".join(f"{name}: {value}" for name, value in about.items()), end="\n\n")
    print(table([row for rows in measured.values() for row in rows]))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    for part, rows in measured.items():
        known[part] = {"machine": about, "rows": [row.as_dict() for row in rows]}
    options.json.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
