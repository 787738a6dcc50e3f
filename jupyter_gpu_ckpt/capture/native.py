"""Runs ``kernel-capture``: finding it, ``probe``, ``dump``, ``park`` and ``unpark``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ..errors import CkptError
from ..gpus.inventory import CudaProcess, GpuUse
from .conversation import Conversation, uncancelled
from .explain import explain
from .files import discard_links
from .gpu_words import Move, move_error
from .protocol import MAX_LINE, DumpResult, Probe, dump_result, parse_event

T = TypeVar("T")

_PLACES: Final = (
    Path(__file__).parent.parent / "bin" / "kernel-capture",
    Path("/usr/local/libexec/kernel-capture"),
    Path("/usr/libexec/kernel-capture"),
)


def find_kernel_capture(configured: str | None = None) -> Path | None:
    """Path of the ``kernel-capture`` to run, or ``None`` where there is none.

    Parameters
    ----------
    configured
        The path from the configuration: if given, nothing else is tried. Otherwise the
        copy in the package, then the system's. ``$PATH`` plays no part.
    """
    for place in (Path(configured),) if configured else _PLACES:
        if place.is_file() and os.access(place, os.X_OK):
            return place
    return None


def native_environment() -> dict[str, str]:
    """The environment of ``kernel-capture`` itself: nothing that could steer it."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}


