"""``python -m benchmarks``: measure, print a table, write JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from benchmarks import idle, many, overhead, recovery, states, store
from benchmarks.report import Row, machine, table
from tests.harness.server import shared_folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--sizes", type=float, nargs="*", default=[0.1, 1, 4], metavar="GIB",
        help="data held by the kernel, in GiB (default: 0.1 1 4)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--no-overhead", action="store_true", help="leave out the running cost")
    parser.add_argument(
        "--store-size", type=float, default=4, metavar="GIB",
        help="data for the measurements of the store, in GiB; 0 leaves them out (default: 4)",
    )  # fmt: skip
    parser.add_argument(
        "--recovery-size", type=float, default=1, metavar="GIB",
        help="data of the notebook that is run again, in GiB; 0 leaves that out (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, default=Path("build/benchmarks.json"), help="where the figures go"
    )
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("plain criu, which is compared with, needs root")
    # Ended by a signal it still removes its folder, and ends its servers.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    rows: list[Row] = []
    with shared_folder("bench") as folder:
        for size in options.sizes:
            rows += states.measure(folder / f"{size:g}", size, options.rounds)
        if options.store_size:
            rows += store.measure(folder / "store", options.store_size, options.rounds)
            rows += many.measure(folder / "many")
        if options.recovery_size:
            rows += recovery.measure(folder / "recovery", options.recovery_size, options.rounds)
        if not options.no_overhead:
            rows += idle.measure(folder / "idle")
            rows += overhead.measure(folder / "overhead")
    about = machine()
    print("\n".join(f"{name}: {value}" for name, value in about.items()), end="\n\n")
    print(table(rows))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    figures = {"machine": about, "rows": [row.as_dict() for row in rows]}
    options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
