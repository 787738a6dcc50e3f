"""The keeper: saves, restores and lists the kernels of one server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from traitlets.config import LoggingConfigurable

from . import models


class Keeper(LoggingConfigurable):
    """Saves kernels into the store and brings them back.

    Created by the server extension; REST handlers call its methods on the server's event
    loop. Every method raises :class:`~jupyter_gpu_ckpt.errors.CkptError` only.

    Parameters
    ----------
    parent
        The extension app; its configuration section is ``c.Keeper``.
    kernel_manager, session_manager
        The server's own.
    emit
        Called with a schema id and the data of an event; ``None`` emits nothing.
    """

    def __init__(
        self,
        *,
        parent: Any,
        kernel_manager: Any,
        session_manager: Any,
        emit: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__(parent=parent)

    async def start(self) -> None:
        """Begin: look for lost kernels, renew leases. Called once when the server is up."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Orderly end: cancel operations, end leases. Called before the kernels are shut down."""
        raise NotImplementedError

    async def kernels(self) -> list[models.Kernel]:
        """Every kernel of the server, and whether it can be saved."""
        raise NotImplementedError

    async def kernel(self, kernel_id: str) -> models.Kernel:
        """One kernel; ``unknown_kernel``."""
        raise NotImplementedError

    async def save(
        self, kernel_id: str, *, label: str | None = None, reason: str = "user"
    ) -> models.Operation:
        """Start saving; ``unknown_kernel``, ``busy``, ``not_savable``, ``cannot_capture``."""
        raise NotImplementedError

    async def restore(
        self,
        state_id: str,
        *,
        mode: Literal["rollback", "new"] = "rollback",
        path: str | None = None,
    ) -> models.Operation:
        """Start restoring; ``unknown_state``, ``busy``, ``bad_request``, ``cannot_capture``."""
        raise NotImplementedError

    async def states(
        self, kernel_id: str | None = None, path: str | None = None
    ) -> list[models.State]:
        """States, newest first; ``restorable`` is not checked."""
        raise NotImplementedError

    async def state(self, state_id: str) -> models.State:
        """One state with ``restorable`` and ``differences``; ``unknown_state``."""
        raise NotImplementedError

    async def delete_state(self, state_id: str) -> None:
        """Remove a state for good; ``unknown_state``, ``busy`` while it is being restored."""
        raise NotImplementedError

    async def lost(self) -> list[models.LostKernel]:
        """Kernels that ended without an orderly shutdown and have states, newest first."""
        raise NotImplementedError

    async def restore_lost(self, kernel_id: str) -> models.Operation:
        """Start bringing a lost kernel back from its newest state; ``unknown_kernel``, ``busy``."""
        raise NotImplementedError

    async def dismiss_lost(self, kernel_id: str) -> None:
        """Do not ask about this lost kernel again; its states stay. ``unknown_kernel``."""
        raise NotImplementedError

    def operations(self) -> list[models.Operation]:
        """Operations of this server, newest first (the last 100 ended ones)."""
        raise NotImplementedError

    def operation(self, operation_id: str) -> models.Operation:
        """One operation; ``unknown_operation``."""
        raise NotImplementedError

    async def cancel(self, operation_id: str) -> models.Operation:
        """Cancel a running operation; ``unknown_operation``, ``busy`` when it is too late."""
        raise NotImplementedError

    async def doctor(self) -> models.Doctor:
        """What this node can capture, and what stands in the way."""
        raise NotImplementedError

    async def gc(self, dry_run: bool = False) -> dict[str, Any]:
        """Remove what no state uses: ``{"chunks", "bytes", "dry_run"}``."""
        raise NotImplementedError
