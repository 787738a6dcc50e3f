"""Long operations: one object each, with phases, progress, cancel and a rate-limited voice.

An operation is started by the keeper, runs as a task of the server's event loop, and
is kept in memory after its end so that clients which missed the events can ask.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any, Final, TypeVar

import msgspec

from .errors import CkptError
from .models import ErrorBody, Operation, OperationKind, OperationResult, Phase

#: Schema of the event that tells of a changed operation.
OPERATION_SCHEMA: Final = "https://schema.jupyter.org/jupyter_gpu_ckpt/operation/v1"

#: How many that have ended are remembered.
_KEPT: Final = 100
#: What may have become of an operation that is not known.
FORGOTTEN: Final = (
    f"Operations are forgotten when the server ends, and after {_KEPT} later ones have ended."
)

#: Called with a schema id and the event's data; see :class:`Operations`.
Emit = Callable[[str, dict[str, Any]], None]

T = TypeVar("T")

#: Threads of our own: a restore may wait in one for minutes, and the loop's default ones are few.
_WORKERS: Final = ThreadPoolExecutor(max_workers=64, thread_name_prefix="gpu-ckpt")

_DOING: Final[dict[OperationKind, str]] = {
    "save": "being saved",
    "restore": "being restored",
    "verify": "being verified",
    "park": "being parked",
    "unpark": "getting its GPU back",
}
_FINAL: Final = frozenset({"done", "failed", "cancelled"})


def _goes_on(model: Operation) -> bool:
    return model.status not in _FINAL


def now() -> str:
    """The time as models and states say it: ISO 8601, UTC, whole milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def in_thread(function: Callable[..., T], /, *args: Any) -> T:
    """Run a blocking function in a worker thread and wait for it, even when cancelled.

    What it works on is then never touched by two sides at once; functions that may take
    long watch :attr:`Run.cancel_flag`.
    """
    work = asyncio.get_running_loop().run_in_executor(_WORKERS, function, *args)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if not work.done():
            await asyncio.wait([work])
        raise


class Run:
    """One operation while it runs; what the code doing the work holds.

    All methods may be called from any thread but :meth:`ended`, which belongs to
    the event loop.
    """

    def __init__(
        self,
        model: Operation,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[Run, bool], None],
    ) -> None:
        self.model = model
        #: When it began, in monotonic seconds.
        self.began = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        #: Set when the user asked to cancel; for code on the event loop.
        self.cancel_event = asyncio.Event()
        #: The same for worker threads.
        self.cancel_flag = threading.Event()
        self.cancellable = True
        self._loop = loop
        self._changed = changed

    def phase(self, phase: Phase, progress: float | None = None) -> None:
        """Enter ``phase``; raises CkptError ``cancelled`` when that was asked for meanwhile."""
        self.check_cancelled()
        self._update(phase, progress)

    def progress(self, fraction: float) -> None:
        """Set how much is done, 0 to 1; never goes back."""
        self._update(None, fraction)

    def span(self, start: float, end: float) -> Callable[[int, int], None]:
        """A callback taking (bytes done, bytes in all) that moves from ``start`` to ``end``."""

        def advance(done: int, total: int) -> None:
            part = min(1.0, done / total) if total > 0 else 1.0
            self.progress(start + (end - start) * part)

        return advance

    def cancel(self) -> None:
        """Ask the work to stop; it does where it may: see :meth:`check_cancelled`."""
        self.cancel_flag.set()
        self.cancel_event.set()

    def check_cancelled(self) -> None:
        """Raise CkptError ``cancelled`` when the user asked to cancel and it is still possible."""
        if self.cancellable and self.cancel_flag.is_set():
            raise CkptError("cancelled", "The operation was cancelled.")

    def point_of_no_return(self) -> None:
        """From here on :meth:`Operations.cancel` is refused."""
        self.check_cancelled()
        self.cancellable = False

    async def ended(self, timeout: float | None = None) -> Operation:
        """Wait for the end, however it comes, or for ``timeout`` seconds; the operation then.

        Nothing is raised for an operation that failed: its ``status`` and ``error`` say so.
        """
        if self.task is not None:
            await asyncio.wait([self.task], timeout=timeout)
        return self.model

    def _update(self, phase: Phase | None, progress: float | None) -> None:
        self._loop.call_soon_threadsafe(self._apply, phase, progress)

    def _apply(self, phase: Phase | None, progress: float | None) -> None:
        if self.model.status in _FINAL:
            return
        new_phase = phase is not None and phase != self.model.phase
        if phase is not None:
            self.model.phase = phase
            self.model.phases.setdefault(phase, round(time.monotonic() - self.began, 3))
        if progress is not None:
            self.model.progress = max(self.model.progress, min(1.0, progress))
        self._changed(self, new_phase)


