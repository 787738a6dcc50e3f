"""Are the server's sockets connected to a restored kernel again?"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

_ESTABLISHED: Final = "01"
_POLL: Final = 0.01  # seconds between looks at the table


async def wait_for_peers(
    ip: str, counts: Mapping[int, int], *, timeout: float, settle: float = 0.05
) -> bool:
    """Wait until peers are connected to the kernel's ports and have been served.

    Called by the provisioner while a restored kernel's main thread is held. Each socket of the
    server reconnects on its own, at a moment of its own; what the kernel publishes, replies or
    asks before that is lost.

    Parameters
    ----------
    ip
        The kernel's address.
    counts
        For TCP ports of the kernel, how many connections to wait for.
    timeout
        Seconds.
    settle
        Seconds for which the connections must stay, with nothing left to read on the
        kernel's side (its I/O thread has then seen their handshakes and subscriptions).

    Returns
    -------
    bool
        Whether they came in time.
    """
    deadline = time.monotonic() + timeout
    since: float | None = None
    while True:
        queues = receive_queues(ip, counts)
        now = time.monotonic()
        if all(len(queues[port]) >= counts[port] and not any(queues[port]) for port in counts):
            since = now if since is None else since
            if now - since >= settle:
                return True
        else:
            since = None
        if now >= deadline:
            return False
        await asyncio.sleep(_POLL)


def receive_queues(ip: str, ports: Collection[int]) -> dict[int, list[int]]:
    """Bytes waiting to be read on each established connection to a local address, by port.

    The tables are read once for all ports: they have a line for each connection of the node.
    """
    wanted = {f"{name}:{port:04X}": port for name in _kernel_names(ip) for port in ports}
    found: dict[int, list[int]] = {port: [] for port in ports}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:  # no IPv6 here
            continue
        for line in lines:
            fields = line.split()
            if fields[1] in wanted and fields[3] == _ESTABLISHED:
                found[wanted[fields[1]]].append(int(fields[4].partition(":")[2], 16))
    return found


def _kernel_names(ip: str) -> list[str]:
    """An address as the kernel's tables write it; IPv4 also in its IPv6-mapped form."""
    address = ipaddress.ip_address(ip)
    if address.version == 4:
        packed = socket.inet_aton(ip)
        return [_words(packed), _words(bytes(10) + b"\xff\xff" + packed)]
    return [_words(address.packed)]


def _words(packed: bytes) -> str:
    return "".join(
        f"{int.from_bytes(packed[i : i + 4], sys.byteorder):08X}" for i in range(0, len(packed), 4)
    )
