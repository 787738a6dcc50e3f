"""Connections inside the tree live on; those to the outside come back closed."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capture import images

from .conftest import RunningKernel

_HELPERS = """
import socket, time

def pair(family, address, to=None):
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen(5)
    here = socket.socket(socket.AF_INET if to else family)
    here.connect((to or address, listener.getsockname()[1]))
    there, _ = listener.accept()
    return listener, here, there

def receive(connection):
    connection.settimeout(5)
    try:
        return connection.recv(100).decode()
    except OSError as error:
        return type(error).__name__
"""


@pytest.fixture
def outside() -> Iterator[int]:
    """The port of a server that is not part of any tree, and accepts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_connections_inside_the_tree_live_on(kernel: RunningKernel) -> None:
    kernel.run(
        _HELPERS
        + """
pairs = [
    pair(socket.AF_INET, "127.0.0.1"), pair(socket.AF_INET6, "::1"),
    pair(socket.AF_INET6, "::", "127.0.0.1"),  # one end is IPv4, the other IPv4-mapped IPv6
]
for _, here, there in pairs:
    here.sendall(b"on its way")
half = pair(socket.AF_INET, "127.0.0.1")
half[1].shutdown(socket.SHUT_WR)
near, far = socket.socketpair()
near.sendall(b"on its way")
udp, peer = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
udp.bind(("127.0.0.1", 0))
peer.connect(udp.getsockname())
"""
    )
    images_dir, _ = kernel.dump()
    kernel.kill()
    kernel.restore(images_dir)
    printed = kernel.run(
        """
for listener, here, there in pairs:
    print(receive(there))
    there.sendall(b"answer")
    print(receive(here))
    new = socket.create_connection(("127.0.0.1", listener.getsockname()[1])) \\
        if listener.family == socket.AF_INET else None
print(repr(receive(half[2])))
half[2].sendall(b"still open")
print(receive(half[1]))
print(receive(far))
peer.send(b"datagram")
print(receive(udp))
"""
    )
    assert printed.splitlines() == [
        *["on its way", "answer"] * 3,
        "''",
        "still open",
        "on its way",
        "datagram",
    ]


def test_connections_to_the_outside_come_back_closed(kernel: RunningKernel, outside: int) -> None:
    kernel.run(
        _HELPERS
        + f"""
established = socket.create_connection(("127.0.0.1", {outside}))
half_closed = socket.create_connection(("127.0.0.1", {outside}))
half_closed.shutdown(socket.SHUT_WR)
full = socket.socket()
full.bind(("127.0.0.1", 0))
full.listen(0)
connecting = [socket.socket() for _ in range(6)]
for one in connecting:  # more than a full listener takes: some stay in SYN_SENT
    one.setblocking(False)
    one.connect_ex(full.getsockname())
left = full.accept()[0], full.close()
one = two = None
orphan = pair(socket.AF_INET, "127.0.0.1")
orphan[1].close()
bound = socket.socket()
bound.bind(("127.0.0.1", 0))
port = bound.getsockname()[1]
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 0))
datagram_port = datagrams.getsockname()[1]
"""
    )
    images_dir, _ = kernel.dump()
    assert kernel.run("print(established.send(b'x'))") == "1\n", "the running kernel keeps its own"
    kernel.kill()
    kernel.restore(images_dir)
    printed = kernel.run(
        f"""
try:
    established.sendall(b"x")
except OSError as error:
    print(type(error).__name__)
print(receive(established), receive(half_closed))
print(repr(receive(orphan[2])))
print(bound.getsockname()[1] == port, datagrams.getsockname()[1] == datagram_port)
print(socket.create_connection(("127.0.0.1", {outside})) is not None)
"""
    )
    assert printed.splitlines() == ["BrokenPipeError", "OSError OSError", "''", "True True", "True"]


def test_connections_that_nobody_has_accepted_yet(kernel: RunningKernel) -> None:
    """A browser may just be connecting to a server in a kernel that is busy."""
    kernel.run(
        _HELPERS
        + """
server = socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(server.getsockname())
"""
    )
    port = int(kernel.run("print(server.getsockname()[1])"))
    with socket.create_connection(("127.0.0.1", port)) as waiting:
        waiting.sendall(b"hello")
        images_dir, _ = kernel.dump()
        printed = kernel.run("server.accept(); one, _ = server.accept(); print(receive(one))")
        assert printed == "hello\n", "the running kernel keeps them"
    kernel.kill()
    kernel.restore(images_dir)
    with socket.create_connection(("127.0.0.1", port)) as waiting:
        waiting.sendall(b"hello")
        printed = kernel.run("one, _ = server.accept(); print(receive(one), receive(inside))")
        assert printed == "hello OSError\n"


def test_unix_sockets_to_the_outside(kernel: RunningKernel, tmp_path: Path) -> None:
    """One that nobody accepted comes back closed; a datagram one finds its service again."""
    stream, service, gone = (str(tmp_path / name) for name in ("stream", "service", "gone"))
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        listener.bind(stream)
        listener.listen(1)
        datagrams.bind(service)
        other.bind(gone)
        kernel.run(
            _HELPERS
            + f"""
waiting = socket.socket(socket.AF_UNIX)
waiting.connect({stream!r})
log, lost = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
log.connect({service!r})
lost.connect({gone!r})
"""
        )
        images_dir, _ = kernel.dump()
        kernel.kill()
        Path(gone).unlink()
        kernel.restore(images_dir)
        printed = kernel.run(
            """
for one in (waiting, lost):
    try:
        one.send(b"x")
    except OSError as error:
        print(type(error).__name__)
print(log.send(b"hello"))
"""
        )
        assert printed.splitlines() == ["OSError", "OSError", "5"]
        datagrams.settimeout(5)
        assert datagrams.recv(100) == b"hello"


@pytest.fixture
def node_address() -> Iterator[tuple[str, str]]:
    """Addresses that this node has now and will not have any more; call ``ip`` as root."""
    addresses = ("198.51.100.77", "2001:db8::77")
    for address in addresses:
        subprocess.run(["ip", "address", "add", address, "dev", "lo", "nodad"], check=False)
    yield addresses
    _remove(addresses)


def _remove(addresses: tuple[str, str]) -> None:
    for address, bits in zip(addresses, ("32", "128"), strict=True):
        subprocess.run(
            ["ip", "address", "del", f"{address}/{bits}", "dev", "lo"],
            check=False,
            stderr=subprocess.DEVNULL,
        )


def test_sockets_on_addresses_of_the_old_node(
    kernel: RunningKernel, node_address: tuple[str, str]
) -> None:
    kernel.run(
        _HELPERS
        + f"""
pairs = [pair(socket.AF_INET, {node_address[0]!r}), pair(socket.AF_INET6, {node_address[1]!r})]
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(({node_address[0]!r}, 0))
to_nowhere = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
to_nowhere.connect(({node_address[1]!r}, 9))
"""
    )
    images_dir, _ = kernel.dump()
    kernel.kill()
    _remove(node_address)
    images.prepare_for_restore(images_dir)
    kernel.restore(images_dir)
    printed = kernel.run(
        """
for listener, here, there in pairs:
    here.sendall(b"hello")
    print(receive(there))
    socket.create_connection(listener.getsockname()[:2])
    print(listener.accept() is not None)
"""
    )
    assert printed.splitlines() == ["hello", "True"] * 2
