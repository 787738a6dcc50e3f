"""What the store says of kernels whose last save failed, for a hub's administrator and others."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from .errors import CkptError
from .models import Operation
from .operations import in_thread, now
from .store import SaveFailure

if TYPE_CHECKING:
    from .keeper import Keeper


class FailedSaves:
    """Notes failed saves beside the kernels' records; one a keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def ended(self, operation: Operation) -> None:
        """An operation is over; called on the event loop."""
        if operation.kind != "save":
            return
        kernel_id, error = operation.kernel_id, operation.error
        if operation.status == "done":
            self._keeper.in_background(self._write(None, kernel_id))
        elif operation.status == "failed" and error is not None and error.reason != "busy":
            at = now()
            failure = SaveFailure(
                kernel_id=kernel_id,
                at=at,
                since=at,
                cause=operation.cause,
                reason=error.reason,
                message=error.message,
                hint=error.hint,
                path=operation.path,
                hostname=socket.gethostname(),
            )
            self._keeper.in_background(self._write(failure, kernel_id))

    async def _write(self, failure: SaveFailure | None, kernel_id: str) -> None:
        store = self._keeper.store
        try:
            if failure is None:
                await in_thread(store.clear_failure, kernel_id)
            else:
                await in_thread(store.note_failure, failure)
        except CkptError as error:
            # What it failed of may well be the store.
            self._keeper.log.warning("A failed save could not be noted: %s", error.message)
