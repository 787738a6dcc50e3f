"""Uploads in the background: states from the local tier to the remote one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import CkptError
from .announcements import Announcements
from .bandwidth import Bandwidth
from .blobreader import check_pack
from .damage import Damaged
from .local_tier import LocalTier
from .owner import OwnerStore
from .packs import LocalPacks
from .remote import RemoteOwner
from .seal import manifest_packs

#: Seconds between looks for states that another server of this node has left.
_LOOK_SECONDS: Final = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
#: Seconds that an upload waits for a collection of garbage, and then others go first.
_COLLECTION_SECONDS: Final = 5.0
_PUT_OFF_SECONDS: Final = 15.0


class _Unsent(NamedTuple):
    state_id: str
    kernel_id: str
    path: Path


class Gone(Exception):
    """The state was deleted while it was uploaded."""


class _BeingRemoved(Exception):
    """A collection of garbage may just remove what the state needs from the remote tier."""


class Uploader:
    """Uploads states that are only in the local tier, newest first, one after the other.

    What has arrived is not sent again, whatever interrupted the upload. Of several servers on
    a node one uploads for all.

    Parameters
    ----------
    owner
        Gives the local tier's store; ``None`` if there is none yet.
    join
        Makes sure that there is one; called first, and until it does not raise.
    tier, remote
        The two tiers.
    parallel
        Packs that are sent at the same time, each of 32 MiB in memory.
    bandwidth
        How fast.
    on_durable
        Called with a state's id once the remote tier holds it.
    on_problem
        Called with what stands in the way, or ``None`` when nothing does any more.
    """

    def __init__(
        self,
        owner: Callable[[], OwnerStore | None],
        join: Callable[[], object],
        tier: LocalTier,
        remote: RemoteOwner,
        *,
        parallel: int,
        bandwidth: Bandwidth,
        on_durable: Callable[[str], None],
        on_problem: Callable[[CkptError | None], None],
    ) -> None:
        self._owner = owner
        self._join = join
        self._joined = False
        self._tier = tier
        self._remote = remote
        self._removals = Announcements(remote, tier.removing)
        self._parallel = parallel
        self._bandwidth = bandwidth
        self._on_durable = on_durable
        self._on_problem = on_problem
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._idle = threading.Condition()
        self._failures = 0
        # States that cannot be uploaded whatever is tried, with why.
        self.lost: dict[str, str] = {}
        # States that wait for a collection of garbage, and until when others go first.
        self.put_off: dict[str, float] = {}

    def start(self) -> None:
        """Begin, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpu-ckpt-upload", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """There is something new."""
        self._wake.set()

    def unsent(self) -> list[str]:
        """Ids of the states that only the local tier has, newest first."""
        owner = self._owner()
        return [] if owner is None else [unsent.state_id for unsent in self._unsent(owner)]

    def flush(self, timeout: float, stop: threading.Event | None = None) -> list[str]:
        """Wait until all is sent, `timeout` seconds at most; returns the ids that were not.

        The wait ends too when `stop` is set.
        """
        end = time.monotonic() + timeout
        left = self.unsent()
        if self._thread is not None:
            # A remote tier that fails and fails is not waited for.
            enough = self._failures + 2
            self.wake()
            with self._idle:
                while set(left) - self.lost.keys() and time.monotonic() < end:
                    if self._failures >= enough or (stop is not None and stop.is_set()):
                        break
                    self._idle.wait(min(0.5, max(0.0, end - time.monotonic())))
                    left = self.unsent()
        return left

    def stop(self, timeout: float) -> list[str]:
        """Go on for `timeout` seconds at most, then end; returns the ids that were not sent."""
        left = self.flush(timeout)
        self._stop.set()
        self._wake.set()
        return left

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, after :meth:`stop` and the remote tier's closing."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _unsent(self, owner: OwnerStore) -> list[_Unsent]:
        durable = self._tier.durable()
        paths = [path for path in owner.manifests() if path.stem not in durable]
        found = [_Unsent(path.stem, path.parent.parent.name, path) for path in paths]
        return sorted(found, reverse=True)

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.is_set():
            self._wake.clear()
            try:
                more = self._some()
            except Exception as error:
                # Whatever it is, the next try must come.
                if not isinstance(error, CkptError):
                    error = CkptError(
                        "internal",
                        f"An upload failed: {error!r}",
                        hint="It is tried again; until then the state is on this node only.",
                    )
                self._failures += 1
                self._on_problem(error)
                self._wake.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            self._on_problem(None)
            pause = _FIRST_PAUSE
            with self._idle:
                self._idle.notify_all()
            if not more:
                self._wake.wait(_LOOK_SECONDS)

    def _some(self) -> bool:
        """Upload the newest state that is to be uploaded; whether there may be more."""
        if not self._joined:
            self._join()
            self._joined = True
        owner = self._owner()
        if owner is None:
            return False
        unsent, now = self._unsent(owner), time.monotonic()
        for gone in self.put_off.keys() - {state.state_id for state in unsent}:
            self.put_off.pop(gone, None)
        todo = [
            state
            for state in unsent
            if state.state_id not in self.lost and self.put_off.get(state.state_id, 0.0) <= now
        ]
        if not todo:
            return False
        with self._tier.uploading() as mine:
            if not mine:
                return False  # another server of this node is at it
            state = todo[0]
            if self._tier.is_durable(state.state_id):
                return True
            try:
                self._upload(owner, state)
            except _BeingRemoved:
                self.put_off[state.state_id] = time.monotonic() + _PUT_OFF_SECONDS
                return True
            except Gone:
                return True
            except Damaged as error:
                self.lost[state.state_id] = str(error)
                return True
        self._on_durable(state.state_id)
        return True

    def _upload(self, owner: OwnerStore, state: _Unsent) -> None:
        remote, name = self._remote, self._remote.manifest_name(state.kernel_id, state.state_id)
        data = self._manifest(state)
        needed = sorted(manifest_packs(data))
        with remote.present(state.state_id, needed):
            self._send_packs(owner, state, needed)
            for record in owner.keys.glob("*.json"):
                remote.objects.put(f"keys/{record.name}", record.read_bytes(), create=True)
            self._manifest(state)
            if remote.maybe("store.json") != self._tier.store_file.read_bytes():
                raise CkptError(
                    "store_unavailable",
                    "The remote state store is not the one that this node's states belong to.",
                    hint=f"Check GpuCkpt.store_url; the states are in {owner.folder}.",
                )
            remote.objects.put(name, data)
            marks = state.path.with_suffix(".marks.json")
            with suppress(FileNotFoundError):
                remote.objects.put(
                    remote.marks_name(state.kernel_id, state.state_id), marks.read_bytes()
                )
            # A collector that saw neither presence nor manifest (it looked just before, or took
            # this for dead) may remove what was there of a state that is deleted by now. It has
            # announced that before it looked.
            self._wait_for_collections(needed)
            self._send_packs(owner, state, needed)
            self._tier.set_durable(state.state_id)
            with suppress(CkptError):  # a collection reads it there then
                if (version := remote.version(name)) is not None:
                    self._tier.note_manifest(state.state_id, version, data)
            try:
                self._manifest(state)
            except Gone:
                remote.delete_state(state.kernel_id, state.state_id)
                self._tier.forget(state.state_id)
                raise

    def _wait_for_collections(self, needed: list[str]) -> None:
        end = time.monotonic() + _COLLECTION_SECONDS
        while not self._removals.packs().isdisjoint(needed):
            if time.monotonic() > end:
                raise _BeingRemoved
            if self._stop.wait(1.0):
                raise CkptError("cancelled", "The transfer was cancelled.")

    def _manifest(self, state: _Unsent) -> bytes:
        try:
            return state.path.read_bytes()
        except FileNotFoundError:
            raise Gone(state.state_id) from None

    def _send_packs(self, owner: OwnerStore, state: _Unsent, needed: list[str]) -> None:
        there = self._remote.packs()
        local = LocalPacks(owner.packs)
        missing = []
        for pack in needed:
            size = local.size(pack)
            if pack in there and size in (None, there[pack].size):
                continue
            if size is None:
                raise Damaged(f"pack {pack} is in neither tier")
            if pack in there:
                # One of them is not what was written: only what is whole takes the other's place.
                check_pack(owner, local, pack)
            missing.append(pack)

        def send(pack: str) -> None:
            path = local.path(pack)
            self._bandwidth.wait(path.stat().st_size, self._stop)
            if self._stop.is_set():
                raise CkptError("cancelled", "The transfer was cancelled.")
            self._manifest(state)  # still wanted?
            self._remote.put_pack(pack, path)

        if not missing:
            return
        pool = ThreadPoolExecutor(self._parallel, "gpu-ckpt-upload")
        with self._bandwidth.sending(), pool:
            sent = [pool.submit(send, pack) for pack in missing]
            try:
                for done in sent:
                    done.result()
            except BaseException:
                for done in sent:
                    done.cancel()
                raise
