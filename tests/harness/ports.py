"""TCP ports for servers of tests."""

from __future__ import annotations

import contextlib
import secrets
import socket

#: Not those that Linux gives by itself to whoever asks for any, which each connection does: a
#: server binds its port a second or two after it was chosen, and other tests run meanwhile.
_PORTS = range(10_000, 32_000)


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    for _ in range(1000):
        port = secrets.choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no TCP port is free")
