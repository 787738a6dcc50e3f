"""A test "node": namespaces of its own that share nothing but the folders given.

Own PIDs, mounts, network, host name and IPC; empty ``/tmp``, ``/run``, ``/dev/shm`` and
``/var/tmp``. It dies as a machine does: at once and with everything on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.harness.relay import Relay
from tests.harness.user import User

REPOSITORY = Path(__file__).resolve().parents[2]
HIDDEN = ("/tmp", "/run", "/dev/shm", "/var/tmp")


class Node:
    """One node, up once constructed. A context manager: leaving kills it.

    Parameters
    ----------
    hostname
        What the node calls itself.
    shared
        Folders it shares with other nodes, wherever they lie.
    burn_pids
        PIDs up to this one are taken by sleeping processes.
    for_users
        Ordinary users can reach the interpreter and the shared folders too.
    longer_up
        Seconds by which the node claims to have been up longer than this machine.
    """

    def __init__(
        self,
        hostname: str,
        shared: Sequence[Path],
        *,
        burn_pids: int = 0,
        for_users: bool = False,
        longer_up: int = 0,
    ) -> None:
        self.hostname = hostname
        keep = {REPOSITORY, Path(sys.prefix), Path(os.path.realpath(sys.base_prefix)), *shared}
        # A folder below another kept one comes along with it.
        outermost = sorted(p for p in keep if not any(q in p.parents for q in keep))
        description = {
            "hostname": hostname,
            "hide": HIDDEN,
            "keep": [str(path) for path in outermost],
            "burn_pids": burn_pids,
            "for_users": for_users,
        }
        self._unshare = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", "--net", "--mount", "--uts", "--ipc",
             "--time", f"--monotonic={longer_up}", f"--boottime={longer_up}", "--",
             sys.executable, "-I", str(Path(__file__).with_name("node_init.py")),
             json.dumps(description)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
        )  # fmt: skip
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != b"ready\n":
            raise RuntimeError(f"node {hostname} did not start: exit {self._unshare.wait(10)}")
        (init,) = psutil.Process(self._unshare.pid).children()
        self.init_pid = init.pid
        self._relays: list[Relay] = []
        self.alive = True

    def command(
        self, argv: Sequence[str], *, user: User | None = None, cwd: Path | str = "/"
    ) -> list[str]:
        """Return `argv` wrapped so that it runs in the node, as root or as `user`."""
        enter = [
            "nsenter",
            "-t",
            str(self.init_pid),
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            "-T",
            f"--wdns={cwd}",
        ]
        return [*enter, "--", *(user.command(argv) if user else argv)]

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: User | None = None,
        cwd: Path | str = "/",
        **kwargs: Any,
    ) -> subprocess.Popen[Any]:
        """Start `argv` in the node. The process itself is a child of the Popen's."""
        return subprocess.Popen(self.command(argv, user=user, cwd=cwd), **kwargs)

    def run(
        self,
        argv: Sequence[str],
        *,
        user: User | None = None,
        cwd: Path | str = "/",
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` in the node to its end; `timeout` in seconds."""
        return subprocess.run(
            self.command(argv, user=user, cwd=cwd),
            env=dict(env) if env is not None else None,
            timeout=timeout,
            check=check,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def forward(self, port: int) -> None:
        """Make the node's 127.0.0.1:`port` reachable as 127.0.0.1:`port` out here."""
        self._relays.append(Relay(port, Path(f"/proc/{self.init_pid}/ns/net")))

    def reach(self, port: int) -> None:
        """Make 127.0.0.1:`port` out here reachable as 127.0.0.1:`port` on the node."""
        namespace = Path(f"/proc/{self.init_pid}/ns/net")
        self._relays.append(Relay(port, namespace, inwards=True))

    def kill(self) -> None:
        """Let the node die: SIGKILL to its init, and with it to everything on it."""
        if not self.alive:
            return
        self.alive = False
        for relay in self._relays:
            relay.stop()
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init_pid, signal.SIGKILL)
        for pipe in (self._unshare.stdin, self._unshare.stdout):
            assert pipe is not None
            pipe.close()
        self._unshare.wait(30)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
