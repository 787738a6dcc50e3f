"""Which server, kernel or state the user means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..models import Kernel, LostKernel, State
from .client import Server
from .errors import CliError
from .running import running_servers

T = TypeVar("T", Kernel, State, LostKernel)


@dataclass
class Target:
    """The servers a command may talk to, from its ``--url`` and ``--token``."""

    url: str | None
    token: str | None

    @cached_property
    def servers(self) -> list[Server]:
        """The server that ``--url`` names, else all that run here for this user.

        Raises
        ------
        CliError
            ``no_server`` when none runs.
        """
        running = running_servers()
        if self.url:
            server = Server(self.url, self.token)
            for info in running:
                if _same(info.url, server.url):
                    return [Server(self.url, self.token or info.token, root_dir=info.root_dir)]
            return [server]
        if not running:
            raise CliError(
                "No Jupyter server is running here.",
                "no_server",
                hint="Start one, or give --url and --token of a server elsewhere.",
            )
        # A server found here is this user's own, and often has a certificate of its own making.
        found = [
            Server(info.url, self.token or info.token, root_dir=info.root_dir, verify=False)
            for info in running
        ]
        # In a terminal or notebook of a server, that server is meant.
        own = os.environ.get("JUPYTER_SERVER_URL")
        mine = [server for server in found if own and _same(own, server.url)]
        return mine or found

    def one(self) -> Server:
        """The server, for commands that name no kernel or state.

        Raises
        ------
        CliError
            ``ambiguous`` when several run; ``no_server``.
        """
        usable = self.servers
        if len(usable) > 1:
            usable = [server for server, _ in self._ask(list[Kernel], "kernels")]
        if len(usable) > 1:
            raise CliError(
                "Several Jupyter servers are running here:\n"
                + "\n".join(f"  {server.url}" for server in usable),
                "ambiguous",
                hint="Say which one with --url.",
                exit_code=2,
            )
        return usable[0]

    def kernel(self, wanted: str) -> tuple[Server, Kernel]:
        """The running kernel with that id, prefix of an id, or notebook path.

        Raises
        ------
        CliError
            ``unknown_kernel`` or ``ambiguous``.
        """
        known = [
            (server, kernel)
            for server, kernels in self._ask(list[Kernel], "kernels")
            for kernel in kernels
        ]
        by_id = _by_id(known, wanted, [kernel.id for _, kernel in known])
        if by_id:
            return _single(by_id, wanted, "kernel")
        by_path = [
            (server, kernel)
            for server, kernel in known
            if kernel.path and kernel.path in _paths(wanted, server.root_dir)
        ]
        if by_path:
            return _single(by_path, wanted, "kernel")
        raise CliError(
            f"No running kernel has the id or notebook path {wanted}.",
            "unknown_kernel",
            hint="'jupyter gpu-ckpt kernels' lists them.",
        )

    def lost(self, wanted: str) -> tuple[Server, LostKernel]:
        """The lost kernel with that id, prefix of an id, or notebook path; as :meth:`kernel`."""
        known = [
            (server, lost)
            for server, found in self._ask(list[LostKernel], "lost")
            for lost in found
        ]
        matches = _by_id(known, wanted, [lost.kernel_id for _, lost in known]) or [
            (server, lost)
            for server, lost in known
            if lost.path and lost.path in _paths(wanted, server.root_dir)
        ]
        if matches:
            # Servers that share a store all know it, and any of them can bring it back.
            first = matches[0]
            return _single([m for m in matches if m[0] is first[0]], wanted, "lost kernel")
        raise CliError(
            f"No lost kernel has the id or notebook path {wanted}.",
            "unknown_kernel",
            hint="'jupyter gpu-ckpt lost' lists them.",
        )

    def state(self, wanted: str) -> tuple[Server, str]:
        """The server to ask about a state, and the state's full id.

        A server where the state's kernel runs comes first; an id that no list has (a damaged
        state's, say) is left to the server to judge.

        Raises
        ------
        CliError
            ``ambiguous`` when several states begin with `wanted`.
        """
        known = [
            (server, state)
            for server, states in self._ask(list[State], "states")
            for state in states
        ]
        matches = _by_id(known, wanted, [state.id for _, state in known])
        if not matches:
            return self.servers[0], wanted
        ids = {state.id for _, state in matches}
        if len(ids) > 1:
            raise _ambiguous(wanted, "state", sorted(ids))
        if len(matches) > 1:
            for server, state in matches:
                if any(k.id == state.kernel_id for k in server.get(list[Kernel], "kernels")):
                    return server, state.id
        server, state = matches[0]
        return server, state.id

    def _ask(self, kind: type[list[T]], resource: str) -> list[tuple[Server, list[T]]]:
        """Ask every server; one that does not answer counts only where it is the only one."""
        answers = []
        failure: CliError | None = None
        for server in self.servers:
            try:
                answers.append((server, server.get(kind, resource)))
            except CliError as error:
                failure = failure or error
        if not answers and failure is not None:
            raise failure
        return answers


def api_path(wanted: str, root_dir: str | None) -> str:
    """Path of a notebook as the server writes it, from how the user wrote it."""
    return _paths(wanted, root_dir)[0]


def _paths(wanted: str, root_dir: str | None) -> list[str]:
    """What the server may call the notebook that the user calls `wanted`."""
    paths = []
    if root_dir:
        file = os.path.abspath(os.path.expanduser(wanted))
        inside = os.path.relpath(os.path.realpath(file), os.path.realpath(root_dir))
        if not inside.startswith("..") and os.path.exists(file):
            paths.append(inside)
    paths.append(wanted.strip("/"))
    return paths


def _by_id(
    known: Sequence[tuple[Server, T]], wanted: str, ids: Sequence[str]
) -> list[tuple[Server, T]]:
    exact = [entry for entry, id in zip(known, ids, strict=True) if id == wanted]
    if exact or not wanted:
        return exact
    return [entry for entry, id in zip(known, ids, strict=True) if id.startswith(wanted)]


def _single(matches: list[tuple[Server, T]], wanted: str, word: str) -> tuple[Server, T]:
    if len(matches) == 1:
        return matches[0]
    raise _ambiguous(wanted, word, [_describe(server, it) for server, it in matches])


def _describe(server: Server, it: Any) -> str:
    id = it.kernel_id if isinstance(it, LostKernel) else it.id
    return f"{id}  {it.path or '-'}  {server.url}"


def _ambiguous(wanted: str, word: str, choices: list[str]) -> CliError:
    return CliError(
        f"{wanted} could be more than one {word}:\n" + "\n".join(f"  {line}" for line in choices),
        "ambiguous",
        hint="Give more of the id, or --url.",
        exit_code=2,
    )


def _same(one: str, other: str) -> bool:
    """Whether two URLs mean the same server on this machine."""
    a, b = urlsplit(one), urlsplit(other)
    hosts = {_loopback(a.hostname), _loopback(b.hostname)}
    return (
        len(hosts) == 1
        and (a.scheme, a.port) == (b.scheme, b.port)
        and a.path.rstrip("/") == b.path.rstrip("/")
    )


def _loopback(host: str | None) -> str:
    return "localhost" if host in ("localhost", "127.0.0.1", "::1", "0.0.0.0") else host or ""
