"""Whether the server that wrote a lease still runs its kernel, whatever nodes' clocks say."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from .capture import procfs
from .capture.node import node_id
from .store import KernelRecord, Lease, StateStore


class _Seen(NamedTuple):
    """A sign of life, and when this server saw it first, in monotonic seconds."""

    mark: str
    at: float


class Liveness:
    """Judges leases for one server, and makes its own.

    A sign of life is that a lease was renewed. How old the last one is, the store's clock says
    where it has one of its own. Where nodes' clocks may be in it, a lease that looks run out must
    also stay as it is for longer than renewals are apart, as this server sees it.

    Parameters
    ----------
    store
        Where leases are.
    ttl
        Seconds after which a lease that was not renewed has run out.
    interval
        Seconds between renewals, by this server and others like it.
    """

    def __init__(self, store: StateStore, *, ttl: float, interval: float) -> None:
        self._store = store
        self._ttl = ttl
        self._proof = min(ttl, 1.5 * interval + 1.0)
        self._node_id = node_id()
        self._boot_id = _read("/proc/sys/kernel/random/boot_id")
        self._machine_id = _read("/etc/machine-id")
        self._started = float(procfs.started(os.getpid()) or 0)
        self._seen: dict[str, _Seen] = {}

    def lease(self) -> Lease:
        """A lease of this server, from now on."""
        return Lease(
            node_id=self._node_id,
            hostname=socket.gethostname(),
            boot_id=self._boot_id,
            server_pid=os.getpid(),
            server_start=self._started,
            renewed=time.time(),
            ttl=self._ttl,
            machine_id=self._machine_id,
        )

    def is_own(self, lease: Lease) -> bool:
        """Whether this server wrote a lease."""
        mine = (self._node_id, os.getpid(), self._started)
        return (lease.node_id, lease.server_pid, lease.server_start) == mine

    def is_of_this_node(self, lease: Lease) -> bool:
        """Whether a server of this node wrote a lease."""
        return lease.node_id == self._node_id

    def is_lost(self, record: KernelRecord) -> bool:
        """Whether a kernel ended without its user's wish."""
        if record.dismissed:
            return False
        if record.lease is None:
            return record.offer is not None
        return self.has_run_out(record.kernel_id, record.lease)

    def has_run_out(self, kernel_id: str, lease: Lease) -> bool:
        """Whether whoever wrote this lease runs the kernel no more."""
        if lease.ttl <= 0:
            return True
        if self.is_of_this_node(lease):
            # A process can be looked up only from the node it ran on.
            if not process_lives(lease.server_pid, lease.server_start):
                return True
        elif (
            lease.machine_id
            and (lease.machine_id, lease.hostname) == (self._machine_id, socket.gethostname())
            and lease.boot_id != self._boot_id
        ):
            return True  # this machine, before it was started anew
        beat = self._store.heartbeat(kernel_id)
        if beat is None:
            return False
        # Not counting time in which the machine slept, and its other servers with it.
        now = time.monotonic()
        seen = self._seen.get(kernel_id)
        if seen is None or seen.mark != beat.mark:
            seen = self._seen[kernel_id] = _Seen(beat.mark, now)
        unchanged = now - seen.at - beat.unread
        if unchanged > lease.ttl:
            return True
        if beat.age <= lease.ttl:
            return False
        if beat.one_clock and not self.is_of_this_node(lease):
            return True
        # By a clock that may be wrong. Or a process that is there: the machine may have slept.
        return unchanged > self._proof


def process_lives(pid: int, start: float) -> bool:
    """Whether the process of that id and start (clock ticks since the boot) still runs."""
    return procfs.started(pid) == int(start)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
