"""The server extension: joins Jupyter Server, the keeper, the REST handlers and the events."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from jsonschema import ValidationError
from jupyter_events import EventLogger
from jupyter_server.extension.application import ExtensionApp
from jupyter_server.serverapp import ServerApp

from .handlers import KEEPER_SETTING, default_handlers
from .keeper import Keeper
from .provisioner import GpuCkptProvisioner
from .server_end import ServerEnd
from .settings import GpuCkpt

EVENTS_DIR: Final = Path(__file__).parent / "events"


class GpuCkptApp(ExtensionApp):
    """Jupyter Server extension that saves and restores running kernels."""

    name = "jupyter_gpu_ckpt"
    load_other_extensions = True
    # What can be configured on the server's command line, as in --GpuCkpt.store_url=/shared.
    classes = [ServerApp, GpuCkpt, Keeper, GpuCkptProvisioner]  # noqa: RUF012

    #: ``None`` where the extension could not be loaded.
    keeper: Keeper | None = None
    _end: ServerEnd

    def initialize(self) -> None:  # type: ignore[override]
        """Register the event schemas, then everything else.

        The server calls it once, while it loads its extensions. The schemas come first because
        an event listener only hears of the schemas known when it was added.
        """
        for schema in sorted(EVENTS_DIR.glob("*.yaml")):
            self._events.register_event_schema(schema)
        super().initialize()  # type: ignore[no-untyped-call]

    def initialize_settings(self) -> None:
        """Create the keeper; called by :meth:`initialize`, before the event loop runs."""
        assert self.serverapp is not None
        self.keeper = Keeper(
            parent=self,
            kernel_manager=self.serverapp.kernel_manager,
            session_manager=self.serverapp.session_manager,
            emit=self._emit,
        )
        self.settings[KEEPER_SETTING] = self.keeper
        self.keeper.hibernation.guard(self.settings)
        self._end = ServerEnd(self.serverapp, self.keeper)

    def initialize_handlers(self) -> None:
        """Add the REST API; called by :meth:`initialize`."""
        self.handlers.extend(default_handlers)

    async def _start_jupyter_server_extension(self, serverapp: ServerApp) -> None:
        """Start the keeper; the server calls it once its event loop runs."""
        if self.keeper is not None:
            self._end.started()
            await self.keeper.start()

    async def stop_extension(self) -> None:
        """Stop the keeper in order; the server calls it at its end, before it stops kernels."""
        if self.keeper is None:
            return
        try:
            await self.keeper.stop()
        except Exception:
            # What is raised here would keep the server from ending its kernels.
            self.log.exception("gpu-ckpt: the extension did not stop in order")
        finally:
            self._end.saved()

    def current_activity(self) -> dict[str, int] | None:
        """Say what runs here; the server calls it before it shuts down for want of activity.

        Returns
        -------
        dict or None
            The number of operations under way, ``None`` for none.
        """
        if self.keeper is None:
            return None
        running = [op for op in self.keeper.operations() if op.status in ("pending", "running")]
        return {"gpu_ckpt_operations": len(running)} if running else None

    @property
    def _events(self) -> EventLogger:
        assert self.serverapp is not None
        assert self.serverapp.event_logger is not None
        return self.serverapp.event_logger

    def _emit(self, schema_id: str, data: dict[str, Any]) -> None:
        """Publish one Jupyter event; the keeper calls it, on the event loop's thread."""
        try:
            self._events.emit(schema_id=schema_id, data=data)
        except ValidationError as error:
            # An event nobody can read must not fail the save it speaks of.
            self.log.error("gpu-ckpt: event not sent, %s: %s", schema_id, error.message)
