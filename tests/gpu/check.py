"""Checks saves and restores on a machine with a GPU, and prints a table: see ``run.sh``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.table import NotPossibleError, Table
from tests.native.driver import Capture, Kernel, binary, wait_until

REPOSITORY = Path(__file__).parents[2]
WORK = Path(__file__).with_name("work.py")


class Driver:
    """NVIDIA's functions on other processes, called by a process that may be left behind."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.simgpu.api"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, *request: Any) -> float:
        """Call a method of `tests.simgpu.api.Driver`; the seconds that it took."""
        assert self.process.stdin is not None and self.process.stdout is not None
        began = time.perf_counter()
        print(json.dumps([request[0], list(request[1:])]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        took = time.perf_counter() - began
        assert answer, "the process that calls the driver ended"
        code = json.loads(answer)[0]
        assert code == 0, f"{request[0]}: CUDA error {code}"
        return took

    def close(self) -> None:
        self.process.kill()


class Check(Table):
    """The rows of this machine."""

    def __init__(self, folder: Path, sizes: Sequence[float], **options: Any) -> None:
        super().__init__(**options)
        self.folder, self.sizes = folder, sizes
        self.gpu: dict[str, Any] = {}
        #: Why the driver cannot checkpoint, and why CRIU cannot capture; as the probe says.
        self.no_checkpoint: str | None = "kernel-capture does not work here"
        self.no_capture: str | None = self.no_checkpoint

    # -- what the steps have in common -------------------------------------------------

    def kernel(self, name: str, *arguments: object) -> Kernel:
        """``work.py`` under ``kernel-capture run``."""
        if not self.gpu:
            raise NotPossibleError("no GPU that works")
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        one = Kernel(
            folder,
            f"import runpy, sys\nsys.argv = {['work.py', *map(str, arguments)]!r}\n"
            f"runpy.run_path({str(WORK)!r}, run_name='__main__')\n",
        )

        def close() -> None:
            with contextlib.suppress(Exception):
                one.supervisor.send("kill")
            one.close()
            self.keep_logs(name, folder)
            shutil.rmtree(folder, ignore_errors=True)

        self.cleanup.callback(close)
        return one

    def check_capture(self) -> None:
        """Raise NotPossibleError where CRIU has not what it needs."""
        if self.no_capture is not None:
            raise NotPossibleError(self.no_capture)

    def intact(self, kernel: Kernel, digest: str) -> None:
        """Assert that the kernel computes with the same data from now on."""
        seen = len(kernel.lines())
        wait_until(lambda: len(kernel.lines()) > seen + 1, "the kernel goes on", 60)
        assert kernel.lines()[-1] == f"sum {digest}", "the device memory is another one"

    def holder(self, name: str, size: int) -> tuple[Kernel, str]:
        """A kernel that holds so much device memory, and what is in it."""
        kernel = self.kernel(name, "hold", size)
        line = wait_until(lambda: _line(kernel, "holds "), _said(kernel), 90)
        return kernel, line.split()[1]

    def size(self, gigabytes: float) -> int:
        """That much in bytes, if the machine has it."""
        size = int(gigabytes * 1e9)
        if not self.gpu:
            raise NotPossibleError("no GPU that works")
        if self.no_checkpoint is not None:
            raise NotPossibleError(self.no_checkpoint)
        if size > self.gpu["free"] * 0.9:
            raise NotPossibleError(f"the GPU has {self.gpu['free'] / 1e9:.1f} GB free")
        host = _available()
        if size * 1.2 + (1 << 30) > host and size > 1 << 28:
            raise NotPossibleError(f"the host has {host / 1e9:.1f} GB of memory free")
        return size

    # -- the steps -----------------------------------------------------------------------

    def probe(self) -> dict[str, Any]:
        self.facts["machine"] = {"kernel": os.uname().release, "python": sys.version}
        done = subprocess.run(
            [binary(), "probe"], capture_output=True, text=True, check=False, timeout=30
        )
        assert done.stdout, f"kernel-capture says nothing (status {done.returncode}): {done.stderr}"
        found = json.loads(done.stdout)
        self.facts["probe"] = found
        gpu = found["gpu"]
        self.no_capture = _in_words(found["problems"])
        if gpu is None:
            self.no_checkpoint = "libcuda.so.1 cannot be loaded"
        elif not gpu["checkpoint"]:
            self.no_checkpoint = _in_words(found["notes"]) or "the driver cannot checkpoint"
        else:
            self.no_checkpoint = None
        if lacks := [why for why in (self.no_checkpoint, self.no_capture) if why]:
            raise NotPossibleError("; ".join(lacks))
        said = [name for name in ("checkpoint", "gpu_map", "custom_storage") if gpu[name]]
        criu = found["criu"]["version"]
        return {"note": f"driver {gpu['driver']}, can {', '.join(said)}; CRIU {criu}"}

    def copy(self) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, WORK, "info"], capture_output=True, text=True, check=False, timeout=90
        )
        if done.returncode:
            why = done.stderr.strip().rpartition("\n")[2]
            raise NotPossibleError(f"no GPU can be used: {why}")
        self.gpu = json.loads(done.stdout.strip().rpartition("\n")[2])
        self.facts["gpu"] = self.gpu
        note = f"{self.gpu['name']}, {self.gpu['free'] / 1e9:.2f} GB free; {self.gpu['work']}"
        return {"speed": self.gpu["copy_speed"], "note": note}

    def disk(self) -> dict[str, Any]:
        size = min(1 << 30, int(max(self.sizes) * 1e9), shutil.disk_usage(self.folder).free // 4)
        path, block = self.folder / "disk", os.urandom(min(size, 1 << 24))
        began = time.perf_counter()
        with open(path, "wb") as file:
            for _ in range(max(1, size // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - began
        path.unlink()
        return {"speed": size / took, "note": f"{size / 1e9:.3f} GB with fsync"}

    def cycle(self, gigabytes: float) -> dict[str, Any]:
        size = self.size(gigabytes)
        kernel, digest = self.holder(f"cycle-{gigabytes:g}", size)
        driver = Driver()
        self.cleanup.callback(driver.close)
        took = {"lock": driver.call("lock", kernel.pid, 30_000)}
        for step in ("checkpoint", "restore", "unlock"):
            took[step] = driver.call(step, kernel.pid)
        self.intact(kernel, digest)
        note = ", ".join(f"{step} {seconds:.3f} s" for step, seconds in took.items())
        return {"speed": size / took["checkpoint"], "took": took, "note": note}

    def park(self) -> dict[str, Any]:
        size = self.size(self.sizes[0])
        kernel, digest = self.holder("park", size)
        took, released = {}, 0
        for what in ("park", "unpark"):
            capture = Capture(what, "--pid", str(kernel.pid))
            self.cleanup.callback(capture.close)
            began = time.perf_counter()
            event = capture.finish(90)
            took[what] = time.perf_counter() - began
            assert event["event"] == "done", event
            if what == "park":
                released = sum(one["released_bytes"] or 0 for one in event["gpu"]["gpus"])
                assert released >= size, f"only {released} bytes became free"
        self.intact(kernel, digest)
        note = f"park {took['park']:.3f} s, unpark {took['unpark']:.3f} s, {released} bytes freed"
        return {"speed": size / took["park"], "took": took, "note": note}

    def files(self) -> dict[str, Any]:
        """Device memory straight into files (custom storage): save, kill, restore."""
        self.check_capture()
        if not (self.facts.get("probe", {}).get("gpu") or {}).get("custom_storage"):
            raise NotPossibleError("the driver does not offer custom storage")
        size = self.size(self.sizes[0])
        kernel, digest = self.holder("files", size)
        began = time.perf_counter()
        saved = kernel.save("--gpu-to-store")
        saving = time.perf_counter() - began
        gpu = saved["gpu"]
        assert gpu["problem"] is None, gpu["problem"]
        assert all(one["stored"] for one in gpu["processes"]), "it went through the host's memory"
        self.intact(kernel, digest)
        kernel.kill()
        began = time.perf_counter()
        kernel.restore().expect("restored", 90)
        took = {"save": saving, "checkpoint": gpu["checkpoint_s"], "back": gpu["restore_s"]}
        took["restore"] = time.perf_counter() - began
        self.intact(kernel, digest)
        note = ", ".join(f"{step} {seconds:.3f} s" for step, seconds in took.items())
        return {"speed": size / took["checkpoint"], "took": took, "note": note}

    def training(self) -> dict[str, Any]:
        """Save, kill, restore in the middle of a training; a second one is not interrupted."""
        self.check_capture()
        size = self.size(self.sizes[0])
        kernel = self.kernel("train", "train", size)
        wait_until(lambda: _line(kernel, "step 5 "), _said(kernel), 90)
        began = time.perf_counter()
        saved = kernel.save()
        saving = time.perf_counter() - began
        later = len(_steps(kernel)) + 20
        wait_until(lambda: len(_steps(kernel)) >= later, "it trains on after the save", 60)
        kernel.kill()
        before = _steps(kernel)
        began = time.perf_counter()
        kernel.restore().expect("restored", 120)
        restoring = time.perf_counter() - began
        wait_until(lambda: len(_steps(kernel)) >= len(before) + 30, "it trains on", 60)
        after = _steps(kernel)[len(before) :]
        whole = subprocess.run(
            [sys.executable, WORK, "train", "8", str(len(before) + len(after))],
            capture_output=True,
            text=True,
            check=True,
            timeout=90,
        )
        reference = [line for line in whole.stdout.splitlines() if line.startswith("step ")]
        assert before == reference[: len(before)], "the run before the kill differs"
        first = int(after[0].split()[1])
        assert 5 < first < len(before), f"it goes on at step {first}"
        assert after == reference[first : first + len(after)], "the restored run differs"
        took = {"save": saving, "frozen": saved["frozen_s"], "restore": restoring}
        took["blocked"] = saved["gpu"]["blocked_s"]
        note = ", ".join(f"{step} {seconds:.3f} s" for step, seconds in took.items())
        note += f"; {len(after)} restored steps are equal, bit by bit"
        return {"speed": saved["image_bytes"] / saving, "took": took, "note": note}

    def cell(self) -> dict[str, Any]:
        """Jupyter: a save in the middle of a cell that trains, then the kernel is killed."""
        if not self.gpu:
            raise NotPossibleError("no GPU that works")
        if self.no_checkpoint is not None:
            raise NotPossibleError(self.no_checkpoint)
        self.check_capture()
        for name in ("jupyter_server", "ipykernel", "requests", "websocket", "psutil"):
            if importlib.util.find_spec(name) is None:
                raise NotPossibleError(f"Python has no {name}")
        from tests.harness.client import wait_for
        from tests.harness.server import Home, JupyterServer

        self.cleanup.callback(self.keep_logs, "jupyter", self.folder / "home")
        server = self.cleanup.enter_context(
            JupyterServer(
                Home(self.folder / "home"),
                environment={
                    name: value
                    for name, value in os.environ.items()
                    if name.startswith(("LD_", "CUDA_", "GPU_CHECK_", "SIMGPU_"))
                },
            )
        )
        client = server.client
        kernel = client.start(server.home.add_notebook("training.ipynb"))
        kernel.run(
            f"import sys, time; sys.path.insert(0, {str(REPOSITORY)!r})\n"
            "from tests.gpu.work import Training, make\ntraining, lines = Training(make()), []",
            timeout=90,
        )
        pid, enough = kernel.pid, self.folder / "enough"
        cell = kernel.begin(
            "import os\nfor _ in range(10**6):\n"
            f"    if os.path.exists({str(enough)!r}): break\n"
            "    lines.append(training.step())\n    print(lines[-1], flush=True)\n"
            "    time.sleep(0.02)"
        )
        wait_for("the training begins", lambda: cell.text.count("\n") > 5, 60)
        began = time.perf_counter()
        client.save(kernel, timeout=90)
        saving = time.perf_counter() - began
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        count = cell.text.count("\n") + 20  # more than may have been on its way
        wait_for("the restored kernel trains on", lambda: cell.text.count("\n") > count, 60)
        ended = time.perf_counter() - began
        enough.touch()
        cell.finish()
        lines = json.loads(kernel.run("import json; print(json.dumps(lines))"))
        assert len(lines) < cell.text.count("\n"), "no step was done twice: it was not restored"
        whole = [sys.executable, str(WORK), "train", "8", str(len(lines))]
        work = subprocess.run(whole, capture_output=True, text=True, check=True, timeout=90)
        reference = [line for line in work.stdout.splitlines() if line.startswith("step ")]
        assert lines == reference, "the restored training differs from an uninterrupted one"
        note = (
            f"save {saving:.3f} s; 20 steps after the kill in {ended:.3f} s; {len(lines)} are equal"
        )
        return {"took": {"save": saving, "back": ended}, "note": note}

    def all(self) -> None:
        """Every row."""
        print("| what | result | time | speed | |\n|---|---|---|---|---|", flush=True)
        self.row("probe", 30, self.probe)
        self.row("plain copy, device to host", 90, self.copy)
        self.row("plain write to the disk", 40, self.disk)
        for size in self.sizes:
            name = f"lock, checkpoint, restore, unlock: {size:g} GB"
            self.row(name, 75, functools.partial(self.cycle, size))
        self.row("training: save, kill, restore", 100, self.training)
        self.row("park, unpark", 60, self.park)
        self.row("straight into files: save, kill, restore", 75, self.files)
        self.row("Jupyter: save in the middle of a cell, kill, restore", 100, self.cell)


def _in_words(findings: Sequence[dict[str, Any]]) -> str | None:
    """What ``probe`` found, with what to do; ``None``: nothing."""
    return "; ".join(f"{one['message']} {one['hint'] or ''}".strip() for one in findings) or None


def _line(kernel: Kernel, beginning: str) -> str | None:
    return next((line for line in kernel.lines() if line.startswith(beginning)), None)


def _steps(kernel: Kernel) -> list[str]:
    return [line for line in kernel.lines() if line.startswith("step ")]


def _said(kernel: Kernel) -> str:
    return f"the work begins; it says: {kernel.lines()[-3:]}"


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    """Exit status: 0, or 1 where a row failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="1,10,40", help="device memory in GB, smallest first")
    parser.add_argument("--seconds", type=float, default=320, help="for everything")
    parser.add_argument("--json", type=Path, help="where the rows are written too")
    parser.add_argument(
        "--only", default="", help="rows with this in their name, and the first two"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    sizes = [float(size) for size in options.sizes.split(",")]
    check = Check(folder, sizes, seconds=options.seconds, json_path=options.json, only=options.only)
    try:
        check.all()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(any(row["verdict"] == "failed" for row in check.rows))


if __name__ == "__main__":
    sys.exit(main())
