"""A machine with systemd: a container of podman and runc whose first process is that."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness.client import wait_for
from tests.harness.container import PODMAN, Container
from tests.harness.node import Node
from tests.harness.user import User


class SystemdMachine(Container):
    """One machine, up once constructed; what is run on it is run as from a login of root's.

    Parameters
    ----------
    hostname
        What the machine calls itself.
    shared
        Folders that it shares with other nodes.
    """

    def __init__(self, hostname: str, shared: Sequence[Path]) -> None:
        super().__init__(hostname, shared)
        options = [option for option in self._options if not option.startswith("--cap-drop")]
        # It makes groups of processes and mounts of its own.
        options += ["--privileged", "--systemd=always", "--tmpfs=/run/lock:notmpcopyup"]
        self._started = subprocess.Popen(
            [*PODMAN, "run", *options, "--rootfs", "/:O", "/lib/systemd/systemd",
             "--unit=basic.target"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_for("systemd is up", self._is_up, 90, 0.3)
        except BaseException:
            self.kill()
            raise

    def _is_up(self) -> bool:
        said = self.run(["systemctl", "is-system-running"], check=False).stdout.strip()
        return said in ("running", "degraded")

    def command(
        self, argv: Sequence[str], *, user: User | None = None, cwd: Path | str = "/"
    ) -> list[str]:
        """As on any node."""
        return Node.command(self, argv, user=user, cwd=cwd)

    def popen(self, argv: Sequence[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """As on any node."""
        return Node.popen(self, argv, **kwargs)

    def _end(self) -> None:
        super()._end()
        if self._started is not None:
            self._started.wait(30)
