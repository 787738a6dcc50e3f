"""How the server reaches a kernel: its own loopback address, ports and key."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from jupyter_client import localinterfaces
from jupyter_client.connect import LocalPortCache, port_names
from jupyter_client.kernelspec import NoSuchKernel

#: Addresses that stand for "this machine, no wish in particular".
_DEFAULT_ADDRESSES: Final = frozenset({"127.0.0.1", "localhost", ""})


def own_address(kernel_id: str) -> str:
    """The loopback address on which the kernel of this id listens.

    It follows from the id alone, so that the kernel finds its ports free on every node it is
    restored on. Never 127.0.0.x nor 127.255.x.x: other programs live there.
    """
    digest = hashlib.blake2b(kernel_id.encode(), digest_size=8).digest()
    second = 1 + digest[0] % 254
    return f"127.{second}.{digest[1]}.{1 + digest[2] % 254}"


def is_own_address(address: str) -> bool:
    """Whether this is an address that :func:`own_address` may give."""
    parts = address.split(".")
    return len(parts) == 4 and parts[0] == "127" and parts[1] not in ("0", "255")


def wants_own_address(km: Any) -> bool:
    """Whether the kernel manager leaves the address to us: TCP on the default loopback."""
    return km.transport == "tcp" and (
        km.ip in _DEFAULT_ADDRESSES or km.ip == localinterfaces.localhost()
    )


def allow_address(address: str) -> None:
    """Make jupyter_client know that this loopback address is this machine's own.

    It keeps a list of the addresses it found on the interfaces, where only 127.0.0.1 of the
    loopback network is named, and launches kernels on no other.
    """
    known = localinterfaces.local_ips()
    if address not in known:
        known.append(address)


def saved_connection(km: Any) -> dict[str, Any]:
    """The kernel manager's connection info as a state holds it: JSON types only.

    Holds the kernel's keys: for the store, never for a log or a client.
    """
    info = dict(km.get_connection_info())
    for name, value in info.items():
        if isinstance(value, bytes):
            info[name] = value.decode("ascii")
    return info


def apply_connection(km: Any, connection: dict[str, Any]) -> None:
    """Make the kernel manager talk to a kernel restored from a state.

    Called before its connection file is written.
    """
    km.transport = connection["transport"]
    km.ip = connection["ip"]
    if is_own_address(km.ip):
        allow_address(km.ip)
    cache = LocalPortCache.instance()
    for name in port_names:
        port = int(connection[name])
        setattr(km, name, port)
        cache.currently_used_ports.add(port)
    km.session.key = connection["key"].encode("ascii")
    km.session.signature_scheme = connection["signature_scheme"]
    for name in ("curve_publickey", "curve_secretkey"):
        value = connection.get(name)
        setattr(km, name, value.encode("ascii") if value else None)


def can_reach(km: Any, connection: dict[str, Any]) -> bool:
    """Whether live sockets of this kernel manager will reach a kernel restored from a state.

    The address may differ: a copy of a kernel is moved to its own.
    """
    here = saved_connection(km)
    names = [*port_names, "transport", "key", "signature_scheme", "curve_publickey"]
    return all(here.get(name) == connection.get(name) for name in names)


def spec_of(km: Any) -> tuple[str, str]:
    """Display name and language of a kernel, as its kernelspec has them.

    The kernelspec may have been uninstalled since the kernel was started, or be a gateway's.
    """
    try:
        spec = km.kernel_spec
    except NoSuchKernel:
        spec = None
    return getattr(spec, "display_name", km.kernel_name), getattr(spec, "language", "")
