"""A store on a remote system, with a tier of its own on this node's disk.

Saves land in the local tier and are uploaded in the background; states of other nodes are
listed from their manifests, and their packs fetched when they are read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from ..errors import CkptError
from .announcements import Announcements
from .bandwidth import Bandwidth
from .claims import Claims
from .damage import Damaged
from .fetch import SharedPacks, TierPacks
from .kernel_store import READING, WRITING, Heartbeat
from .keys import KeyRing
from .layout import check_kernel_id, make_private_dir, owner_folder, translated
from .local_files import LocalFiles
from .local_tier import LocalTier
from .manifest import Body
from .marks import Marks
from .mirror import Mirror
from .objects import Objects
from .owner import OwnerStore
from .packs import LocalPacks, PackSource
from .records import GcResult, KernelRecord, StateRecord
from .remote import RemoteFiles, RemoteOwner
from .retention import Held
from .sending import Records
from .state_store import StateStore
from .sweep import sweep
from .uploads import Uploader

#: Seconds that a kernel's beginning waits until others can see whose it is.
_CLAIM_SECONDS: Final = 5.0

_log = logging.getLogger(__name__)


def tier_folder(tiers: Path, url: str) -> Path:
    """The local tier of a URL: a folder of its own."""
    return tiers / blake3(url.rstrip("/").encode()).hexdigest(length=8)


class TieredStore(StateStore):
    """One owner's states on a remote system.

    Parameters
    ----------
    url, options
        Where, as fsspec has it.
    tiers
        Folder for local tiers, on this node's disk.
    owner
        Whose states.
    sealing, compression_level, workers, memory_limit
        See :class:`StateStore`.
    limit
        Bytes of packs that the local tier keeps; those that are nowhere else stay whatever it is.
    parallel, bandwidth
        See :class:`Uploader`.
    timeout
        Seconds without an answer after which a call to the remote system has failed.
    on_durable
        Called, in a thread, with the id of each state that was uploaded.
    """

    def __init__(
        self,
        url: str,
        tiers: Path,
        owner: str,
        *,
        options: Mapping[str, Any] | None = None,
        sealing: KeyRing | None = None,
        compression_level: int = 1,
        workers: int | None = None,
        memory_limit: int = 256 << 20,
        limit: int = 64 << 30,
        parallel: int = 3,
        bandwidth: Bandwidth | None = None,
        timeout: float = 20.0,
        on_durable: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(
            tier_folder(tiers, url),
            owner,
            sealing=sealing,
            compression_level=compression_level,
            workers=workers,
            memory_limit=memory_limit,
        )
        self.url = url
        name = owner_folder(owner)
        self._remote = RemoteOwner(Objects(f"{url.rstrip('/')}/{name}", options, timeout=timeout))
        self._claims = Claims(self._remote)
        self._tier = LocalTier(self.root / name)
        self._limit = limit
        # One try a time: before another one it is looked whether it would still be right.
        self._records = Records(self._remote.hasty(attempts=1), self._said)
        self._mirror = Mirror(self._remote, self._tier, self._records.unsent)
        self._uploader = Uploader(
            super()._open,
            self._join,
            self._tier,
            self._remote,
            parallel=parallel,
            bandwidth=bandwidth or Bandwidth(),
            on_durable=self._uploaded,
            on_problem=self._said,
        )
        self._on_durable = on_durable
        self._complaint: CkptError | None = None
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to upload what is only in the local tier."""
        with suppress(OSError):
            self._tier.tidy()
        self._uploader.start()

    def flush(self, timeout: float, stop: threading.Event | None = None) -> list[str]:
        """Wait until all is uploaded; returns the ids of states that are not."""
        end = time.monotonic() + timeout
        left = self._uploader.flush(timeout, stop)
        if self._complaint is None:
            self._records.flush(min(5.0, max(0.0, end - time.monotonic())))
        return left

    def stop(self, timeout: float) -> list[str]:
        """Upload for `timeout` seconds more at most; returns the ids of states not uploaded."""
        left = self._uploader.stop(timeout)
        self._records.flush(min(5.0, timeout) if self._complaint is None else 0.0)
        self._records.stop()
        self._remote.objects.close()
        self._uploader.join(5.0)
        return left

    def warnings(self) -> list[CkptError]:
        """What a list of states does not say: the remote tier fails, states are not uploaded."""
        found = [self._mirror.problem] if self._mirror.problem is not None else []
        with self._lock:
            if self._complaint is not None and not found:
                found.append(self._complaint)
        for state, why in self._uploader.lost.items():
            found.append(
                CkptError(
                    "state_damaged",
                    f"State {state} cannot be uploaded: {why}.",
                    hint="It stays on this node only. Save the kernel again.",
                )
            )
        for state in self._uploader.put_off.copy():
            found.append(
                CkptError(
                    "store_unavailable",
                    f"State {state} is not uploaded yet: what it needs may just be removed from "
                    "the remote state store.",
                    hint="It is uploaded when that has ended, within the hour.",
                )
            )
        return found

    def _evict(self) -> None:
        owner = super()._open()
        if owner is not None:
            with suppress(OSError):
                spared: set[str] = set()
                for found in LocalFiles(owner).present():
                    if found.state_id is not None and found.alive:
                        spared |= found.packs or set()
                self._tier.evict(owner.packs, owner.manifests, self._limit, spared=spared)

    def _uploaded(self, state_id: str) -> None:
        self._evict()
        if self._on_durable is not None:
            self._on_durable(state_id)

    def _said(self, problem: CkptError | None) -> None:
        """Say once what stands in the way, and once that it is over."""
        if problem is not None and problem.reason == "cancelled":
            return
        with self._lock:
            before, self._complaint = self._complaint, problem
        if problem is not None and before is None:
            _log.warning(
                "States stay on this node for now: %s %s", problem.message, problem.hint or ""
            )
        elif problem is None and before is not None:
            _log.info("The remote state store works again: states are uploaded.")

    # -- the local tier as a store -------------------------------------------------------------

    def _open(self) -> OwnerStore | None:
        with translated(READING):
            try:
                if not self._mirror.join(None):
                    return None
            except CkptError:
                # Reads say what is known here, which is nothing; warnings() says why.
                return None
            return self._refreshed()

    def _create(self) -> OwnerStore:
        self._join()
        with translated(WRITING):
            return self._refreshed()

    def _join(self) -> None:
        with translated(WRITING):
            self._mirror.join(super()._create)

    def _refreshed(self) -> OwnerStore:
        make_private_dir(self.root)
        owner = super()._open()
        if owner is not None:
            # First: whether the store is encrypted, and which states there were before it was,
            # is known from what other nodes have made.
            self._mirror.refresh(owner)
        return super()._create()

    def _packs(self, owner: OwnerStore) -> PackSource:
        return TierPacks(LocalPacks(owner.packs), self._tier, self._remote, self._evict)

    def _shared_packs(self, owner: OwnerStore) -> PackSource:
        return SharedPacks(owner.packs)

    def _find(self, state_id: str) -> tuple[OwnerStore, Path]:
        try:
            return super()._find(state_id)
        except CkptError:
            owner = super()._open()
            if owner is None:
                raise
            # Perhaps another node has made it just now.
            self._mirror.refresh(owner, now=True)
            return super()._find(state_id)

    # -- states --------------------------------------------------------------------------------

    def _record(self, body: Body, marks: Marks) -> StateRecord:
        record = super()._record(body, marks)
        record.durable = self._tier.is_durable(record.id)
        return record

    def _committed(self, record: StateRecord) -> None:
        record.durable = False
        self._uploader.wake()

    def delete(self, state_id: str) -> None:
        """See :meth:`StateStore.delete`; nothing is deleted while the remote tier cannot be."""
        path = self._find(state_id)[1]
        kernel_id = path.parent.parent.name
        durable = self._tier.is_durable(state_id)
        if durable:
            self._remote.hasty().delete_state(kernel_id, state_id)
        super().delete(state_id)
        self._tier.forget(state_id)

    def _gc_elsewhere(
        self, grace_seconds: float, dry_run: bool, stop: threading.Event | None
    ) -> GcResult:
        """Tidy up the remote tier, if it answers."""
        try:
            owner = super()._open()
            files = RemoteFiles(
                self._remote,
                Announcements(self._remote, self._tier.removing),
                self._tier,
                None if owner is None else owner.manifest,
            )
            there = sweep(files, grace_seconds=grace_seconds, dry_run=dry_run, stop=stop)
            if not dry_run:
                self._claims.tidy()
        except CkptError as error:
            if error.reason != "store_unavailable":
                raise
            self._said(error)
            return GcResult(0, 0)
        if not dry_run:
            self._evict()
        return there

    def _put_marks(self, owner: OwnerStore, manifest: Path, data: bytes) -> None:
        super()._put_marks(owner, manifest, data)
        if self._tier.is_durable(manifest.stem):
            kernel_id = manifest.parent.parent.name
            self._records.send(self._remote.marks_name(kernel_id, manifest.stem), data)

    def _pack_sizes(self, owner: OwnerStore, states: Iterable[Held]) -> dict[str, int]:
        states = list(states)
        sizes = super()._pack_sizes(owner, states)
        # A pack is never altered, so what was known of one stays true: mostly nothing is asked.
        sizes = self._sizes | sizes
        if any(pack not in sizes for state in states for pack in state.packs):
            with suppress(CkptError, Damaged):
                there = self._remote.hasty().packs()
                sizes.update({pack: found.size for pack, found in there.items()})
        self._sizes = sizes
        return sizes

    # -- kernel records ------------------------------------------------------------------------

    @contextmanager
    def claiming(self, kernel_id: str, stop: threading.Event | None = None) -> Iterator[bool]:
        """See :meth:`StateStore.claiming`; on all nodes, unless the remote tier does not answer."""
        check_kernel_id(kernel_id)
        with ExitStack() as stack:
            claim = None
            try:
                claim = stack.enter_context(self._claims.held(kernel_id, stop))
                # What others have written until they let go of their claims.
                self._mirror.refresh(self._create(), now=True)
                claim.check()
            except CkptError as error:
                if error.reason != "store_unavailable":
                    raise
                claim = None
            stack.enter_context(super().claiming(kernel_id, stop))
            yield claim is not None and self._mirror.problem is None
            if claim is not None:
                self._records.flush(_CLAIM_SECONDS)  # again, as it must be there before others look

    def put_kernel(self, record: KernelRecord) -> None:
        """See :meth:`StateStore.put_kernel`; the remote tier gets it as soon as it can."""
        before = super().kernel(record.kernel_id)
        super().put_kernel(record)
        self._send_kernel(record.kernel_id)
        if _holder(before) != _holder(record):
            # Others must know before the kernel begins here; renewals need not be waited for.
            self._records.flush(_CLAIM_SECONDS)

    def heartbeat(self, kernel_id: str) -> Heartbeat | None:
        """See :meth:`StateStore.heartbeat`; time in which the remote tier could not be read
        does not count, for others may well have renewed their leases.
        """
        beat = super().heartbeat(kernel_id)
        if beat is None:
            return None
        unread = self._mirror.stale()
        # The node's own clock may have been set since the record was brought here.
        there = self._mirror.age(self._remote.kernel_name(kernel_id))
        age = beat.age if there is None else min(beat.age, there)
        return Heartbeat(age - unread, beat.mark, self._remote.objects.one_clock, unread)

    def renew_kernel(self, record: KernelRecord) -> None:
        """See :meth:`StateStore.renew_kernel`; the remote tier's copy becomes young by a write."""
        self.put_kernel(record)

    def delete_kernel(self, kernel_id: str) -> None:
        """See :meth:`StateStore.delete_kernel`."""
        super().delete_kernel(kernel_id)
        self._send_kernel(kernel_id)

    def _send_kernel(self, kernel_id: str) -> None:
        check_kernel_id(kernel_id)
        path = self.root / self._name / "kernels" / kernel_id / "kernel.json"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = None
        name = self._remote.kernel_name(kernel_id)
        self._records.send(name, data, self._mirror.version(name))

    def _send_failure(self, kernel_id: str, data: bytes | None) -> None:
        name = self._remote.failure_name(kernel_id)
        self._records.send(name, data, self._mirror.version(name))


def _holder(record: KernelRecord | None) -> tuple[str, int, float] | None:
    """Which server runs a kernel, by its record."""
    if record is None or record.lease is None:
        return None
    return record.lease.node_id, record.lease.server_pid, record.lease.server_start