class KernelCapture:
    """The ``kernel-capture`` program of this node.

    Parameters
    ----------
    path
        From :func:`find_kernel_capture`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    async def probe(self, timeout: float = 10) -> Probe:
        """What this node can capture; called by ``doctor`` and before operations.

        Parameters
        ----------
        timeout
            Seconds.

        Raises
        ------
        CkptError
            ``cannot_capture`` when the program cannot be run or gives no sensible answer.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                self.path,
                "probe",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=native_environment(),
                limit=MAX_LINE,
            )
        except OSError as error:
            raise self._cannot_run(str(error)) from error
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout)
        except asyncio.TimeoutError as error:
            raise self._cannot_run(f"no answer within {timeout:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        for line in out.splitlines():
            event = parse_event(line)
            if event is not None and event["event"] == "probe":
                try:
                    return msgspec.convert(event, Probe)
                except msgspec.ValidationError as error:
                    raise self._cannot_run(str(error)) from error
        raise self._cannot_run(err.decode(errors="replace")[-2000:] or "no answer")

    def _cannot_run(self, details: str) -> CkptError:
        return CkptError(
            "cannot_capture",
            "The program that saves kernels (kernel-capture) does not work here.",
            hint="Reinstall jupyter-gpu-ckpt, or ask your administrator to run "
            "'jupyter gpu-ckpt doctor'.",
            details=f"{self.path}: {details}",
        )

    async def dump(
        self,
        pid: int,
        images_dir: Path,
        *,
        timeout: float,
        ghost_limit: int,
        window_dirs: Sequence[str] = (),
        on_window: Callable[[], None] | None = None,
        progress: Callable[[float], None] | None = None,
        on_gpu: Callable[[bool], None] | None = None,
        cancel: asyncio.Event | None = None,
        window_timeout: float = 60.0,
        gpu_timeout: float = 30.0,
        gpu_to_store: bool = False,
        parked: Sequence[CudaProcess] | None = None,
    ) -> DumpResult:
        """Write the tree below ``pid`` to ``images_dir``; the kernel runs on, whatever happens.

        Called by the keeper. Cancelling the awaiting task undoes the dump like ``cancel``.

        Parameters
        ----------
        pid
            The kernel's process id.
        images_dir
            An empty directory, mode 0700.
        timeout
            Seconds until the dump is undone.
        ghost_limit
            Largest deleted but open file that is carried, bytes.
        window_dirs
            Node-local directories: if the tree holds anything below them it is kept stopped
            after the dump until ``on_window`` has run.
        on_window
            Called in a thread, at most once, while the tree stands still. What it raises
            fails the dump and is raised here.
        progress
            Called with a fraction from 0 to 1.
        on_gpu
            Called with whether the end of the kernel's work on a GPU is waited for, at each second
            of that and when it is over. What it raises fails the dump and is raised here.
        cancel
            Set it to undo the dump.
        window_timeout
            Longest time the tree is kept stopped for ``on_window``, seconds.
        gpu_timeout
            Seconds that are waited at most for the end of what the kernel has running on a GPU.
        gpu_to_store
            Whether its GPU memory goes into files where the driver offers that.
        parked
            Where its park has put the memory of its processes; ``None``: it is not parked. Of
            such a kernel, memory that is not on its GPU is lost, and the dump fails.

        Raises
        ------
        CkptError
            ``cancelled``, ``timeout``, ``no_space``, ``not_savable``, ``cannot_capture``,
            ``busy`` (the work on a GPU did not end), ``dump_failed`` or ``internal``; see
            :mod:`.explain`.
        """
        command = [str(self.path), "dump", "--pid", str(pid), "--images-dir", str(images_dir)]
        command += ["--timeout", f"{timeout:.3f}", "--ghost-limit", str(ghost_limit)]
        for directory in window_dirs:
            command += ["--window-dir", directory]
        command += ["--window-timeout", f"{window_timeout:.3f}"]
        command += ["--gpu-timeout", f"{gpu_timeout:.3f}"]
        command += ["--gpu-to-store"] if gpu_to_store else []
        command += ["--parked"] if parked is not None else []
        process, explained = await self._start(command), partial(explain, doing="save")
        conversation = Conversation(
            process, explained, on_window, progress, on_gpu, timeout + gpu_timeout
        )
        done = False
        try:
            event = await conversation.run(cancel, timeout + window_timeout)
            result = _understood(lambda: dump_result(event, parked or ()))
            done = True
        finally:
            await uncancelled(conversation.finish())
            if not done:
                discard_links(images_dir)
        return result

    async def move_gpu(
        self,
        what: Move,
        pid: int,
        *,
        timeout: float,
        gpu_timeout: float,
        needs: Mapping[str, int] | None = None,
        on_gpu: Callable[[bool], None] | None = None,
        cancel: asyncio.Event | None = None,
    ) -> GpuUse | None:
        """Move the GPU memory of the tree below ``pid`` to host memory (``park``), or back.

        Where that fails, the kernel is as it was before.

        Parameters
        ----------
        what
            ``park`` or ``unpark``.
        pid
            The kernel's process id.
        timeout
            Seconds that it may take.
        gpu_timeout
            Seconds that a park waits for the end of what runs on a GPU, and an unpark for room.
        needs
            Bytes that must be free on each GPU (UUID) before an unpark is tried.
        on_gpu
            As for :meth:`dump`; it must not raise.
        cancel
            Set it to undo a park.

        Returns
        -------
        GpuUse or None
            What was moved; ``None``: the tree has nothing on a GPU.

        Raises
        ------
        CkptError
            See :func:`~jupyter_gpu_ckpt.capture.gpu_words.move_error`.
        """
        command = [str(self.path), what, "--pid", str(pid)]
        command += ["--timeout", f"{timeout:.3f}", "--gpu-timeout", f"{gpu_timeout:.3f}"]
        for uuid, size in (needs or {}).items():
            command += ["--gpu-need", f"{uuid}={size}"]
        process, explained = await self._start(command), partial(move_error, what)
        conversation = Conversation(process, explained, None, None, on_gpu, timeout + gpu_timeout)
        try:
            event = await conversation.run(cancel, timeout)
        finally:
            await uncancelled(conversation.finish())
        return _understood(lambda: msgspec.convert(event.get("gpu"), GpuUse | None))

    async def _start(self, command: Sequence[str]) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=native_environment(),
                limit=MAX_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise self._cannot_run(str(error)) from error


def _understood(read: Callable[[], T]) -> T:
    try:
        return read()
    except msgspec.ValidationError as error:
        raise CkptError(
            "internal",
            "The program that saves kernels gave an odd answer. The kernel runs on.",
            hint="Try again. If that happens each time, reinstall jupyter-gpu-ckpt.",
            details=str(error),
        ) from error
