"""A running ``kernel-capture dump``, ``park`` or ``unpark``: what it says, and what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

from ..errors import CkptError
from .protocol import parse_event

log = logging.getLogger(__name__)

#: Seconds that ``kernel-capture`` gets to undo a dump before it is ended; its guard thaws the tree.
UNDO_GRACE: Final = 30.0
#: Seconds more that it allows itself where a GPU is concerned (in ``cuda.c`` ``undo_beside``, and
#: to load and start the driver anew when that hangs), beside as long as it took to go forward:
#: what was copied is copied back.
GPU_UNDO: Final = 300.0

#: Seconds between two looks whether the process has ended.
_LOOK: Final = 0.1

#: Seconds for which work on a GPU is waited for before it is worth a word.
_WORTH_A_WORD: Final = 1.0


async def uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Finish ``work`` although the awaiting task may be cancelled again meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class Conversation:
    """With one process; the parameters are those of :meth:`.native.KernelCapture.dump`.

    ``explained`` makes of an ``error`` event what is raised. ``forward``: seconds that what may
    have to be undone on a GPU can take.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        explained: Callable[[dict[str, Any]], CkptError],
        on_window: Callable[[], None] | None,
        progress: Callable[[float], None] | None,
        on_gpu: Callable[[bool], None] | None = None,
        forward: float = 0.0,
    ) -> None:
        self.process = process
        self.explained = explained
        self.on_window = on_window
        self.progress = progress
        self.on_gpu = on_gpu
        self._gpu_undo = GPU_UNDO + forward
        self._has_gpu = False
        self.window_error: BaseException | None = None
        self.window_work: asyncio.Future[None] | None = None
        self.messages = bytearray()

    async def run(self, cancel: asyncio.Event | None, limit: float) -> dict[str, Any]:
        """Return the ``done`` event; after ``limit`` seconds all is undone, and an error told."""
        work = asyncio.ensure_future(self._work())
        canceller = asyncio.ensure_future(self._cancel_on(cancel)) if cancel else None
        errors = asyncio.ensure_future(self._read_messages())
        try:
            await asyncio.wait([work], timeout=limit + UNDO_GRACE)
            if self._has_gpu:
                await asyncio.wait([work], timeout=self._gpu_undo)
            if not work.done():
                raise self.explained({"reason": "timeout", "message": self._log()})
            last = work.result()
            await asyncio.wait([errors], timeout=1)
        finally:
            work.cancel()
            errors.cancel()
            if canceller is not None:
                canceller.cancel()
        if self.window_error is not None:
            raise self.window_error
        if last is None:
            raise CkptError(
                "internal",
                "The program that saves kernels ended without a word. The kernel runs on.",
                hint="Try again. If that happens each time, reinstall jupyter-gpu-ckpt.",
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
            elif kind == "gpu":
                self._gpu(event)
            elif kind == "window":
                await self._window()
            elif kind in ("done", "error"):
                last = event
        await self._ended()
        return last

    async def _ended(self) -> None:
        """Wait for the end of the process; not, as its ``wait()``, for that of its pipes.

        A thread that hangs in the kernel with a disk keeps them open.
        """
        waiting = asyncio.ensure_future(self.process.wait())
        try:
            while self.process.returncode is None:
                await asyncio.wait([waiting], timeout=_LOOK)
        finally:
            waiting.cancel()

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

    def _gpu(self, event: dict[str, Any]) -> None:
        self._has_gpu = True
        if self.on_gpu is not None:
            # A lock waits until the work that was launched has ended.
            waited = event.get("waited_s") if event.get("step") == "lock" else None
            self.on_gpu(isinstance(waited, int | float) and waited >= _WORTH_A_WORD)

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
        grace = UNDO_GRACE + (self._gpu_undo if self._has_gpu else 0.0)
        try:
            await asyncio.wait_for(self._ended(), grace)
        except asyncio.TimeoutError:
            log.error("kernel-capture did not undo what it did in %g s; ending it", grace)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self._ended()
