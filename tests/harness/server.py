"""Real Jupyter servers: started as a user starts them, waited for, and killed without mercy."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil
import requests

from tests.harness.client import Client, wait_for
from tests.harness.node import HIDDEN, REPOSITORY, Node
from tests.harness.ports import free_port
from tests.harness.user import User

App = Literal["lab", "server", "notebook"]
MODULES: Mapping[App, str] = {
    "lab": "jupyterlab",
    "server": "jupyter_server",
    "notebook": "notebook",
}


class Running(Protocol):
    """What is running, with a log."""

    home: Home
    log_path: Path

    def log(self, lines: int = 200) -> str: ...


#: The servers that run now: their logs are shown when a test fails.
RUNNING: list[Running] = []


class Home:
    """A user's home folder, shared by the nodes: configuration, data, notebooks, and the store."""

    def __init__(self, path: Path, user: User | None = None) -> None:
        self.path = path
        self.user = user
        for folder in (self.config, self.data, self.notebooks, self.config / "labconfig"):
            folder.mkdir(parents=True, mode=0o700)
        (self.config / "labconfig" / "page_config.json").write_text(
            # Asks on first start whether to fetch news from the internet.
            json.dumps(
                {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
            )
        )
        self.own()

    @property
    def config(self) -> Path:
        return self.path / ".jupyter"

    @property
    def data(self) -> Path:
        return self.path / ".local" / "share" / "jupyter"

    @property
    def notebooks(self) -> Path:
        return self.path / "notebooks"

    @property
    def store(self) -> Path:
        """Where states lie when nothing else is configured."""
        return self.data / "gpu-ckpt" / "store"

    def own(self) -> None:
        """Hand everything to the user whose home this is."""
        if self.user is not None:
            self.user.own(self.path)

    def environment(self) -> dict[str, str]:
        """Return the environment of a fresh login in this home, nothing of the test's own."""
        return {
            "HOME": str(self.path),
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
            "JUPYTER_CONFIG_DIR": str(self.config),
            "JUPYTER_DATA_DIR": str(self.data),
            "JUPYTER_PLATFORM_DIRS": "1",
            **(self.user.environment() if self.user else {}),
        }

    def add_notebook(self, name: str, cells: Sequence[str] = (), kernel: str = "python3") -> str:
        """Write a notebook with the given code cells and return its path as Jupyter has it."""
        display = {"python3": "Python 3 (ipykernel)"}.get(kernel, kernel)
        language = {"python3": "python"}.get(kernel, kernel)
        notebook = {
            "cells": [
                {"cell_type": "code", "id": f"cell-{number}", "execution_count": None,
                 "metadata": {}, "outputs": [], "source": source}
                for number, source in enumerate(cells or [""])
            ],
            "metadata": {
                "kernelspec": {"name": kernel, "display_name": display, "language": language},
                "language_info": {"name": language},
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        }  # fmt: skip
        (self.notebooks / name).write_text(json.dumps(notebook))
        self.own()
        return name

    def choose(self, notebook: str, autosave: bool | dict[str, Any]) -> None:
        """Say in a notebook's metadata when its kernels are saved (docs/configuration.md)."""
        content = json.loads((self.notebooks / notebook).read_text())
        content["metadata"]["gpu_ckpt"] = {"autosave": autosave}
        (self.notebooks / notebook).write_text(json.dumps(content))
        self.own()


def _installed(relative: str) -> bool:
    return (Path(sys.prefix) / relative).exists()


def _merge(into: dict[str, Any], traits: Mapping[str, Any]) -> None:
    """Set traits, adding to those that are dictionaries."""
    for name, value in traits.items():
        into[name] = {**into.get(name, {}), **value} if isinstance(value, dict) else value


def extension_config() -> dict[str, Any]:
    """Return what an editable install lacks compared to the wheel's own data files."""
    config: dict[str, Any] = {}
    for shipped in (REPOSITORY / "jupyter-config" / "server-config").glob("*.json"):
        if not _installed(f"etc/jupyter/jupyter_server_config.d/{shipped.name}"):
            config.update(json.loads(shipped.read_text()))
    if not _installed("share/jupyter/labextensions/jupyter-gpu-ckpt"):
        links = REPOSITORY / "build" / "labextensions"
        links.mkdir(parents=True, exist_ok=True)
        built = REPOSITORY / "jupyter_gpu_ckpt" / "labextension"
        with contextlib.suppress(FileExistsError):
            (links / "jupyter-gpu-ckpt").symlink_to(built)
        config.setdefault("LabServerApp", {})["extra_labextensions_path"] = [str(links)]
    return config


class JupyterServer:
    """One running server, ready once constructed. A context manager: leaving kills it.

    Parameters
    ----------
    home
        The user's home; the server runs as that home's user.
    node
        The node it runs on; ``None`` for this machine itself.
    app
        Which application is started.
    port
        TCP port; a free one is taken by default. Give it to have a successor on the same address.
    config
        Jupyter configuration by class and trait, on top of the test defaults.
    extension
        Whether jupyter-gpu-ckpt is to be there. Without, it is a stock server.
    environment
        Variables on top of a fresh login's.
    """

    def __init__(
        self,
        home: Home,
        *,
        node: Node | None = None,
        app: App = "server",
        port: int | None = None,
        token: str = "secret-of-the-tests",
        config: Mapping[str, Mapping[str, Any]] | None = None,
        extension: bool = True,
        environment: Mapping[str, str] | None = None,
        ready_timeout: float = 60,
    ) -> None:
        self.home = home
        self.node = node
        self.port = port or free_port()
        self.token = token
        self.base_url = f"http://127.0.0.1:{self.port}/"
        merged: dict[str, dict[str, Any]] = {
            "ServerApp": {
                "open_browser": False, "port": self.port, "port_retries": 0, "ip": "127.0.0.1",
                "allow_root": True, "root_dir": str(home.notebooks), "log_level": "INFO",
            },
            "LabApp": {"expose_app_in_browser": True},
            "IdentityProvider": {"token": token},
            # What a node that died had is offered soon, so that the tests do not wait long.
            "GpuCkpt": {"lease_interval": 2.0, "lease_ttl": 8.0},
        }  # fmt: skip
        if app == "server":  # a plain server: what the others bring takes its time to load
            others = ("jupyter_lsp", "jupyterlab", "notebook", "notebook_shim")
            merged["ServerApp"]["jpserver_extensions"] = dict.fromkeys(others, False)
        stock = {"ServerApp": {"jpserver_extensions": {"jupyter_gpu_ckpt": False}}}
        for layer in (extension_config() if extension else stock, config or {}):
            for name, traits in layer.items():
                _merge(merged.setdefault(name, {}), traits)
        self.base_url += str(merged["ServerApp"].get("base_url", "/")).lstrip("/")
        config_file = home.config / f"test_{self.port}.json"
        config_file.write_text(json.dumps(merged))
        home.own()
        self.log_path = home.path / f"server-{self.port}-{secrets.token_hex(3)}.log"
        argv = [sys.executable, "-m", MODULES[app], f"--config={config_file}"]
        with self.log_path.open("wb") as log:
            kwargs: dict[str, Any] = {
                "stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT,
                "env": {**home.environment(), **(environment or {})}, "start_new_session": True,
            }  # fmt: skip
            if node is not None:
                self._popen = node.popen(argv, user=home.user, cwd=home.notebooks, **kwargs)
                node.forward(self.port)
            elif home.user is not None:
                self._popen = subprocess.Popen(
                    home.user.command(argv), cwd=home.notebooks, **kwargs
                )
            else:
                self._popen = subprocess.Popen(argv, cwd=home.notebooks, **kwargs)
        RUNNING.append(self)
        self.client = Client(self.base_url, token)
        try:
            self._wait_ready(ready_timeout)
            if extension:
                self.client.get("gpu-ckpt/api/operations")  # fails when it did not load
        except BaseException:
            self.kill()
            raise

    def _wait_ready(self, timeout: float) -> None:
        def ready() -> bool:
            if self._popen.poll() is not None:
                raise AssertionError(f"the server ended: {self._popen.returncode}\n{self.log()}")
            try:
                return self.client.get("api/status", timeout=5) is not None
            except requests.RequestException:
                return False

        try:
            wait_for("the server answers", ready, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    @property
    def process(self) -> psutil.Process:
        """The server's own process, as seen from this machine."""
        process = psutil.Process(self._popen.pid)
        return process.children()[0] if self.node is not None else process

    def log(self, lines: int = 200) -> str:
        """Return the end of what the server logged."""
        text = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def kill(self, *, kernels: bool = True) -> None:
        """SIGKILL the server, together with its kernels or (``kernels=False``) alone."""
        with contextlib.suppress(ValueError):
            RUNNING.remove(self)
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            server = self.process
            victims = [server, *(server.children(recursive=True) if kernels else [])]
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
            psutil.wait_procs(victims, timeout=20)
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait(20)
        self.client.close()

    def stop(self, timeout: float = 30) -> None:
        """End the server in an orderly way, as SIGTERM does."""
        with contextlib.suppress(ValueError):
            RUNNING.remove(self)
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            self.process.terminate()
        self._popen.wait(timeout)
        self.client.close()

    def host_pid(self, pid: int) -> int:
        """Return this machine's PID of the server's descendant that calls itself `pid`."""
        if self.node is None:
            return pid
        for process in psutil.Process(self.node.init_pid).children(recursive=True) + (
            self.process.children(recursive=True)
        ):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                inner = next(x for x in status.splitlines() if x.startswith("NSpid:")).split()[1:]
                if str(pid) in inner[1:]:
                    return process.pid
        raise AssertionError(f"no process {pid} on node {self.node.hostname}")

    def __enter__(self) -> JupyterServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


@contextlib.contextmanager
def shared_folder(name: str) -> Iterator[Path]:
    """Yield an empty folder that nodes can share, gone afterwards."""
    base = REPOSITORY / "build"
    if any(base.is_relative_to(folder) for folder in HIDDEN):
        base = Path("/var/lib/jupyter-gpu-ckpt")
    path = base / "tests" / f"{name}-{secrets.token_hex(4)}"
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        subprocess.run(["rm", "-rf", "--one-file-system", str(path)], check=True)
