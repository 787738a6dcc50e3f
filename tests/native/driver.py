"""Drives `kernel-capture` the way the Python side does: events from stdout, commands to stdin."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jupyter_gpu_ckpt

Event = dict[str, Any]


def binary() -> Path:
    """The program under test: the one the package carries."""
    path = Path(
        os.environ.get(
            "KERNEL_CAPTURE", Path(jupyter_gpu_ckpt.__file__).parent / "bin" / "kernel-capture"
        )
    )
    assert path.is_file(), f"build {path} first (make dev)"
    return path


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 20) -> Any:
    """Wait until `condition` gives something true, which is returned."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.01)


class Capture:
    """One running `kernel-capture`."""

    def __init__(
        self,
        *args: str | os.PathLike[str],
        pass_fds: Sequence[int] = (),
        program: Path | None = None,
        **kwargs: Any,
    ) -> None:
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [str(program or binary()), *(os.fspath(arg) for arg in args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            **kwargs,
        )
        self.events: list[Event] = []
        self._queue: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def expect(self, name: str, timeout: float = 30) -> Event:
        """The next event of that name; events before it are only recorded."""
        deadline = time.monotonic() + timeout
        while True:
            event = self._queue.get(timeout=max(deadline - time.monotonic(), 0.01))
            assert event is not None, f"no {name!r} event, only {self.events}"
            self.events.append(event)
            if event["event"] == name:
                return event
            assert event["event"] != "error", event

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self, timeout: float = 30) -> int:
        return self.process.wait(timeout)

    def finish(self, timeout: float = 60) -> Event:
        """Wait for the end and return the last event."""
        self.process.wait(timeout)
        self._reader.join(timeout)
        while (event := self._queue.get(timeout=1)) is not None:
            self.events.append(event)
        return self.events[-1]

    def close(self) -> None:
        if self.process.poll() is None:
            self.hang_up()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(15)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Kernel:
    """A program under `kernel-capture run`, whose output lines can be waited for."""

    def __init__(
        self,
        folder: Path,
        source: str,
        *,
        env: dict[str, str] | None = None,
        command: Sequence[str] = (sys.executable, "-u"),
        **kwargs: Any,
    ) -> None:
        self.folder = folder
        self.kwargs = kwargs
        self.captures: list[Capture] = []
        self.log = folder / "kernel.log"
        self.images = folder / "images"
        self.images.mkdir(mode=0o700, exist_ok=True)
        script = folder / "program.py"
        script.write_text(source)
        read, write = os.pipe()
        content = os.environ if env is None else env
        os.write(write, b"".join(f"{k}={v}\0".encode() for k, v in content.items()))
        os.close(write)
        self.supervisor = Capture(
            "run",
            "--log",
            self.log,
            "--env-fd",
            str(read),
            "--",
            *command,
            script,
            pass_fds=[read],
            cwd=folder,
            **kwargs,
        )
        os.close(read)
        self.pid: int = self.supervisor.expect("started")["pid"]

    def lines(self) -> list[str]:
        """The lines of the log that are whole."""
        return self.log.read_text().split("\n")[:-1] if self.log.exists() else []

    def wait_line(self, text: str, timeout: float = 20) -> str:
        found: str = wait_until(
            lambda: next((line for line in self.lines() if text in line), None),
            f"{text!r} in {self.lines()[-20:]}",
            timeout,
        )
        return found

    def runs_on(self) -> None:
        """Assert that new output lines keep coming."""
        count = len(self.lines())
        wait_until(lambda: len(self.lines()) > count + 2, "new output")

    def dump(self, *extra: str | os.PathLike[str], pid: int | None = None) -> Capture:
        self.captures.append(
            Capture(
                "dump",
                "--pid",
                str(pid or self.pid),
                "--images-dir",
                self.images,
                *extra,
                **self.kwargs,
            )
        )
        return self.captures[-1]

    def save(self, *extra: str | os.PathLike[str]) -> Event:
        event = self.dump(*extra).finish()
        assert event["event"] == "done", event
        return event

    def pids(self) -> list[int]:
        return [int(path.name[5:-4]) for path in self.images.glob("core-*.img")]

    def kill(self) -> int:
        self.supervisor.send("kill")
        return self.supervisor.wait()

    def restore(self, *extra: str) -> Capture:
        """Restore and take the new supervisor for this kernel's; the caller reads `restored`."""
        pids = self.folder / "pids"
        pids.write_text("\n".join(map(str, self.pids())))
        self.captures.append(self.supervisor)
        self.supervisor = Capture(
            "restore", "--images-dir", self.images, "--pids-file", pids, *extra, **self.kwargs
        )
        return self.supervisor

    def close(self) -> None:
        for capture in [*self.captures, self.supervisor]:
            capture.close()


def state(pid: int) -> str:
    """One letter of /proc/PID/stat, or "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def status(pid: int) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {key: value.strip() for key, value in pairs}


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir(mode=0o700)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", folder], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def disk(folder: Path, size: int, really: int = 0) -> Iterator[Path]:
    """A file system of so many MiB; of fewer than it says where `really` is given."""
    folder.mkdir(mode=0o700)
    with tmpfs(folder / "below", f"{really}m" if really else "100%") as below:
        image = below / "image"
        with open(image, "wb") as file:
            file.truncate(size << 20)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
        mounted = folder / "mounted"
        mounted.mkdir()
        subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
        try:
            mounted.chmod(0o700)
            yield mounted
        finally:
            subprocess.run(["umount", mounted], check=True)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)


def send_signal(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
