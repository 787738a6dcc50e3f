"""The store against zstd and restic: the image of a process that holds data, half compressible."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.report import Row, criu
from jupyter_gpu_ckpt.capture.pagemap import page_files
from jupyter_gpu_ckpt.store import Layout, StateMeta, StateStore
from tests.harness.client import wait_for
from tests.harness.memory import peak_memory

KERNEL = "bench"
OWNER = "bench"
#: Holds `size` GiB: noise, and whole numbers below 1,000, as tables have them. On SIGUSR1 it
#: changes a byte in one page of a hundred, at random.
HOLD = """
import signal, sys
from pathlib import Path
import numpy as np
size, said = float(sys.argv[1]), Path(sys.argv[2])
rng = np.random.default_rng(0)
half = max(1, round(size * 8))
data = [rng.integers(0, 1000, 8 << 20) for _ in range(half)]
data += [rng.standard_normal(8 << 20) for _ in range(half)]
def change(*_):
    for array in data:
        raw = array.view(np.uint8)
        pages = len(raw) >> 12
        at = rng.choice(pages, pages // 100, replace=False) * 4096
        raw[at + rng.integers(0, 4096, len(at))] ^= 255
    said.write_text("changed")
signal.signal(signal.SIGUSR1, change)
said.write_text("ready")
while True:
    signal.pause()
"""


def measure(folder: Path, size: float, rounds: int) -> list[Row]:
    """Measure with `size` GiB of data, each side `rounds` times, in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    first, second = folder / "first", folder / "second"
    with _holder(folder, size) as pid:
        _dump(pid, first)
        (folder / "said").unlink()
        os.kill(pid, signal.SIGUSR1)
        _wait_for_word(folder, "changed")
        _dump(pid, second)
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, value in _ours(folder, first, second).items():
            ours.setdefault(name, []).append(value)
        for name, value in (_zstd(folder, first) | _restic(folder, first)).items():
            theirs.setdefault(name, []).append(value)
    bound = [float(264 << 20)] * rounds
    return [
        Row("first save to durable", "zstd -1 -T0", ours["save"], theirs["zstd"], "<= 1.1"),
        Row("save after 1% of pages changed", "first save", ours["again"], ours["save"], "<= 0.25"),
        Row("its stored bytes", "first save", ours["again bytes"], ours["bytes"], "<= 0.02", "MB"),
        Row("reading a state", "zstd -d -T0", ours["read"], theirs["unzstd"], "<= 1.11"),
        Row("first save to durable", "restic backup", ours["save"], theirs["backup"], "<= 0.33"),
        Row("to a folder", "restic restore", ours["extract"], theirs["restore"], "<= 0.33"),
        Row("stored bytes", "restic", ours["bytes"], theirs["restic bytes"], "<= 1.1", "MB"),
        Row("peak memory of a save", "256 MiB + 3%", ours["save peak"], bound, "<= 1.07", "MB"),
        Row("peak memory of a read", "256 MiB + 3%", ours["read peak"], bound, "<= 1.07", "MB"),
    ]  # fmt: skip


def _ours(folder: Path, first: Path, second: Path) -> dict[str, float]:
    root, out = folder / "store", folder / "out"
    for left in (root, out):
        shutil.rmtree(left, ignore_errors=True)
    saved = _child("save", root, first)
    read = _child("read", root)
    extracted = _child("extract", root, out)
    again = _child("save", root, second)
    return {
        "save": saved["seconds"], "bytes": saved["bytes"], "save peak": saved["peak"],
        "read": read["seconds"], "read peak": read["peak"], "extract": extracted["seconds"],
        "again": again["seconds"], "again bytes": again["bytes"],
    }  # fmt: skip


def _zstd(folder: Path, images: Path) -> dict[str, float]:
    packed = folder / "images.zst"
    packed.unlink(missing_ok=True)
    os.sync()
    pack = f"tar -C {images} -cf - . | zstd -q -1 -T0 -o {packed} && sync {packed}"
    return {
        "zstd": _time(["sh", "-c", pack]),
        "unzstd": _time(["sh", "-c", f"zstd -q -d -T0 -c {packed} > /dev/null"]),
    }


def _restic(folder: Path, images: Path) -> dict[str, float]:
    repository, out = folder / "restic", folder / "restic-out"
    for left in (repository, out):
        shutil.rmtree(left, ignore_errors=True)
    restic = ["restic", "-q", "--no-cache", "-r", str(repository)]
    environment = os.environ | {"RESTIC_PASSWORD": "benchmark"}
    subprocess.run([*restic, "init"], check=True, env=environment, capture_output=True)
    os.sync()
    backup = _time([*restic, "backup", str(images)], environment)
    size = sum(path.stat().st_size for path in repository.rglob("*") if path.is_file())
    os.sync()
    restore = _time([*restic, "restore", "latest", "--target", str(out)], environment)
    return {"backup": backup, "restic bytes": float(size), "restore": restore}


def _time(command: Sequence[str], environment: dict[str, str] | None = None) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return time.perf_counter() - began


@contextlib.contextmanager
def _holder(folder: Path, size: float) -> Iterator[int]:
    """Yield the PID of a process that holds the data."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(size), str(folder / "said")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for_word(folder, "ready")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _wait_for_word(folder: Path, word: str) -> None:
    said = folder / "said"
    wait_for(f"the process is {word}", lambda: said.exists() and said.read_text() == word, 300)


def _dump(pid: int, images: Path) -> None:
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir()
    subprocess.run(
        [criu(), "dump", "-t", str(pid), "-D", str(images), "--leave-running"],
        check=True,
        capture_output=True,
    )


def _child(*arguments: str | Path) -> dict[str, float]:
    """Run :func:`main` in a process of its own, so that its memory can be told."""
    os.sync()
    command = [sys.executable, "-m", "benchmarks.store", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main(what: str, root: Path, folder: Path | None = None) -> None:
    """Do one thing with the store and print its figures."""
    store = StateStore(root, OWNER)
    base = peak_memory()
    stored = 0
    began = time.perf_counter()
    if what == "save":
        assert folder is not None
        with store.begin(KERNEL) as writer:
            pages = page_files(folder)

            def layout(path: bytes) -> Layout | None:
                found = pages.get(os.fsdecode(path))
                return None if found is None else Layout(found.space, found.segments)

            writer.add_tree(folder, layout=layout)
            meta = StateMeta(
                kernel_id=KERNEL, kernel_name="python3", display_name="Python", language="python"
            )
            stored = writer.commit(meta).stored_size
    else:
        state = store.states(KERNEL)[0]
        with store.open(state.id) as reader:
            if what == "extract":
                assert folder is not None
                reader.extract(folder)
            else:
                for path, _ in reader.files():
                    with reader.stream(path) as pieces:
                        for _piece in pieces:
                            pass
    seconds = time.perf_counter() - began
    peak = peak_memory() - base
    print(json.dumps({"seconds": seconds, "peak": float(peak), "bytes": float(stored)}))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
