"""A real JupyterHub with its proxy, which starts and stops the servers of users."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
import requests

from tests.harness.client import Client, wait_for
from tests.harness.node import REPOSITORY, Node
from tests.harness.s3 import fetched_by
from tests.harness.server import RUNNING, Home, extension_config, free_port

#: What the tests, and a culler, may do.
_SCOPES = (
    "admin:users", "admin:servers", "admin:server_state", "access:servers", "list:users",
    "read:users:activity", "tokens",
)  # fmt: skip
#: The password of everybody.
PASSWORD = "pass"


class Hub:
    """A hub, ready once constructed. A context manager: leaving kills it and all servers.

    Its database is in memory. Everybody may log in. Servers run as the user of the tests, in one
    home folder, or each on a test node, in an account of its user's own, or all on the hub's node.

    Parameters
    ----------
    home
        The hub's folder, and the home folder of all users but those with `accounts`.
    config
        The servers' Jupyter configuration by class and trait, on top of the test defaults.
    hub_config
        The hub's own.
    accounts
        Homes of users, below the folder of `home`. Every start of a server lands on a fresh node
        then, unless the hub itself is on one.
    node
        Where the hub runs, as the user of `home`; with a spawner that `hub_config` names.
    lab
        Servers are JupyterLab, and not plain.
    more
        Lines of Python at the end of the hub's configuration.
    release
        Of JupyterHub, for the hub and its servers.
    """

    def __init__(
        self,
        home: Home,
        *,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        hub_config: Mapping[str, Mapping[str, Any]] | None = None,
        accounts: Mapping[str, Home] | None = None,
        node: Node | None = None,
        lab: bool = False,
        more: str = "",
        release: Literal[5, 6] = 6,
    ) -> None:
        proxy = fetched_by("get-hub-proxy", "node_modules/.bin/configurable-http-proxy")
        self.home = home
        self.token = secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{free_port()}"
        name = secrets.token_hex(3)
        self.log_path = home.path / f"hub-{name}.log"
        self._clients: list[Client] = []
        self._accounts = accounts or {}
        self._node = node
        older = [str(fetched_by("get-hub5", "jupyterhub").parent)] if release == 5 else []
        self._older = {"PYTHONPATH": older[0]} if older else {}
        for each in self._accounts.values() or [home]:
            self._write_server_config(each, config or {}, lab)
        file = home.config / f"hub-{name}.py"
        traits = self._hub_config(proxy, hub_config or {})
        file.write_text(
            "".join(
                f"c.{section}.{trait} = {value!r}\n"
                for section, values in traits.items()
                for trait, value in values.items()
            )
            + f"from jupyter_gpu_ckpt.hub import configure\nconfigure(c)\n{more}\n"
        )
        argv = [sys.executable, "-m", "jupyterhub", f"--config={file}"]
        if node is not None:
            home.own()
            argv = node.command(argv, user=home.user, cwd=home.path)
            node.forward(int(self.url.rpartition(":")[2]))
        with self.log_path.open("ab") as log:  # as the culler and nodes do
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=home.path,
                env={
                    **home.environment(), "PYTHONPATH": os.pathsep.join([*older, str(REPOSITORY)]),
                    "CONFIGPROXY_AUTH_TOKEN": secrets.token_hex(16),
                },
                start_new_session=True,
            )  # fmt: skip
        RUNNING.append(self)
        self._http = requests.Session()
        self._http.headers["Authorization"] = f"token {self.token}"
        try:
            wait_for("the hub answers", self._answers, 60)
        except BaseException:
            self.kill()
            raise

    def _write_server_config(
        self, home: Home, config: Mapping[str, Mapping[str, Any]], lab: bool
    ) -> None:
        merged: dict[str, dict[str, Any]] = {
            "ServerApp": {"allow_root": True, "root_dir": str(home.notebooks)},
            "LabApp": {"expose_app_in_browser": True},
            "GpuCkpt": {"lease_interval": 2.0, "lease_ttl": 8.0},
        }
        for layer in (extension_config(), config):
            for section, traits in layer.items():
                merged.setdefault(section, {}).update(traits)
        extensions = merged["ServerApp"].setdefault("jpserver_extensions", {})
        if not lab:  # what the others bring takes its time to load
            others = ("jupyter_lsp", "jupyterlab", "notebook", "notebook_shim")
            extensions.update(dict.fromkeys(others, False))
        extensions["jupyter_gpu_ckpt"] = True
        (home.config / "jupyter_server_config.json").write_text(json.dumps(merged))
        home.own()

    def _hub_config(
        self, proxy: Path, more: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        hub_port = free_port()
        config: dict[str, dict[str, Any]] = {
            "JupyterHub": {
                "bind_url": self.url,
                "hub_port": hub_port,
                "db_url": "sqlite:///:memory:",
                "cookie_secret_file": str(self.home.path / "hub-cookie-secret"),
                "authenticator_class": "dummy",
                "spawner_class": "simple",
                "services": [{"name": "tests", "api_token": self.token}],
                "load_roles": [
                    {"name": "tests", "scopes": list(_SCOPES), "services": ["tests"]},
                ],
                # How often it asks its proxy when servers were used last.
                "last_activity_interval": 1,
            },
            "Authenticator": {"allow_all": True},
            "DummyAuthenticator": {"password": PASSWORD},
            "ConfigurableHTTPProxy": {
                "command": [str(proxy)],
                "api_url": f"http://127.0.0.1:{free_port()}",
                "pid_file": str(self.home.path / "hub-proxy.pid"),
            },
            "SimpleLocalProcessSpawner": {"home_dir_template": str(self.home.path)},
            "Spawner": {
                "cmd": [sys.executable, "-m", "jupyterhub.singleuser"],
                "environment": {**self.home.environment(), **self._older},
            },
        }  # fmt: skip
        if self._node is not None:  # a login of each user's, as the spawner makes it
            login = {name: self.home.environment()[name] for name in ("PATH", "LANG")}
            config["Spawner"] = {"environment": {**login, **self._older}}
        elif self._accounts:
            config["JupyterHub"]["spawner_class"] = "tests.harness.node_spawner.NodeSpawner"
            config["Spawner"].pop("environment")
            config["NodeSpawner"] = {
                "shared": str(self.home.path.parent), "hub_port": hub_port, "poll_interval": 1,
                "log_path": str(self.log_path),
                "accounts": {
                    name: {
                        "user": home.user.name if home.user is not None else "root",
                        "home": str(home.path),
                        "environment": {**home.environment(), **self._older},
                    }
                    for name, home in self._accounts.items()
                },
            }  # fmt: skip
        for section, traits in more.items():
            config.setdefault(section, {}).update(traits)
        return config

    def _request(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        return self._http.request(method, f"{self.url}/hub/api/{path}", timeout=30, **kwargs)

    def _answers(self) -> bool:
        assert self._popen.poll() is None, f"the hub ended\n{self.log()}"
        with contextlib.suppress(requests.RequestException):
            return self._request("GET", "users").ok
        return False

    @property
    def version(self) -> str:
        """JupyterHub's, as the hub says it."""
        return str(self._request("GET", "").json()["version"])

    def server(self, user: str, name: str = "") -> dict[str, Any] | None:
        """What the hub knows of a user's server; ``None`` where there is none."""
        answer = self._request("GET", f"users/{user}")
        answer.raise_for_status()
        return dict(answer.json()["servers"]).get(name)

    def start(self, user: str, name: str = "") -> Client:
        """Start a user's server, as the button on the hub's page does, and wait for it."""
        self._request("POST", f"users/{user}")  # refused where there is such a user
        self._request("POST", self._path(user, name)).raise_for_status()
        return self.started(user, name)

    @staticmethod
    def _path(user: str, name: str) -> str:
        return f"users/{user}/servers/{name}" if name else f"users/{user}/server"

    def started(self, user: str, name: str = "") -> Client:
        """Wait for a server that somebody has started."""

        def ready() -> bool:
            server = self.server(user, name)
            assert server is not None, f"the server of {user} did not start\n{self.log()}"
            return bool(server["ready"])

        wait_for("the server is ready", ready, 60, interval=0.2)
        return self.client(user, name)

    def client(self, user: str, name: str = "", token: str | None = None) -> Client:
        """A client of a user's server, with the rights of the tests or of `token`."""
        where = f"{self.url}/user/{user}/{f'{name}/' if name else ''}"
        client = Client(where, token or self.token)
        self._clients.append(client)
        return client

    def add_user(self, user: str) -> None:
        """Have a user without a server."""
        self._request("POST", f"users/{user}").raise_for_status()

    def add_users(self, users: list[str]) -> None:
        """Have many users without servers."""
        self._request("POST", "users", json={"usernames": users}).raise_for_status()

    def delete_user(self, user: str) -> None:
        """Have the hub forget a user without a server."""
        self._request("DELETE", f"users/{user}").raise_for_status()

    def token_of(self, user: str) -> str:
        """A new token with all rights that a user has."""
        answer = self._request("POST", f"users/{user}/tokens", json={"note": "tests"})
        answer.raise_for_status()
        return str(answer.json()["token"])

    def stop(self, user: str, name: str = "") -> None:
        """Stop a user's server, as the button on the hub's page does, and wait for it."""
        self._request("DELETE", self._path(user, name)).raise_for_status()
        self.wait_stopped(user, name=name)

    def servers(self) -> list[psutil.Process]:
        """The processes of users' servers that are the hub's own children."""
        children = psutil.Process(self._popen.pid).children()
        return [child for child in children if child.environ().get("JUPYTERHUB_USER")]

    def server_environment(self, user: str) -> dict[str, str]:
        """The environment of the process of a user's server."""
        for process in self.servers():
            environment = process.environ()
            if environment["JUPYTERHUB_USER"] == user:
                return environment
        raise AssertionError(f"no server of {user}")

    @contextlib.contextmanager
    def culling(self, timeout: float, *, spare_saving: bool = False) -> Iterator[None]:
        """While in the block, a culler stops servers that nobody has used for so many seconds.

        With `spare_saving` its configuration has the hook that lets saves end first.
        """
        file = self.home.config / "culler.py"
        file.write_text(
            "from jupyter_gpu_ckpt.hub.culling import spare_saving\n"
            f"c.IdleCuller.cull_arbiter_hook = spare_saving({self.url!r})\n"
            if spare_saving
            else ""
        )
        environment = {**self.home.environment(), "JUPYTERHUB_API_TOKEN": self.token}
        argv = [sys.executable, "-m", "jupyterhub_idle_culler", f"--url={self.url}/hub/api"]
        with self.log_path.open("ab") as log:
            culler = subprocess.Popen(
                [*argv, f"--config={file}", f"--timeout={timeout:g}", "--cull-every=1"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        try:
            yield
        finally:
            culler.kill()
            culler.wait(20)

    def wait_stopped(self, user: str, timeout: float = 60, *, name: str = "") -> None:
        """Wait until the hub has stopped a user's server, or noticed that it is gone."""

        def stopped() -> bool:
            server = self.server(user, name)
            return server is None or not (server["ready"] or server["pending"])

        wait_for("the server is stopped", stopped, timeout, 0.2)

    def kill_node(self, user: str) -> str:
        """Let the node of a user's server die, and return what it called itself."""
        server = self.server(user)
        assert server is not None
        os.kill(server["state"]["init_pid"], signal.SIGKILL)
        return str(server["state"]["hostname"])

    def log(self, lines: int = 200) -> str:
        """Return the end of what the hub, its proxy and the servers logged."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL the hub, its proxy, the servers and their kernels."""
        with contextlib.suppress(ValueError):
            RUNNING.remove(self)
        victims: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            hub = psutil.Process(self._popen.pid)
            victims = [hub, *hub.children(recursive=True)]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
        psutil.wait_procs(victims, timeout=20)
        self._popen.wait(20)
        for client in self._clients:
            client.close()
        self._http.close()

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            print(f"log of the hub:\n{self.log()}")  # shown with the failure
        self.kill()
