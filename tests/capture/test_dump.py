"""A dump is a transaction: the kernel runs on, whatever happens."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capture.native import KernelCapture, find_kernel_capture
from jupyter_gpu_ckpt.errors import CkptError

from .conftest import RunningKernel, finish

#: Takes longer than the 0.2 s after which the first progress is told.
_LARGE = "import numpy; data = numpy.ones(600 << 17)"


async def _dump(kernel: RunningKernel, folder: Path, **options: object) -> None:
    folder.mkdir(mode=0o700)
    arguments = {"timeout": 60, "ghost_limit": 1 << 20, **options}
    capture = KernelCapture(kernel.kernel_capture)
    await capture.dump(kernel.pid, folder, **arguments)  # type: ignore[arg-type]


def test_find_kernel_capture(kernel_capture: Path, tmp_path: Path) -> None:
    assert find_kernel_capture(str(kernel_capture)) == kernel_capture
    assert find_kernel_capture(str(tmp_path / "missing")) is None, "nothing else is tried"
    (tmp_path / "text").write_text("")
    assert find_kernel_capture(str(tmp_path / "text")) is None


def test_probe_of_what_is_no_kernel_capture(tmp_path: Path) -> None:
    for path in ("/bin/true", "/bin/false", str(tmp_path / "missing")):
        with pytest.raises(CkptError) as caught:
            finish(KernelCapture(Path(path)).probe())
        assert caught.value.reason == "cannot_capture"


def test_progress_rises_to_the_end(kernel: RunningKernel) -> None:
    kernel.run(_LARGE)
    seen: list[float] = []
    kernel.dump(progress=seen.append)
    assert seen == sorted(seen)
    assert all(0 <= part <= 1 for part in seen)


def test_cancel(kernel: RunningKernel, tmp_path: Path) -> None:
    kernel.run(_LARGE)

    async def cancelled() -> None:
        cancel = asyncio.Event()
        await _dump(kernel, tmp_path / "a", cancel=cancel, progress=lambda part: cancel.set())

    with pytest.raises(CkptError) as caught:
        finish(cancelled())
    assert caught.value.reason == "cancelled"
    assert kernel.run("print(data.nbytes)") == f"{600 << 20}\n"


def test_a_cancelled_task_undoes_the_dump(kernel: RunningKernel, tmp_path: Path) -> None:
    kernel.run(_LARGE)

    async def abandoned() -> None:
        started = asyncio.Event()
        task = asyncio.ensure_future(
            _dump(kernel, tmp_path / "a", progress=lambda part: started.set())
        )
        await asyncio.wait_for(started.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    finish(abandoned())
    assert kernel.run("print(data.nbytes)") == f"{600 << 20}\n"


def test_deadline(kernel: RunningKernel, tmp_path: Path) -> None:
    kernel.run("import numpy; data = numpy.ones(600 << 17)")
    began = time.monotonic()
    with pytest.raises(CkptError) as caught:
        finish(_dump(kernel, tmp_path / "a", timeout=0.2))
    assert caught.value.reason == "timeout"
    assert time.monotonic() - began < 20
    assert kernel.run("print(data.nbytes)") == f"{600 << 20}\n"


def test_a_failure_in_the_window_fails_the_save(kernel: RunningKernel, tmp_path: Path) -> None:
    def fail() -> None:
        raise CkptError("not_savable", "Too large.")

    kernel.run(f"file = open({str(tmp_path / 'open')!r}, 'w')")
    with pytest.raises(CkptError, match=r"Too large\."):
        finish(_dump(kernel, tmp_path / "a", window_dirs=[str(tmp_path)], on_window=fail))
    assert kernel.run("print(file.write('x'))") == "1\n"


def test_an_undone_dump_leaves_no_links(kernel: RunningKernel, tmp_path: Path) -> None:
    """Else the next dump of the kernel would fail."""
    folder = tmp_path / "local"
    folder.mkdir()
    kernel.run(
        f"import os; file = open({str(folder / 'a')!r}, 'w')\n"
        f"os.link({str(folder / 'a')!r}, {str(folder / 'b')!r}); os.unlink({str(folder / 'a')!r})"
    )

    def fail() -> None:
        assert list(folder.glob("link_remap.*")), "the case is not what it should be"
        raise CkptError("cancelled", "Cancelled.")

    for attempt in ("first", "second"):
        with pytest.raises(CkptError, match="Cancelled"):
            finish(_dump(kernel, tmp_path / attempt, window_dirs=[str(folder)], on_window=fail))
        assert [path.name for path in folder.iterdir()] == ["b"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)", "network socket"),
        ("ctypes.CDLL(None).syscall(323, 1)", "userfaultfd"),
        ("ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(256))", "io_uring"),
        ("os.pidfd_open(1)", "process 1, which is not its own"),
        ("subprocess.Popen(['unshare', '-pf', 'sleep', '100'])", "sandbox"),
        ("ghost()", "deleted file"),
    ],
)
def test_what_criu_refuses_is_named(kernel: RunningKernel, code: str, words: str) -> None:
    kernel.run(
        f"""
import ctypes, os, socket, subprocess, tempfile, time
def ghost():
    file = tempfile.TemporaryFile(dir={str(kernel.folder)!r})
    file.write(bytes(2 << 20)); file.flush()
    return file
held = {code}
while isinstance(held, subprocess.Popen) and not os.listdir(f"/proc/{{held.pid}}/task"):
    pass
while isinstance(held, subprocess.Popen) and \\
        not open(f"/proc/{{held.pid}}/task/{{held.pid}}/children").read():
    time.sleep(.01)
"""
    )
    with pytest.raises(CkptError, match=words) as caught:
        kernel.dump(ghost_limit=1 << 20)
    assert caught.value.reason == "not_savable"
    assert caught.value.hint
    assert "criu" in str(caught.value.details)
    assert kernel.run("print('alive')") == "alive\n"


def test_a_program_outside_that_is_connected_is_named(
    kernel: RunningKernel, tmp_path: Path
) -> None:
    path = str(tmp_path / "service")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        kernel.run(f"import socket; c = socket.socket(socket.AF_UNIX); c.connect({path!r})")
        with server.accept()[0], pytest.raises(CkptError, match=path) as caught:
            kernel.dump()
    assert caught.value.reason == "not_savable"


def test_several_kernels_at_once(start_kernel: Callable[..., RunningKernel]) -> None:
    kernels = [start_kernel(), start_kernel()]
    for number, kernel in enumerate(kernels):
        kernel.run(f"x = {number}")

    async def both() -> None:
        await asyncio.gather(*(_dump(kernel, kernel.folder / "images-both") for kernel in kernels))

    finish(both())
    for number, kernel in enumerate(kernels):
        kernel.kill()
        kernel.restore(kernel.folder / "images-both")
        assert kernel.run("print(x)") == f"{number}\n"
