"""Leases: which server runs a kernel now, and which kernels were lost with theirs.

A kernel is *lost* when its lease ran out, its server's process is gone, or its machine was started
anew; or when it was saved and then ended by a shutdown or the culler, which its user did not ask
for. It is *elsewhere* while another server renews its lease, and *ended* when its lease was given
up in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakSet

import msgspec

from .autosave import chosen, understood
from .connection import spec_of
from .errors import CkptError
from .liveness import Liveness
from .operations import Run, in_thread
from .store import KernelRecord, ServerStop, StateRecord, StateStore
from .tracking import TrackedKernel, Tracker
from .troubles import Troubles

_NOT_KEPT: Final = "Kernel states cannot be kept"


@dataclass
class LostRecord:
    """A kernel that ended without its user's wish, and its newest state that is whole.

    ``last_seen``: when its lease was renewed last, in Unix seconds. ``damaged``: ids of newer
    states that are known to be damaged, newest first, with what is wrong with each.
    """

    record: KernelRecord
    state: StateRecord
    last_seen: float
    damaged: dict[str, str] = field(default_factory=dict)


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
    interval
        Seconds between two calls of :meth:`renew_all`, by this server and others like it.
    on_fenced
        Called with a kernel that another server runs by now, and that server's host name where
        it is known: the copy here must end.
    server
        Name of this server among those of its user.
    troubles
        Told of a store that cannot be written; kernels run on without leases then.
    """

    def __init__(
        self,
        store: StateStore,
        tracker: Tracker,
        paths: Callable[[], Awaitable[dict[str, str]]],
        *,
        ttl: float,
        interval: float,
        on_fenced: Callable[[TrackedKernel, str], None],
        troubles: Troubles,
        server: str = "",
    ) -> None:
        self._store = store
        self._tracker = tracker
        self._paths = paths
        self._liveness = Liveness(store, ttl=ttl, interval=interval)
        self._interval = interval
        self._on_fenced = on_fenced
        self._server = server
        self._troubles = troubles
        self._lock = asyncio.Lock()
        #: Kernels whose lease this server has written.
        self._held: set[str] = set()
        #: Why those that are about to end, end, and what their server did before it stopped.
        self._offers: dict[str, tuple[str, ServerStop | None]] = {}
        self._fenced: WeakSet[TrackedKernel] = WeakSet()

    async def renew_all(self) -> None:
        """Renew the lease of every kernel that runs here; the keeper's heartbeat."""
        await self._renew(list(self._tracker))

    async def renew(self, kernel: TrackedKernel) -> None:
        """Write one kernel's record, with its notebook's path as it is now.

        Never raises: a kernel does not fail because the store does.
        """
        await self._renew([kernel])

    async def _renew(self, kernels: list[TrackedKernel]) -> None:
        paths = await self._paths()
        async with self._lock:
            # Not those that were shut down meanwhile, or are about to be.
            kernels = [
                kernel
                for kernel in kernels
                if self._tracker.get(kernel.kernel_id) is kernel and kernel not in self._fenced
            ]
            records = [self._record(kernel, paths.get(kernel.kernel_id)) for kernel in kernels]
            taken_by, error = await in_thread(self._renew_in_store, kernels, records)
            if error is not None:
                self._complain(error)
            elif kernels:
                self._troubles.over(_NOT_KEPT)
            for kernel, hostname in taken_by:
                self._fenced.add(kernel)
                self._on_fenced(kernel, hostname)

    def _record(self, kernel: TrackedKernel, path: str | None) -> KernelRecord:
        return KernelRecord(
            kernel_id=kernel.kernel_id,
            kernel_name=kernel.km.kernel_name,
            display_name=spec_of(kernel.km)[0],
            path=path,
            lease=self._liveness.lease(),
            hibernated=kernel.is_hibernated,
            server=self._server,
        )

    def _renew_in_store(
        self, kernels: list[TrackedKernel], records: list[KernelRecord]
    ) -> tuple[list[tuple[TrackedKernel, str]], CkptError | None]:
        """Write records; returns the kernels that others run by now, and what went wrong last.

        In one piece in a worker thread: it is what an idle server spends its time with.
        """
        taken: list[tuple[TrackedKernel, str]] = []
        failed: CkptError | None = None
        for kernel, record in zip(kernels, records, strict=True):
            held = record.kernel_id in self._held
            old: KernelRecord | None = None
            try:
                old = self._store.kernel(record.kernel_id)
            except CkptError as error:
                failed = error
                if held:  # it may say that the kernel runs elsewhere by now
                    continue
            if held and (hostname := self._taken_by(old)) is not None:
                taken.append((kernel, hostname))
                continue
            if kernel.autosave is None:
                kernel.autosave = chosen(understood(old.autosave if old is not None else None))
            record.autosave = kernel.autosave or None
            record.stop = old.stop if old is not None else None
            self._held.add(record.kernel_id)
            try:
                if held and old is not None and _same(old, record):
                    self._store.renew_kernel(record)
                else:
                    self._store.put_kernel(record)
            except CkptError as error:
                failed = error
        return taken, failed

    def _taken_by(self, record: KernelRecord | None) -> str | None:
        """Whose a kernel is whose lease this server wrote; ``None``: still this server's."""
        if record is None or record.dismissed:
            return None  # the store was emptied, or somebody took it for lost and did not want it
        if record.lease is None:
            return ""  # taken over, and ended in order
        return None if self._liveness.is_own(record.lease) else record.lease.hostname

    @contextlib.asynccontextmanager
    async def claimed(
        self, kernel_id: str, run: Run, *, take_over: bool = False
    ) -> AsyncIterator[None]:
        """While this server restores a kernel, no other does; if that fails, all is as before.

        ``not_restorable``: another server was quicker.

        Parameters
        ----------
        kernel_id
            The kernel.
        run
            For its cancellation, which ends all waiting.
        take_over
            Another server may run the kernel: it is waited for that it sees the claim.
        """
        record = await in_thread(self._claim, kernel_id, not take_over, run.cancel_flag)
        try:
            if take_over:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(run.cancel_event.wait(), self._interval * 1.5 + 1.0)
                if (taken := await in_thread(self.elsewhere, kernel_id)) is not None:
                    record = None  # by somebody who took it over a little later
                    raise taken
            yield
        except BaseException:
            async with self._lock:
                self._held.discard(kernel_id)
                if record is not None and self._tracker.get(kernel_id) is None:
                    if not take_over and record.lease is not None:
                        # Written now, it would count as renewed; it had run out.
                        lease = msgspec.structs.replace(record.lease, ttl=0.0)
                        record = msgspec.structs.replace(record, lease=lease)
                    await in_thread(self._put, record)
            raise

    def _claim(self, kernel_id: str, politely: bool, stop: threading.Event) -> KernelRecord | None:
        """Write this server's lease, unless another's counts; returns the record as it was."""
        self._held.discard(kernel_id)
        with self._store.claiming(kernel_id, stop) as is_sure:
            record = self._readable(kernel_id)
            if politely:
                if (taken := self.elsewhere(kernel_id)) is not None:
                    raise taken
                lease = record.lease if record is not None else None
                if not (is_sure or lease is None or self._liveness.is_of_this_node(lease)):
                    raise CkptError(
                        "store_unavailable",
                        "The state store does not answer, so it is unknown whether another "
                        "Jupyter server has brought this kernel back.",
                        hint="Try again when it does, or open the state as a new kernel.",
                    )
            if record is not None:
                self._put(msgspec.structs.replace(record, lease=self._liveness.lease(), offer=None))
                self._held.add(kernel_id)  # who writes another lease from here on has taken it
        return record

    def _readable(self, kernel_id: str) -> KernelRecord | None:
        with contextlib.suppress(CkptError):  # an unreadable record is no reason
            return self._store.kernel(kernel_id)
        return None

    async def end(self, kernel_id: str) -> None:
        """The kernel ended in order: nobody will be asked about it. Its states stay."""
        async with self._lock:
            try:
                await in_thread(self._end, kernel_id)
            except CkptError as error:
                self._complain(error)

    def offer_after_end(self, kernel_id: str, why: str, stop: ServerStop | None = None) -> None:
        """The kernel is about to be ended though its user wants it: ``shutdown`` or ``cull``.

        ``stop``: what its server has done before it stops.
        """
        self._offers[kernel_id] = why, stop

    async def end_all(self) -> None:
        """The server stops in order; called before its kernels are shut down."""
        for kernel in self._tracker:
            await self.end(kernel.kernel_id)

    async def dismiss(self, kernel_id: str) -> None:
        """Do not ask about this kernel again; ``unknown_kernel``."""
        async with self._lock:
            record = await in_thread(self._store.kernel, kernel_id)
            if record is None:
                raise CkptError(
                    "unknown_kernel",
                    "There is no such kernel.",
                    hint="Somebody may have restored or dismissed it: list the lost kernels anew.",
                )
            record.dismissed = True
            record.lease = record.offer = None
            await in_thread(self._store.put_kernel, record)

    def _end(self, kernel_id: str) -> None:
        self._held.discard(kernel_id)
        offer, stop = self._offers.pop(kernel_id, (None, None))
        record = self._store.kernel(kernel_id)
        if record is None or (record.lease is not None and not self._liveness.is_own(record.lease)):
            return
        if self._store.states(kernel_id):
            record.lease = None
            record.offer = offer or record.offer
            record.stop = stop or record.stop
            self._store.put_kernel(record)
        else:
            self._store.delete_kernel(kernel_id)

    def _put(self, record: KernelRecord) -> None:
        try:
            self._store.put_kernel(record)
            self._troubles.over(_NOT_KEPT)
        except CkptError as error:
            self._complain(error)

    def _complain(self, error: CkptError) -> None:
        self._troubles.tell(_NOT_KEPT, error)

    # -- lost kernels --------------------------------------------------------------------

    def lost(self) -> list[LostRecord]:
        """Kernels whose lease was not ended in order and has run out; for a worker thread.

        Newest state first. Kernels without a state are not among them.
        """
        found = []
        for record in self._store.kernels():
            if self.is_lost(record) and (best := self._store.best(record.kernel_id)) is not None:
                beat = self._store.heartbeat(record.kernel_id)
                seen = time.time() - (0.0 if beat is None else max(0.0, beat.age))
                found.append(LostRecord(record, best[0], seen, best[1]))
        return sorted(found, key=lambda lost: lost.state.created, reverse=True)

    def forget_stateless(self, records: Iterable[KernelRecord]) -> None:
        """Remove those of lost kernels that no state was made of; for a worker thread.

        States that cannot be read count: their key may only be missing for now.
        """
        for record in records:
            if self.is_lost(record) and not self._store.has_states(record.kernel_id):
                self._store.delete_kernel(record.kernel_id)

    def last_path(self, kernel_id: str) -> str | None:
        """The notebook that a kernel had last, by its record; for a worker thread."""
        record = self._readable(kernel_id)
        return record.path if record is not None else None

    def elsewhere(self, kernel_id: str) -> CkptError | None:
        """Why a kernel cannot be brought in because another server runs it; for a worker thread.

        Two that are the same would write to the same files.
        """
        record = self._readable(kernel_id)
        lease = record.lease if record is not None else None
        if (
            lease is None
            or self._liveness.is_own(lease)
            or self._liveness.has_run_out(kernel_id, lease)
        ):
            return None
        return CkptError(
            "not_restorable",
            f"The kernel still runs, in another Jupyter server on {lease.hostname}.",
            hint="Shut it down there, take it over, or open the state as a new kernel. If that "
            f"server is gone, try again in {lease.ttl:.0f} seconds.",
        )

    def was_here(self, record: KernelRecord) -> bool:
        """Whether a kernel ran last in a server of this one's name."""
        return record.server == self._server

    def is_lost(self, record: KernelRecord) -> bool:
        """Whether a kernel ended without its user's wish, by its record; for a worker thread."""
        running = self._tracker.get(record.kernel_id) is not None
        return not running and self._liveness.is_lost(record)


def _same(old: KernelRecord, new: KernelRecord) -> bool:
    """Whether two records differ at most in when their leases were written."""
    if old.lease is None or new.lease is None:
        return False
    lease = msgspec.structs.replace(old.lease, renewed=new.lease.renewed)
    return msgspec.structs.replace(old, lease=lease) == new
