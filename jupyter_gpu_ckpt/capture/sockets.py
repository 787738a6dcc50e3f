"""The network sockets of an image: who is connected to whom, and what a restore can keep.

Connections between processes of the tree live on. The outside world knows nothing of a
restored kernel: a connection to it comes back as a fresh, closed socket, and the library
that holds it sees an ordinary broken connection. Addresses that this node lacks (the old
node's own) would make CRIU fail; sockets that have them move to the loopback interface.
"""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Collection, Iterable
from typing import Any, Final, Literal, NamedTuple

from .images_proto import INETSK, UNIXSK, Image

_CLOSE: Final = 7
_LISTEN: Final = 10
_EXTERNAL: Final = 1  # unix_sk_entry.uflags: a socket that is not in the image
_MAPPED_V4: Final = bytes(10) + b"\xff\xff"

#: States of a connection that the other end has closed: CLOSE_WAIT, LAST_ACK, CLOSING, TIME_WAIT.
_ENDED_THERE: Final = frozenset({6, _CLOSE, 8, 9, 11})

End = tuple[bytes, int]


class Peer(NamedTuple):
    """The other end of a connection; ``port`` is this end's where it was ``incoming``."""

    protocol: Literal["tcp", "udp", "unix"]
    address: str
    port: int | None
    incoming: bool


def listeners(files: Image) -> list[tuple[str, int]]:
    """Addresses and ports of the TCP sockets that listen, sorted."""
    return sorted(
        {
            (_text(_address(entry.src_addr)), entry.src_port)
            for entry in _sockets(files, socket.IPPROTO_TCP)
            if entry.state == _LISTEN
        }
    )


def close_outside_connections(files: Image) -> bool:
    """Make every TCP connection with an end outside of the image unconnected.

    A state other than "established" (half closed, still connecting) is treated alike:
    what counts is whether the other end is in the image. Returns whether anything changed.
    """
    changed = False
    for entry in _leading_outside(files):
        entry.state = _CLOSE
        entry.backlog = 0
        _forget_source(entry)
        _forget_destination(entry)
        changed = True
    return changed


def outside_peers(files: Image) -> list[Peer]:
    """Whom the tree was connected to outside of it, on the node where it was saved.

    To be called before the images are edited. A TCP connection that its other end had closed is
    over, and left out.
    """
    tcp = list(_sockets(files, socket.IPPROTO_TCP))
    udp = list(_sockets(files, socket.IPPROTO_UDP, socket.IPPROTO_UDPLITE))
    serving = {_ends(entry)[0] for entry in tcp if entry.state == _LISTEN}
    ports = {port for _, port in serving}
    found = []
    for entry in _leading_outside(files):
        there = _ends(entry)[1]
        if entry.state in _ENDED_THERE or _answers(there, serving):  # not accepted yet
            continue
        incoming = entry.src_port in ports
        found.append(
            Peer("tcp", _text(there[0]), entry.src_port if incoming else there[1], incoming)
        )
    receiving = {_ends(entry)[0] for entry in udp}
    for entry in udp:
        there = _ends(entry)[1]
        if entry.dst_port and not _answers(there, receiving):
            found.append(Peer("udp", _text(there[0]), there[1], False))
    entries = {e.usk.ino: e.usk for e in files.messages if e.type == UNIXSK}
    for entry in entries.values():
        other = entries.get(entry.peer)
        if other is not None and other.uflags & _EXTERNAL and other.name.strip(b"\0"):
            name = other.name.rstrip(b"\0").replace(b"\0", b"@", 1)
            found.append(Peer("unix", name.decode(errors="replace"), None, False))
    return found


def _answers(there: End, bound: Collection[End]) -> bool:
    """Whether one of these sockets of this node is the one at an address."""
    address, port = there
    anywhere = {(bytes(4), port), (bytes(16), port)} & set(bound)
    return there in bound or (bool(anywhere) and is_local(address))


def _leading_outside(files: Image) -> list[Any]:
    """TCP connections whose other end is not in the image."""
    connections = [e for e in _sockets(files, socket.IPPROTO_TCP) if e.dst_port]
    known = {_ends(entry) for entry in connections}
    return [entry for entry in connections if _ends(entry)[::-1] not in known]


def close_outside_unix_sockets(files: Image) -> bool:
    """Make Unix sockets unconnected whose other end is neither in the image nor here.

    CRIU itself connects datagram sockets to a name outside of the image again (a logging
    service, say), and fails when there is none. Returns whether anything changed.
    """
    entries = {e.usk.ino: e.usk for e in files.messages if e.type == UNIXSK}
    changed = False
    for entry in entries.values():
        if not entry.peer:
            continue
        other = entries.get(entry.peer)
        if other is None or (other.uflags & _EXTERNAL and not _has_listener(other)):
            entry.peer = 0
            entry.state = _CLOSE
            changed = True
    return changed


