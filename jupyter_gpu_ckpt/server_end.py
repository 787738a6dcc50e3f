"""How a Jupyter server ends: in order on every signal, once, and for want of activity."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .keeper import Keeper


class ServerEnd:
    """Sees to it that the server saves its kernels when it ends; the extension makes it.

    Parameters
    ----------
    serverapp
        The server, which has not started yet.
    keeper
        Knows which kernels are hibernated.
    """

    def __init__(self, serverapp: Any, keeper: Keeper) -> None:
        self._server = serverapp
        self._keeper = keeper
        self._stop: Callable[[bool], None] = serverapp.stop
        self._stop_when_idle: Callable[[], None] = serverapp.shutdown_no_activity
        self._is_saving = False
        self._server.stop = self.stop
        self._server.shutdown_no_activity = self.stop_when_idle

    def started(self) -> None:
        """End in order on SIGINT too; called on the event loop.

        Jupyter Server does so only at a terminal. Elsewhere its event loop would be interrupted,
        and nothing done before the end: JupyterHub's local spawner stops servers that way.
        """
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        try:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupted)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            # A server in a thread of another program has no signals.
            self._server.log.debug("SIGINT cannot be listened to: %s", error)

    def _interrupted(self) -> None:
        self._server.log.critical("Interrupted, stopping")
        self.stop()

    def stop(self, from_signal: bool = False) -> None:
        """Stop the server, unless it is being stopped and saves its kernels.

        Asked again (a spawner that is impatient, a second Ctrl-C) it would end them meanwhile.
        """
        if self._is_saving:
            self._server.log.warning("The server is stopping: its kernels are saved first")
            return
        self._is_saving = True
        self._stop(from_signal)

    def saved(self) -> None:
        """What was to be saved is saved."""
        self._is_saving = False

    def stop_when_idle(self) -> None:
        """Stop a server that has no kernels (as Jupyter Server does) or only hibernated ones.

        Jupyter Server calls it once a minute where ``shutdown_no_activity_timeout`` is set.
        """
        server, kernels = self._server, self._server.kernel_manager.list_kernel_ids()
        if not kernels or not all(map(self._keeper.hibernation.is_asleep, kernels)):
            self._stop_when_idle()
            return
        idle = (datetime.now(timezone.utc) - server.web_app.last_activity()).total_seconds()
        if (
            idle > server.shutdown_no_activity_timeout
            and not server.extension_manager.any_activity()
        ):
            server.log.info("Only hibernated kernels for %d seconds; shutting down.", idle)
            server.stop()
