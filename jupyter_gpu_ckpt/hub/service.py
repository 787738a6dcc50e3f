"""The administrator's page as a service of JupyterHub: ``python -m jupyter_gpu_ckpt.hub``."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlparse

import msgspec
from jupyterhub.services.auth import HubOAuth, HubOAuthCallbackHandler
from tornado.httpserver import HTTPServer
from tornado.web import Application, StaticFileHandler
from traitlets import Float, Integer, List, TraitError, Unicode
from traitlets.config import Application as ConfiguredApplication

from . import service_api as api
from . import service_pages as pages
from .service_actions import Actions
from .service_audit import Audit
from .service_census import Census
from .service_history import History
from .service_metrics import Metrics
from .service_people import HubPeople
from .service_scopes import SETTINGS
from .settings import GpuCkptHub

_NAME: Final = r"([^/]+)"
_STATE: Final = r"([0-9TZa-f-]{1,64})"


class GpuCkptService(ConfiguredApplication):
    """The page of all users' saved states; the hub gives it its settings, or a file does."""

    name = "python -m jupyter_gpu_ckpt.hub"
    description = "The page of all users' saved kernel states, a service of JupyterHub."
    classes: ClassVar[list[type]] = [GpuCkptHub]  # type: ignore[misc]
    aliases: ClassVar[dict[str, str]] = {  # type: ignore[misc]
        "config": "GpuCkptService.config_file",
        "folder": "GpuCkptService.folder",
    }

    config_file = Unicode(
        "",
        config=True,
        help="File with c.GpuCkptHub, for a service that the hub does not start: such as the hub's "
        "own jupyterhub_config.py.",
    )
    folder = Unicode(
        "gpu-ckpt-service",
        config=True,
        help="The service's own folder: the audit log, usage over time, what was read of remote "
        "stores.",
    )
    interval = Float(
        60.0, min=1.0, config=True, help="Seconds between two readings of all stores; default 60."
    )
    ip = Unicode("", config=True, help="Address to listen on. Empty: as in the service's URL.")
    port = Integer(0, config=True, help="Port to listen on. 0: as in the service's URL.")
    trusted_downstream_ips = List(
        Unicode(),
        config=True,
        help="Addresses of proxies before the hub's own, such as one that ends TLS; default: "
        "JupyterHub's setting of this name.",
    )

    def initialize(self, argv: list[str] | None = None) -> None:
        """Read the command line and the settings.

        Raises
        ------
        TraitError
            They are wrong.
        """
        super().initialize(argv)
        text = os.environ.pop(SETTINGS, None)
        if self.config_file:
            self.load_config_file(Path(self.config_file).name, str(Path(self.config_file).parent))
            self.hub = GpuCkptHub(config=self.config)
            if not self.trusted_downstream_ips:
                self.trusted_downstream_ips = self.config.JupyterHub.get(
                    "trusted_downstream_ips", []
                )
        elif text:
            given = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
            self.hub = GpuCkptHub(**given["hub"])
            for name, value in given["service"].items():
                setattr(self, name, value)
        else:
            raise TraitError(
                "The service has no settings: add it with add_admin_page(c) in "
                "jupyterhub_config.py, or give it --config FILE."
            )

    def start(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        self.log.setLevel(logging.INFO)
        # Pages are made beside threads that read: these let go of the interpreter sooner.
        sys.setswitchinterval(0.0005)
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        auth = HubOAuth.instance(parent=self)
        folder = Path(self.folder).expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        history = History(folder / "usage.sqlite")
        census = Census(
            self.hub,
            HubPeople(auth.api_url, auth.api_token).ask,
            folder,
            interval=self.interval,
            on_round=lambda: _note(history, census, self.log),
            log=self.log,
        )
        metrics = Metrics(census)
        actions = Actions(census, metrics, Audit(folder / "audit.jsonl", self.log), self.log)
        trusted = self.trusted_downstream_ips
        server = HTTPServer(
            application(auth, census, history, metrics, actions, trusted),
            max_body_size=64 << 10,
            idle_connection_timeout=60,
        )
        where = urlparse(os.environ.get("JUPYTERHUB_SERVICE_URL", "http://127.0.0.1:10140"))
        server.listen(self.port or where.port or 80, self.ip or where.hostname or "127.0.0.1")
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, over.set)
        reading = asyncio.create_task(census.run())
        self.log.info("Saved states of all users at %s", auth.base_url)
        await over.wait()
        server.stop()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        census.close()
        history.close()


def application(
    auth: HubOAuth,
    census: Census,
    history: History,
    metrics: Metrics,
    actions: Actions,
    trusted_downstream: Sequence[str] = (),
) -> Application:
    """All addresses of the service; `trusted_downstream`: of proxies before the hub's."""
    shared = {"census": census, "history": history, "metrics": metrics, "actions": actions}
    routes: list[tuple[str, Any, dict[str, Any]]] = [
        (r"", pages.UsersPage, shared),
        (rf"users/{_NAME}", pages.UserPage, shared),
        (rf"users/{_NAME}/states/{_STATE}/pin", pages.PinPage, shared),
        (rf"users/{_NAME}/states/{_STATE}/delete", pages.DeletePage, shared),
        (rf"users/{_NAME}/expire", pages.ExpirePage, shared),
        (r"users.csv", api.UsersCsv, shared),
        (rf"users/{_NAME}/states.csv", api.StatesCsv, shared),
        (r"api/users", api.UsersApi, shared),
        (rf"api/users/{_NAME}", api.UserApi, shared),
        (rf"api/users/{_NAME}/states/{_STATE}", api.StateApi, shared),
        (rf"api/users/{_NAME}/expire", api.ExpireApi, shared),
        (r"metrics", api.MetricsHandler, shared),
        (r"oauth_callback", HubOAuthCallbackHandler, {}),
        (r"static/(service\.css)", StaticFileHandler, {"path": str(pages.FOLDER / "static")}),
        (r"api/.*", api.UnknownApi, shared),
        (r".*", pages.UnknownPage, shared),
    ]
    base = auth.base_url.rstrip("/") + "/"
    return Application(
        [(re.escape(base) + path, handler, given) for path, handler, given in routes],
        cookie_secret=secrets.token_bytes(32),
        trusted_downstream=frozenset(trusted_downstream),
    )


def _note(history: History, census: Census, log: Any) -> None:
    try:
        history.add(census.known(), time.time())
    except sqlite3.Error as error:
        log.warning("Usage over time cannot be kept: %s", error)


def main() -> None:
    """Entry point of ``python -m jupyter_gpu_ckpt.hub``."""
    GpuCkptService.launch_instance()