def _has_listener(entry: Any) -> bool:
    name = entry.name if entry.name.startswith(b"\0") else entry.name.rstrip(b"\0")
    try:
        with socket.socket(socket.AF_UNIX, entry.type) as probe:
            probe.connect(name)
    except OSError:
        return False
    return True


def move_to_this_node(files: Image) -> bool:
    """Give sockets addresses that exist here. Returns whether anything changed.

    To be called after :func:`close_outside_connections`. A TCP address of another node is
    replaced by a loopback address, the same everywhere in the image, so that connections
    inside the tree still match. A UDP socket loses a source address that is not here, and
    a destination that cannot be reached.
    """
    moved: dict[bytes, bytes] = {}
    tcp = list(_sockets(files, socket.IPPROTO_TCP))
    for entry in tcp:
        address = _address(entry.src_addr)
        if entry.src_port and address not in moved and not is_local(address):
            moved[address] = _loopback_for(address)
    changed = bool(moved)
    for entry in tcp:
        for words in (entry.src_addr, entry.dst_addr):
            target = moved.get(_address(words))
            if target is not None:
                words[:] = _words(target, len(words))
                entry.ClearField("ifname")
    for entry in _sockets(files, socket.IPPROTO_UDP, socket.IPPROTO_UDPLITE):
        if entry.src_port and not is_local(_address(entry.src_addr)):
            entry.src_addr[:] = [0] * len(entry.src_addr)
            entry.ClearField("ifname")
            changed = True
        if entry.dst_port and not _can_reach(_address(entry.dst_addr), entry.dst_port):
            entry.state = _CLOSE
            _forget_destination(entry)
            changed = True
    return changed


def move_beside(files: Image, address: str) -> bool:
    """Give every IPv4 socket an address of its own, so that a copy can run beside its original.

    To be called after :func:`close_outside_connections`. Sockets on the loopback network, and
    those that take connections from everywhere, keep their ports and move to ``address``;
    connections inside the tree still match. Returns whether anything changed.
    """
    target = socket.inet_aton(address)
    changed = False
    for entry in _sockets(files, socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_UDPLITE):
        ends = [(entry.src_addr, entry.src_port)]
        if entry.proto == socket.IPPROTO_TCP:
            ends.append((entry.dst_addr, entry.dst_port))
        for words, port in ends:
            here = _address(words)
            if port and len(here) == 4 and here != target and (here[0] == 127 or not any(here)):
                words[:] = _words(target, len(words))
                entry.ClearField("ifname")
                changed = True
    return changed


def is_local(address: bytes) -> bool:
    """Whether a socket can be bound to an address here; packed, network order."""
    family = _family(address)
    if address[:2] == b"\xfe\x80" and family == socket.AF_INET6:
        return True  # link-local: CRIU needs the interface, and says so
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((_text(address), 0))
    except OSError:
        return False
    return True


def _can_reach(address: bytes, port: int) -> bool:
    if not any(address):
        return True
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((_text(address), port))
    except PermissionError:  # a broadcast address: the restored socket has the option set
        return True
    except OSError:
        return False
    return True


def _sockets(files: Image, *protocols: int) -> Iterable[Any]:
    for entry in files.messages:
        if entry.type == INETSK and entry.isk.proto in protocols:
            yield entry.isk


def _ends(entry: Any) -> tuple[End, End]:
    return (
        (_address(entry.src_addr), entry.src_port),
        (_address(entry.dst_addr), entry.dst_port),
    )


def _address(words: Iterable[int]) -> bytes:
    """Packed address; IPv4-mapped IPv6 becomes IPv4, so that both ends compare equal."""
    raw = b"".join(struct.pack("=I", word) for word in words)
    return raw[12:] if raw[:12] == _MAPPED_V4 else raw


def _words(address: bytes, count: int) -> list[int]:
    if len(address) == 4 and count == 4:
        address = _MAPPED_V4 + address
    return list(struct.unpack(f"={count}I", address))


def _loopback_for(address: bytes) -> bytes:
    """An address of 127/8 that only sockets of this address get; IPv6 has but one."""
    if len(address) == 16:
        return bytes(15) + b"\x01"
    digest = hashlib.blake2s(address, digest_size=2).digest()
    return bytes([127, 255, digest[0], digest[1] % 254 + 1])


def _forget_source(entry: Any) -> None:
    entry.src_port = 0
    entry.src_addr[:] = [0] * len(entry.src_addr)
    entry.ClearField("ifname")


def _forget_destination(entry: Any) -> None:
    entry.dst_port = 0
    entry.dst_addr[:] = [0] * len(entry.dst_addr)


def _family(address: bytes) -> socket.AddressFamily:
    return socket.AF_INET if len(address) == 4 else socket.AF_INET6


def _text(address: bytes) -> str:
    return socket.inet_ntop(_family(address), address)
