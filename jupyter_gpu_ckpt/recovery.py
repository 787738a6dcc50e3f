"""Leases, and the kernels that were lost with their server or node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from .capture.node import node_id
from .connection import spec_of
from .errors import CkptError
from .operations import in_thread
from .store import KernelRecord, Lease, StateRecord, StateStore
from .tracking import TrackedKernel, Tracker


class LostRecord:
    """A kernel that ended without an orderly shutdown, and its newest state."""

    def __init__(self, record: KernelRecord, state: StateRecord) -> None:
        self.record = record
        self.state = state


class Leases:
    """Says in the store which kernels run here, for the server that comes after this one.

    Parameters
    ----------
    store
        Where the records go.
    tracker
        The kernels.
    paths
        Coroutine function giving the notebook path of each kernel id that has one.
    ttl
        Seconds after which a lease that was not renewed has run out.
    log
        For a store that cannot be written; kernels run on without leases then.
    """

    def __init__(
        self,
        store: StateStore,
        tracker: Tracker,
        paths: Callable[[], Awaitable[dict[str, str]]],
        *,
        ttl: float,
        log: logging.Logger | Any,
    ) -> None:
        self._store = store
        self._tracker = tracker
        self._paths = paths
        self._ttl = ttl
        self._log = log
        self._node_id = node_id()
        self._boot_id = _boot_id()
        self._server_start = psutil.Process().create_time()
        self._complained = False
        self._lock = asyncio.Lock()

    def lease(self) -> Lease:
        """A lease of this server, from now on."""
        return Lease(
            node_id=self._node_id,
            hostname=socket.gethostname(),
            boot_id=self._boot_id,
            server_pid=os.getpid(),
            server_start=self._server_start,
            renewed=time.time(),
            ttl=self._ttl,
        )

    async def renew_all(self) -> None:
        """Renew the lease of every kernel that runs here; the keeper's heartbeat."""
        paths = await self._paths()
        for kernel in self._tracker:
            await self._renew(kernel, paths.get(kernel.kernel_id))

    async def renew(self, kernel: TrackedKernel) -> None:
        """Write one kernel's record, with its notebook's path as it is now.

        Never raises: a kernel does not fail because the store does.
        """
        await self._renew(kernel, (await self._paths()).get(kernel.kernel_id))

    async def _renew(self, kernel: TrackedKernel, path: str | None) -> None:
        record = KernelRecord(
            kernel_id=kernel.kernel_id,
            kernel_name=kernel.km.kernel_name,
            display_name=spec_of(kernel.km)[0],
            path=path,
            lease=self.lease(),
        )
        async with self._lock:
            if self._tracker.get(kernel.kernel_id) is not kernel:
                return  # it was shut down meanwhile
            await self._write(record)

    async def end(self, kernel_id: str) -> None:
        """The kernel ended in order: nobody will be asked about it. Its states stay."""
        async with self._lock:
            try:
                await in_thread(self._end, kernel_id)
            except CkptError as error:
                self._complain(error)

    async def end_all(self) -> None:
        """The server stops in order; called before its kernels are shut down."""
        for kernel in self._tracker:
            await self.end(kernel.kernel_id)

    async def dismiss(self, kernel_id: str) -> None:
        """Do not ask about this kernel again; ``unknown_kernel``."""
        async with self._lock:
            record = await in_thread(self._store.kernel, kernel_id)
            if record is None:
                raise CkptError("unknown_kernel", "There is no such kernel.")
            record.dismissed = True
            record.lease = None
            await in_thread(self._store.put_kernel, record)

    def _end(self, kernel_id: str) -> None:
        record = self._store.kernel(kernel_id)
        if record is None:
            return
        if self._store.states(kernel_id):
            record.lease = None
            self._store.put_kernel(record)
        else:
            self._store.delete_kernel(kernel_id)

    async def _write(self, record: KernelRecord) -> None:
        try:
            await in_thread(self._store.put_kernel, record)
            self._complained = False
        except CkptError as error:
            self._complain(error)

    def _complain(self, error: CkptError) -> None:
        if not self._complained:
            self._log.warning("Kernel states cannot be kept: %s %s", error.message, error.hint)
        self._complained = True

    # -- lost kernels --------------------------------------------------------------------

    def lost(self) -> list[LostRecord]:
        """Kernels whose lease was not ended in order and has run out; for a worker thread.

        Newest state first. Kernels without a state are not among them.
        """
        found = []
        for record in self._store.kernels():
            if self._is_lost(record):
                states = self._store.states(record.kernel_id)
                if states:
                    found.append(LostRecord(record, states[0]))
        return sorted(found, key=lambda lost: lost.state.created, reverse=True)

    def forget_stateless(self) -> None:
        """Remove the records of lost kernels that no state was made of; for a worker thread."""
        for record in self._store.kernels():
            if self._is_lost(record) and not self._store.states(record.kernel_id):
                self._store.delete_kernel(record.kernel_id)

    def last_path(self, kernel_id: str) -> str | None:
        """The notebook that a kernel had last, by its record; for a worker thread.

        Raises CkptError ``not_restorable`` when another server runs the kernel: two that are
        the same would write to the same files.
        """
        record = None
        with contextlib.suppress(CkptError):  # an unreadable record is no reason
            record = self._store.kernel(kernel_id)
        lease = record.lease if record is not None else None
        if lease is not None and not self._is_own(lease) and not self._has_run_out(lease):
            raise CkptError(
                "not_restorable",
                f"The kernel still runs, in another Jupyter server on {lease.hostname}.",
                hint="Shut it down there, or open the state as a new kernel. If that server is "
                f"gone, try again in {lease.ttl:.0f} seconds.",
            )
        return record.path if record is not None else None

    def _is_own(self, lease: Lease) -> bool:
        mine = (self._node_id, os.getpid(), self._server_start)
        return (lease.node_id, lease.server_pid, lease.server_start) == mine

    def _is_lost(self, record: KernelRecord) -> bool:
        if record.dismissed or self._tracker.get(record.kernel_id) is not None:
            return False
        return record.lease is not None and self._has_run_out(record.lease)

    def _has_run_out(self, lease: Lease) -> bool:
        if time.time() > lease.renewed + lease.ttl:
            return True
        # A process can be looked up only from the node it ran on.
        return lease.node_id == self._node_id and not process_lives(
            lease.server_pid, lease.server_start
        )


def process_lives(pid: int, start: float) -> bool:
    """Whether the process of that id and creation time (Unix seconds) still runs."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - start) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