class Operations:
    """The operations of one server: at most one running for each kernel.

    Parameters
    ----------
    emit
        Called on the event loop with every change that clients should hear of, at most
        about five times a second for one operation; ``None`` keeps silent.
    log
        Where failures that are not the user's to see go.
    on_ended
        Called on the event loop with each operation that has ended.
    keep
        How many finished operations are remembered.
    """

    def __init__(
        self,
        emit: Emit | None,
        log: logging.Logger | Any,
        *,
        on_ended: Callable[[Run], None] | None = None,
        keep: int = _KEPT,
    ) -> None:
        self._emit = emit
        self._log = log
        self._on_ended = on_ended
        self._keep = keep
        self._runs: dict[str, Run] = {}
        self._spoke: dict[str, float] = {}
        self._pending: dict[str, asyncio.TimerHandle] = {}

    interval: float = 0.2
    """Least time between two events of one operation, in seconds (its end is told at once)."""

    def all(self) -> list[Operation]:
        """Every operation remembered, newest first."""
        return [run.model for run in reversed(self._runs.values())]

    def get(self, operation_id: str) -> Run:
        """The operation with that id; CkptError ``unknown_operation`` when there is none."""
        try:
            return self._runs[operation_id]
        except KeyError:
            raise CkptError(
                "unknown_operation",
                "There is no such operation.",
                hint=FORGOTTEN,
            ) from None

    def running(self, kernel_id: str) -> Run | None:
        """The operation that runs on this kernel now, if any; checks of its states do not count."""
        for run in self._runs.values():
            model = run.model
            if model.kernel_id == kernel_id and model.kind != "verify" and _goes_on(model):
                return run
        return None

    def verifying(self, state_id: str) -> Run | None:
        """The check of this state that runs now, if any."""
        for run in self._runs.values():
            model = run.model
            if model.state_id == state_id and model.kind == "verify" and _goes_on(model):
                return run
        return None

    def check_free(self, kernel_id: str) -> None:
        """Raise CkptError ``busy`` when an operation runs on this kernel."""
        run = self.running(kernel_id)
        if run is not None:
            doing = _DOING[run.model.kind]
            raise CkptError(
                "busy",
                f"This kernel is already {doing}.",
                hint="Wait until that has ended, or cancel it.",
            )

    def start(
        self,
        kind: OperationKind,
        kernel_id: str,
        work: Callable[[Run], Awaitable[OperationResult]],
        *,
        path: str | None = None,
        state_id: str | None = None,
        cause: str = "user",
    ) -> Run:
        """Start ``work`` as an operation and return at once.

        ``work`` returns the result or raises CkptError; anything else it raises is
        logged and shown as ``internal``. Raises CkptError ``busy``; a check of a state
        (``verify``) waits for nothing.
        """
        if kind != "verify":
            self.check_free(kernel_id)
        model = Operation(
            id=uuid.uuid4().hex,
            kind=kind,
            kernel_id=kernel_id,
            path=path,
            state_id=state_id,
            status="running",
            phase="waiting",
            progress=0.0,
            started=now(),
            cause=cause,
        )
        run = Run(model, asyncio.get_running_loop(), self._on_change)
        self._runs[model.id] = run
        self._forget_old()
        self._speak(run)
        run.task = asyncio.create_task(self._drive(run, work))
        return run

    def cancel(self, operation_id: str) -> Operation:
        """Ask an operation to stop. Ended ones are left as they are.

        Raises CkptError ``unknown_operation``, or ``busy`` when the operation is past
        the point where going back would lose something.
        """
        run = self.get(operation_id)
        if run.model.status in _FINAL:
            return run.model
        if not run.cancellable:
            raise CkptError(
                "busy",
                "The operation can no longer be cancelled.",
                hint="It ends by itself in a moment.",
            )
        run.cancel()
        return run.model

    async def stop(self, timeout: float) -> None:
        """Cancel what can be cancelled and wait for all ends, ``timeout`` seconds at most."""
        tasks = []
        for run in self._runs.values():
            if run.model.status not in _FINAL and run.task is not None:
                run.cancel()
                tasks.append(run.task)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()
        for handle in self._pending.values():
            handle.cancel()
        self._pending.clear()

    async def _drive(self, run: Run, work: Callable[[Run], Awaitable[OperationResult]]) -> None:
        model = run.model
        error: CkptError | None = None
        try:
            model.result = await work(run)
        except CkptError as problem:
            error = problem
        except asyncio.CancelledError:
            error = CkptError("cancelled", "The server is stopping.")
        except Exception as problem:
            self._log.exception("Operation %s (%s) failed unexpectedly", model.id, model.kind)
            error = CkptError(
                "internal",
                f"The {model.kind} failed because of an internal error.",
                hint="The server's log has the details.",
                details=type(problem).__name__,
            )
        # Progress that worker threads reported before the end must not arrive after it.
        await asyncio.sleep(0)
        model.finished = now()
        if error is None:
            if model.result is not None:
                model.state_id = model.result.state_id or None
            model.phase, model.progress, model.status = "finished", 1.0, "done"
        else:
            model.error = ErrorBody(**_body(error))
            model.status = "cancelled" if error.reason == "cancelled" else "failed"
            log = self._log.info if model.status == "cancelled" else self._log.warning
            log("The %s of kernel %s: %s", model.kind, model.kernel_id, error.message)
        self._speak(run)
        if self._on_ended is not None:
            self._on_ended(run)

    def _on_change(self, run: Run, at_once: bool) -> None:
        since = time.monotonic() - self._spoke.get(run.model.id, 0.0)
        if at_once or since >= self.interval:
            self._speak(run)
        elif run.model.id not in self._pending:
            loop = asyncio.get_running_loop()
            self._pending[run.model.id] = loop.call_later(self.interval - since, self._speak, run)

    def _speak(self, run: Run) -> None:
        model = run.model
        pending = self._pending.pop(model.id, None)
        if pending is not None:
            pending.cancel()
        self._spoke[model.id] = time.monotonic()
        if self._emit is None:
            return
        self._emit(
            OPERATION_SCHEMA,
            {
                "operation_id": model.id,
                "kind": model.kind,
                "cause": model.cause,
                "kernel_id": model.kernel_id,
                "path": model.path,
                "state_id": model.state_id,
                "status": model.status,
                "phase": model.phase,
                "progress": round(model.progress, 4),
                "message": model.error.message if model.error else None,
                "reason": model.error.reason if model.error else None,
            },
        )

    def _forget_old(self) -> None:
        ended = [key for key, run in self._runs.items() if run.model.status in _FINAL]
        for key in ended[: max(0, len(ended) - self._keep)]:
            del self._runs[key]
            self._spoke.pop(key, None)


def _body(error: CkptError) -> dict[str, Any]:
    return msgspec.to_builtins(error.as_dict())  # type: ignore[no-any-return]
