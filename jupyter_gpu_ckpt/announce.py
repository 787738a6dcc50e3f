"""The events that tell pages what happened to a kernel or a state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from .models import Ending
from .operations import Emit
from .store import StateRecord

#: Schema of the event that tells what happened to a kernel.
KERNEL_SCHEMA: Final = "https://schema.jupyter.org/jupyter_gpu_ckpt/kernel/v1"
#: Schema of the event that tells that the server is about to end.
SERVER_SCHEMA: Final = "https://schema.jupyter.org/jupyter_gpu_ckpt/server/v1"


class Announcer:
    """Emits events; a listener that fails never disturbs what is being told.

    Parameters
    ----------
    emit
        Called with a schema id and an event's data; ``None`` keeps silent.
    log
        For events that could not be emitted.
    """

    def __init__(self, emit: Emit | None, log: logging.Logger | Any) -> None:
        self._emit = emit
        self._log = log

    def __call__(self, schema: str, data: dict[str, Any]) -> None:
        """Emit an event of any schema."""
        if self._emit is None:
            return
        try:
            self._emit(schema, data)
        except Exception:
            self._log.exception("An event could not be emitted")

    def restored(
        self,
        record: StateRecord,
        kernel_id: str,
        path: str | None,
        cause: str,
        message: str | None,
        *,
        held: Sequence[str] = (),
    ) -> None:
        """A kernel runs again from a state; ``held`` are requests that were kept meanwhile."""
        self._kernel(
            "restored",
            kernel_id,
            path=path,
            state_id=record.id,
            cause=cause,
            in_flight_msg_id=record.meta.in_flight_msg_id,
            execution_count=record.meta.execution_count,
            message=message,
            held=held,
        )

    def restore_failed(
        self, kernel_id: str, state_id: str, path: str | None, cause: str, message: str
    ) -> None:
        """A kernel has no process any more and could not be restored."""
        self._kernel(
            "restore_failed",
            kernel_id,
            path=path,
            state_id=state_id,
            cause=cause,
            message=f"{message} The saved state is kept; an empty kernel is started.",
        )

    def wake_failed(
        self, kernel_id: str, state_id: str, path: str | None, message: str, refused: Sequence[str]
    ) -> None:
        """A hibernated kernel could not be restored: it stays as it is.

        ``refused`` are the requests that were answered with that.
        """
        self._kernel(
            "restore_failed",
            kernel_id,
            path=path,
            state_id=state_id,
            cause="wake",
            message=f"{message} The saved state is kept: run a cell to try again.",
            held=refused,
        )

    def autosave_failed(self, kernel_id: str, path: str | None, reason: str, message: str) -> None:
        """A save that a policy wanted did not succeed; ``reason`` is the policy."""
        self._kernel("autosave_failed", kernel_id, path=path, cause=reason, message=message)

    def gpu_lost(
        self, kernel_id: str, path: str | None, state_id: str | None, message: str
    ) -> None:
        """A kernel lives on, and its GPU is lost; ``state_id`` is what it can be restored to."""
        self._kernel("gpu_lost", kernel_id, path=path, state_id=state_id, message=message)

    def fenced(self, kernel_id: str, path: str | None, hostname: str) -> None:
        """A kernel was ended here because another server runs it now."""
        self._kernel(
            "fenced",
            kernel_id,
            path=path,
            message=f"The kernel was taken over by another server, on {hostname}. "
            "This copy of it was ended.",
        )

    def server_ends(self, ending: Ending, seconds: float) -> None:
        """Somebody said that the server ends in so many seconds: kernels are saved now."""
        self._server("ends", ending, seconds)

    def server_saved(self, ending: Ending) -> None:
        """What could be saved before the server ends is saved."""
        self._server("saved", ending, None)

    def _server(self, action: str, ending: Ending, seconds: float | None) -> None:
        saved = [kernel for kernel in ending.kernels if kernel.saved]
        self(
            SERVER_SCHEMA,
            {
                "action": action,
                "ending_id": ending.id,
                "source": ending.source,
                "why": ending.why,
                "sure": ending.sure,
                "seconds": seconds,
                "saved": len(saved),
                "not_saved": [k.path or k.kernel_id for k in ending.kernels if not k.saved],
                "not_uploaded": len(ending.not_uploaded),
            },
        )

    def lost(self, kernel_id: str, path: str | None, state_id: str) -> None:
        """A kernel was found that ended without an orderly shutdown."""
        self._kernel("lost", kernel_id, path=path, state_id=state_id)

    def state_durable(self, record: StateRecord) -> None:
        """A state was uploaded: it outlives this node."""
        meta = record.meta
        self._kernel("state_durable", meta.kernel_id, path=meta.path, state_id=record.id)

    def state_deleted(self, record: StateRecord) -> None:
        """A state is gone."""
        meta = record.meta
        self._kernel("state_deleted", meta.kernel_id, path=meta.path, state_id=record.id)

    def _kernel(
        self,
        action: str,
        kernel_id: str,
        *,
        path: str | None,
        state_id: str | None = None,
        cause: str | None = None,
        in_flight_msg_id: str | None = None,
        execution_count: int | None = None,
        message: str | None = None,
        held: Sequence[str] = (),
    ) -> None:
        self(
            KERNEL_SCHEMA,
            {
                "action": action,
                "kernel_id": kernel_id,
                "path": path,
                "state_id": state_id,
                "cause": cause,
                "in_flight_msg_id": in_flight_msg_id,
                "execution_count": execution_count,
                "message": message,
                "held_msg_ids": list(held),
            },
        )
