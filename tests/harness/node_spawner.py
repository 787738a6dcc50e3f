"""A spawner that starts each server on a fresh node or container; runs in the hub's process."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import psutil
from jupyterhub.spawner import Spawner
from traitlets import Dict, Integer, List, Unicode

from tests.harness.container import Container
from tests.harness.node import Node
from tests.harness.server import free_port
from tests.harness.user import User


class NodeSpawner(Spawner):  # type: ignore[misc]
    """As a spawner for a cluster: every start lands on another node, none survives its own."""

    accounts = Dict(
        config=True,
        help="By user of the hub: the account it has on the nodes (`user`), and its `home`.",
    )
    shared = Unicode(config=True, help="Folder that all nodes share.")
    capabilities = List(
        Unicode(), None, allow_none=True, config=True,
        help="Nodes are containers that have these. None: they are not containers.",
    )  # fmt: skip
    hub_port = Integer(config=True, help="Port at which nodes reach the hub, on 127.0.0.1.")
    log_path = Unicode(config=True, help="File to which servers log.")

    node: Node | None = None
    popen: Any = None

    async def start(self) -> tuple[str, int]:
        account = self.accounts[self.user.name]
        self.port = free_port()
        await asyncio.to_thread(self._start, account)
        return "127.0.0.1", self.port

    def _start(self, account: dict[str, str]) -> None:
        name = f"node-{secrets.token_hex(3)}"
        shared = [Path(self.shared)]
        if self.capabilities is None:
            self.node = node = Node(name, shared, for_users=True)
        else:
            self.node = node = Container(name, shared, capabilities=self.capabilities)
        with open(self.log_path, "ab") as log:
            self.popen = node.popen(
                [*self.cmd, *self.get_args()],
                user=User(account["user"]),
                cwd=account["home"],
                env=self.get_env(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        node.reach(self.hub_port)
        node.forward(self.port)

    def get_env(self) -> dict[str, str]:
        home = self.accounts[self.user.name]
        return {**super().get_env(), **home["environment"]}

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = super().get_state()
        if self.node is not None:
            state |= {"hostname": self.node.hostname, "init_pid": self.node.init_pid}
        return state

    async def poll(self) -> int | None:
        if self.popen is None:
            return 0
        status: int | None = self.popen.poll()
        return status

    async def stop(self, now: bool = False) -> None:
        if self.node is None:
            return
        if self.popen.poll() is None:
            process = psutil.Process(self.popen.pid)  # podman passes signals on
            for server in [process] if self.capabilities is not None else process.children():
                server.terminate()
        try:
            await asyncio.to_thread(self.popen.wait, 1 if now else 60)
        finally:
            await asyncio.to_thread(self.node.kill)
