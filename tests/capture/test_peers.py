"""Waiting for a restored kernel's peers."""

from __future__ import annotations

import asyncio
import io
import socket
import time

import pytest

from jupyter_gpu_ckpt.capture.peers import receive_queues, wait_for_peers
from jupyter_gpu_ckpt.capture.protocol import MAX_LINE, read_events


@pytest.mark.parametrize(
    ("family", "address", "peer"),
    [
        (socket.AF_INET, "127.3.2.1", "127.3.2.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::ffff:127.3.2.1", "127.3.2.1"),
    ],
)
def test_peers(family: socket.AddressFamily, address: str, peer: str) -> None:
    with socket.socket(family) as server:
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        assert receive_queues(peer, [port]) == {port: []}
        assert asyncio.run(wait_for_peers(peer, {port: 0}, timeout=1))
        assert not asyncio.run(wait_for_peers(peer, {port: 1}, timeout=0.05))
        with socket.create_connection((peer, port)) as first, server.accept()[0] as accepted:
            assert asyncio.run(wait_for_peers(peer, {port: 1}, timeout=5))
            assert not asyncio.run(wait_for_peers(peer, {port: 2}, timeout=0.05))
            first.sendall(b"subscribe")
            deadline = time.monotonic() + 5
            while receive_queues(peer, [port]) != {port: [9]}:
                assert time.monotonic() < deadline
            assert not asyncio.run(wait_for_peers(peer, {port: 1}, timeout=0.2)), "not served yet"
            accepted.recv(100)
            assert asyncio.run(wait_for_peers(peer, {port: 1}, timeout=5))


def test_they_must_stay_for_a_while() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        server.accept()[0],
    ):
        port = server.getsockname()[1]
        began = time.monotonic()
        assert asyncio.run(wait_for_peers("127.0.0.1", {port: 1}, timeout=5, settle=0.3))
        assert time.monotonic() - began >= 0.3
        assert not asyncio.run(wait_for_peers("127.0.0.1", {port: 1}, timeout=0.1, settle=0.5))


def test_every_port_is_waited_for() -> None:
    """The sockets of one page reconnect at different moments, in any order."""
    with (
        socket.create_server(("127.0.0.1", 0)) as shell,
        socket.create_server(("127.0.0.1", 0)) as iopub,
        socket.create_connection(iopub.getsockname()),
        iopub.accept()[0],
    ):
        counts = {server.getsockname()[1]: 1 for server in (iopub, shell)}
        assert not asyncio.run(wait_for_peers("127.0.0.1", counts, timeout=0.2))
        with socket.create_connection(shell.getsockname()), shell.accept()[0]:
            assert asyncio.run(wait_for_peers("127.0.0.1", counts, timeout=5))


def test_noise_between_events_is_skipped() -> None:
    lines = [
        b"warning: not JSON",
        b'["no", "object"]',
        b'{"no": "event"}',
        b'{"event": 5}',
        b'{"event":"a","unknown":1}',
        b'{"event":"' + b"x" * (2 * MAX_LINE) + b'"}',
        b"\xff\xfe",
        b'{"event":"b"}',
        b'{"event":"cut off',
    ]
    events = read_events(io.BytesIO(b"\n".join(lines)))
    assert [event["event"] for event in events] == ["a", "b"]
