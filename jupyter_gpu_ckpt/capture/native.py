"""Runs ``kernel-capture``: finding it, ``probe``, ``dump``, ``park`` and ``unpark``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from ..errors import CkptError
from ..gpus.inventory import GpuUse
from .explain import explain
from .files import discard_links
from .gpu_words import Move, move_error
from .protocol import MAX_LINE, DumpResult, Probe, dump_result, parse_event

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that ``kernel-capture`` gets to undo a dump before it is ended; its guard thaws the tree.
UNDO_GRACE: Final = 30.0

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
        cancel: asyncio.Event | None = None,
        window_timeout: float = 60.0,
        gpu_timeout: float = 30.0,
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
        cancel
            Set it to undo the dump.
        window_timeout
            Longest time the tree is kept stopped for ``on_window``, seconds.
        gpu_timeout
            Longest time that is waited for the end of what the kernel has running on a GPU,
            seconds.

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
        process = await self._start(command)
        transaction = _Transaction(process, _explain_save, on_window, progress)
        done = False
        try:
            event = await transaction.run(cancel, timeout + window_timeout + UNDO_GRACE)
            result = _understood(lambda: dump_result(event))
            done = True
        finally:
            await _uncancelled(transaction.finish())
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
        transaction = _Transaction(
            await self._start(command), lambda event: move_error(what, event), None, None
        )
        try:
            event = await transaction.run(cancel, timeout + UNDO_GRACE)
        finally:
            await _uncancelled(transaction.finish())
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


def _explain_save(event: dict[str, Any]) -> CkptError:
    return explain(event, doing="save")


def _understood(read: Callable[[], T]) -> T:
    try:
        return read()
    except msgspec.ValidationError as error:
        raise CkptError(
            "internal",
            "The program that saves kernels gave an odd answer. The kernel runs on.",
            details=str(error),
        ) from error


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Finish ``work`` although the awaiting task may be cancelled again meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class _Transaction:
    """One running ``kernel-capture dump``, ``park`` or ``unpark``."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        explained: Callable[[dict[str, Any]], CkptError],
        on_window: Callable[[], None] | None,
        progress: Callable[[float], None] | None,
    ) -> None:
        self.process = process
        self.explained = explained
        self.on_window = on_window
        self.progress = progress
        self.window_error: BaseException | None = None
        self.window_work: asyncio.Future[None] | None = None
        self.messages = bytearray()

    async def run(self, cancel: asyncio.Event | None, deadline: float) -> dict[str, Any]:
        work = asyncio.ensure_future(self._work())
        canceller = asyncio.ensure_future(self._cancel_on(cancel)) if cancel else None
        errors = asyncio.ensure_future(self._read_messages())
        try:
            last = await asyncio.wait_for(work, deadline)
            await asyncio.wait([errors], timeout=1)
        except asyncio.TimeoutError as error:
            raise self.explained({"reason": "timeout", "message": self._log()}) from error
        finally:
            errors.cancel()
            if canceller is not None:
                canceller.cancel()
        if self.window_error is not None:
            raise self.window_error
        if last is None:
            raise CkptError(
                "internal",
                "The program that saves kernels ended without a word. The kernel runs on.",
                details=f"exit status {self.process.returncode}\n{self._log()}",
            )
        if last["event"] == "error":
            raise self.explained({**last, "log_tail": self._log()})
        return last

    async def _work(self) -> dict[str, Any] | None:
        """The last ``done`` or ``error`` event, after everything in between."""
        last: dict[str, Any] | None = None
        async for event in self._events():
            kind = event["event"]
            if kind == "progress":
                self._report(event)
            elif kind == "window":
                await self._window()
            elif kind in ("done", "error"):
                last = event
        await self.process.wait()
        return last

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        assert self.process.stdout is not None
        while True:
            try:
                line = await self.process.stdout.readline()
            except ValueError:  # longer than the limit: the reader has dropped it
                continue
            if not line:
                return
            event = parse_event(line)
            if event is not None:
                yield event

    def _report(self, event: dict[str, Any]) -> None:
        done, total = event.get("bytes"), event.get("total")
        if self.progress and isinstance(done, int) and isinstance(total, int) and total > 0:
            self.progress(min(1.0, done / total))

    async def _window(self) -> None:
        if self.on_window is not None and self.window_error is None:
            self.window_work = asyncio.ensure_future(asyncio.to_thread(self.on_window))
            try:
                await asyncio.shield(self.window_work)
            except Exception as error:
                self.window_error = error
        await self._send(b"cancel\n" if self.window_error else b"resume\n")

    async def _cancel_on(self, cancel: asyncio.Event) -> None:
        await cancel.wait()
        await self._send(b"cancel\n")

    async def _send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self.process.stdin.write(line)
            await self.process.stdin.drain()

    async def _read_messages(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(4096):
            self.messages += data
            del self.messages[:-8192]

    def _log(self) -> str:
        return self.messages.decode(errors="replace").strip()

    async def finish(self) -> None:
        """Have the process undo what it is doing and wait for its end; then end it."""
        if self.window_work is not None and not self.window_work.done():
            await asyncio.wait([self.window_work], timeout=UNDO_GRACE)
        if self.process.returncode is not None:
            return
        await self._send(b"cancel\n")
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), UNDO_GRACE)
        except asyncio.TimeoutError:
            log.error("kernel-capture did not undo what it did in %g s; ending it", UNDO_GRACE)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
