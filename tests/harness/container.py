"""A node that is a container of podman and runc, with the machine's own root file system."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.client import wait_for
from tests.harness.node import REPOSITORY, Node
from tests.harness.node_init import closed_to_others
from tests.harness.relay import Relay
from tests.harness.user import User

PODMAN = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs")


def _opened(shared: Sequence[Path]) -> list[str]:
    """Options by which an ordinary user reaches the interpreter and the checkout."""
    kept = [REPOSITORY, Path(sys.prefix), Path(os.path.realpath(sys.base_prefix))]
    options = []
    for closed in {folder for path in [*kept, *shared] if (folder := closed_to_others(path))}:
        # An empty folder in its place; a tmpfs would get the mode of the one below it.
        empty = shared[0] / f"in-place-of-{closed.name}"
        empty.mkdir(exist_ok=True)
        inside = {path for path in kept if closed in path.parents}
        options.append(f"--volume={empty}:{closed}")
        options += [f"--volume={path}:{path}:ro" for path in inside]
    return options


class Container(Node):
    """One container; it begins with the first command, and ends with it.

    What it writes outside of the shared folders goes to an overlay, and is lost with it.

    Parameters
    ----------
    hostname
        What the container calls itself.
    shared
        Folders that it shares with other nodes.
    capabilities
        What its processes have, also those of an ordinary user (podman makes them ambient).
    seccomp
        Path of a profile, ``unconfined``, or ``None`` for the engine's own.
    """

    def __init__(
        self,
        hostname: str,
        shared: Sequence[Path],
        *,
        capabilities: Sequence[str] = (),
        seccomp: Path | str | None = "unconfined",
    ) -> None:
        self.hostname = hostname
        self.name = f"gpu-ckpt-{secrets.token_hex(4)}"
        options = [
            "--rm", f"--name={self.name}", f"--hostname={hostname}", "--network=none",
            "--cap-drop=ALL", "--tmpfs=/tmp:notmpcopyup", "--tmpfs=/run:notmpcopyup",
            # Not the machine's own limits, which a container may not have everywhere.
            "--ulimit=nproc=4096:4096", "--ulimit=nofile=1024:4096",
            *(f"--volume={folder}:{folder}" for folder in shared), *_opened(shared),
        ]  # fmt: skip
        if capabilities:
            options.append(f"--cap-add={','.join(capabilities)}")
        if seccomp is not None:
            options.append(f"--security-opt=seccomp={seccomp}")
        self._options = options
        self._init: int | None = None
        self._started: subprocess.Popen[Any] | None = None
        self._relays: list[Relay] = []
        self.alive = True

    @property
    def init_pid(self) -> int:
        """PID of the container's first process, once that is there."""
        if self._init is None:
            self._init = wait_for(f"container {self.name} is up", self._look, 60)
        assert self._init is not None
        return self._init

    def popen(self, argv: Sequence[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """Start the container with `argv`."""
        self._started = super().popen(argv, **kwargs)
        return self._started

    def _look(self) -> int | None:
        assert self._started is not None and self._started.poll() is None, "it ended"
        found = subprocess.run(
            [*PODMAN, "inspect", self.name], capture_output=True, text=True, timeout=30
        )
        state = json.loads(found.stdout)[0]["State"] if found.returncode == 0 else {}
        return state["Pid"] if state.get("Running") else None

    def command(
        self, argv: Sequence[str], *, user: User | None = None, cwd: Path | str = "/"
    ) -> list[str]:
        """Return `argv` wrapped so that it is the container's first process."""
        who = f"--user={user.uid}:{user.gid}" if user is not None else "--user=0:0"
        return [
            *PODMAN, "run", *self._options, who, f"--workdir={cwd}", "--env=*",
            "--rootfs", "/:O", *argv,
        ]  # fmt: skip

    def inside(self, argv: Sequence[str], env: Mapping[str, str]) -> str:
        """Run `argv` in the running container, as its user, and return what it said."""
        return subprocess.run(
            [*PODMAN, "exec", "--env=*", self.name, *argv],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, env=env,
        ).stdout  # fmt: skip

    def _end(self) -> None:
        """SIGKILL to everything in it, and remove it."""
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(
                [*PODMAN, "rm", "--force", "--time=0", self.name],
                check=True, capture_output=True, timeout=60,
            )  # fmt: skip
