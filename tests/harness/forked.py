"""Many real servers at the cost of few: one process loads what they need, and each is a fork of it.

As a program it reads lines of JSON, one for each server: `environment`, `config` (a file), `log`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

from tests.harness.client import Client, wait_for
from tests.harness.node import REPOSITORY
from tests.harness.ports import free_port
from tests.harness.server import Home, extension_config


class ForkedServers:
    """Servers with homes of their own, all ready once constructed; `processes` are theirs."""

    def __init__(
        self, homes: Sequence[Home], configs: Sequence[Mapping[str, Mapping[str, Any]]]
    ) -> None:
        self._homes = homes
        lines, self.clients = [], []
        for home, config in zip(homes, configs, strict=True):
            port, file = free_port(), home.config / "forked.json"
            others = ("jupyter_lsp", "jupyterlab", "notebook", "notebook_shim")
            merged: dict[str, Any] = {
                "ServerApp": {
                    "port": port, "port_retries": 0, "ip": "127.0.0.1", "open_browser": False,
                    "allow_root": True, "root_dir": str(home.notebooks),
                    "jpserver_extensions": {
                        **dict.fromkeys(others, False), "jupyter_gpu_ckpt": True,
                    },
                },
                "IdentityProvider": {"token": "secret-of-the-tests"},
            }  # fmt: skip
            for name, traits in extension_config().items():
                merged.setdefault(name, dict(traits))
            merged.update(config)
            file.write_text(json.dumps(merged))
            line = {
                "environment": home.environment(), "config": str(file), "log": str(_log(home)),
            }  # fmt: skip
            lines.append(json.dumps(line) + "\n")
            self.clients.append(Client(f"http://127.0.0.1:{port}/", "secret-of-the-tests"))
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.forked"], stdin=subprocess.PIPE, cwd=REPOSITORY,
            env=homes[0].environment(), start_new_session=True, text=True,
        )  # fmt: skip
        try:
            assert self._popen.stdin is not None
            self._popen.stdin.writelines(lines)
            self._popen.stdin.close()
            wait_for("all servers answer", lambda: all(map(_answers, self.clients)), 90)
        except BaseException:
            self.kill()
            raise
        self.processes = psutil.Process(self._popen.pid).children()

    def log(self, number: int) -> str:
        """What one of them logged."""
        return _log(self._homes[number]).read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL them all, with their kernels."""
        victims: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._popen.pid)
            victims = [root, *root.children(recursive=True)]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
        psutil.wait_procs(victims, timeout=20)
        self._popen.wait(20)
        for client in self.clients:
            client.close()

    def __enter__(self) -> ForkedServers:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for number in range(len(self._homes)):
                print(f"log of server {number}:\n{self.log(number)[-2000:]}")
        self.kill()


def _log(home: Home) -> Path:
    return home.path / "forked.log"


def _answers(client: Client) -> bool:
    with contextlib.suppress(requests.RequestException):
        return client.get("gpu-ckpt/api/operations", timeout=10) is not None
    return False


def _children() -> Iterator[int]:
    """Fork once for each line, and yield the children; what is forked serves, and ends here."""
    from jupyter_server.serverapp import ServerApp

    import jupyter_gpu_ckpt.app
    import jupyter_gpu_ckpt.keeper  # noqa: F401  # loaded once, for all

    for line in sys.stdin.readlines():
        if pid := os.fork():
            yield pid
            continue
        server = json.loads(line)
        os.environ.clear()
        os.environ.update(server["environment"])
        log = os.open(server["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for output in (1, 2):
            os.dup2(log, output)
        ServerApp.launch_instance([f"--config={server['config']}"])
        os._exit(0)


if __name__ == "__main__":
    for child in list(_children()):
        os.waitpid(child, 0)
