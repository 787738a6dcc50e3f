"""Reads the stores of a hub's users: manifests and small records only, never what is in memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec

from ..errors import CkptError
from ..liveness import Liveness
from ..place_settings import PlaceSettings
from ..store import KernelRecord, StateRecord, StateStore
from ..store.acting import acting_as_owner
from ..store.kernel_store import READING
from ..store.keys import KeyRing
from ..store.layout import owner_folder, translated
from ..store.retention import Policy
from ..store.tiers import TieredStore
from ..store.upkeep import Listing
from .keys import user_key
from .names import filled
from .service_guard import check_records
from .service_places import ServerPlaces
from .service_records import FailureRow, KernelRow, KernelStatus, StateRow, StopRow, UserReport
from .service_records import seconds as unix_seconds
from .settings import GpuCkptHub

#: Seconds after which a call to a remote store is given up.
_TIMEOUT: Final = 10.0
#: As servers have them, unless the administrator says otherwise.
_TTL, _INTERVAL = 30.0, 10.0
#: More kernels than a server has, and longer than its saves before a stop take.
_MOST_KERNELS: Final = 10_000
_LONGEST_STOP: Final = 7 * 86400.0
#: What is to be looked at first.
_ORDER: Final = ("lost", "running", "hibernated", "ended")


class Person(NamedTuple):
    """A user as the hub knows her: `servers` are the names of her named servers.

    ``deleted``: the hub does not know her any more, and the store still does.
    """

    name: str
    groups: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    deleted: bool = False


@dataclass(frozen=True)
class _DerivedKey:
    """A user's key, derived from the hub's."""

    master: Path
    user: str

    def __str__(self) -> str:
        return f"the file {self.master}"

    def text(self, timeout: float) -> str:
        return user_key(self.master, self.user)


class _Place(PlaceSettings):
    """Where the states of one user's server are."""

    ring: KeyRing | None = None

    def key_ring(self) -> KeyRing | None:
        return self.ring


class _Opened(NamedTuple):
    server: str
    store: StateStore
    liveness: Liveness
    folder: Path
    ring: KeyRing | None


class UserStores:
    """The stores of one user: one, or one for each named server.

    All methods block and may take long: they are for threads. They raise
    :class:`~jupyter_gpu_ckpt.errors.CkptError` only.

    Parameters
    ----------
    hub
        The administrator's settings.
    person
        The user.
    tiers
        Folder for what is read of remote stores.
    """

    def __init__(self, hub: GpuCkptHub, person: Person, tiers: Path) -> None:
        self._hub = hub
        self._tiers = tiers
        self._opened: dict[str, _Opened] = {}
        self._lock = threading.Lock()
        self._places = ServerPlaces(
            hub.store_url or "", hub.store_options, person.name, timeout=_TIMEOUT
        )
        self._found: list[str] = []
        self.person = person

    def read(self) -> UserReport:
        """Read all that is shown of the user.

        Raises
        ------
        CkptError
            ``store_unavailable`` and others: the store cannot be read.
        """
        user, groups = self.person.name, self.person.groups
        report = UserReport(
            user=user,
            deleted=self.person.deleted,
            allowed=self._hub.allows(user, groups),
            quota=self._hub.quota_of(user, groups),
        )
        with suppress(Exception):  # what cannot be reached is said below
            self._found = self._places.find()
        for opened in self._stores():
            with self._at(opened):
                self._read(opened, report)
        report.states.sort(key=lambda state: (state.created, state.id), reverse=True)
        report.failures.sort(key=lambda failure: failure.at, reverse=True)
        report.stops.sort(key=lambda stop: stop.at, reverse=True)
        return report

    def pin(self, state_id: str, pinned: bool) -> None:
        """Have a state stay whatever the rules say, or not any more.

        Raises
        ------
        CkptError
            ``unknown_state``, ``key_missing``, ``store_unavailable``.
        """
        self._with_state(state_id, lambda store: store.mark(state_id, pinned=pinned))

    def delete(self, state_id: str) -> None:
        """Delete a state, pinned or not.

        Raises
        ------
        CkptError
            ``unknown_state``, ``store_unavailable``.
        """
        self._with_state(state_id, lambda store: store.delete(state_id))

    def expire(self, age: float, *, dry_run: bool) -> list[str]:
        """Delete states that are older than so many seconds; returns their ids.

        Pinned ones stay, and so does all that a running or lost kernel may come back from.
        """
        gone: list[str] = []
        for opened in self._stores():
            with self._at(opened):
                gone += self._expire(opened, age, dry_run)
        return gone

    def collect(self) -> None:
        """Free the space of what was deleted, once it is old enough."""
        for opened in self._stores():
            with self._at(opened):
                opened.store.gc()

    def close(self) -> None:
        """Nothing is asked of them any more."""
        self._places.close()
        for opened in self._opened.values():
            with suppress(CkptError):
                opened.store.stop(0.0)

    # -- how -------------------------------------------------------------------------------

    def _read(self, opened: _Opened, report: UserReport) -> None:
        listing = opened.store.listing()
        for problem in opened.store.warnings():
            if problem.reason == "store_unavailable":
                raise problem
        report.used += listing.used
        states = _states(opened.server, listing)
        report.states += states
        report.size += sum(state.size or 0 for state in states)
        records = opened.store.kernels()
        report.kernels += _kernels(opened, records, states)
        report.stops += _stops(records)
        report.failures += [
            FailureRow(server=opened.server, **msgspec.structs.asdict(failure))
            for failure in opened.store.failures()
        ]

    def _expire(self, opened: _Opened, age: float, dry_run: bool) -> list[str]:
        store = opened.store
        living: set[str] = set()
        busy: set[str] = set()
        for record in store.kernels():
            if opened.liveness.is_lost(record):
                living.add(record.kernel_id)
            elif record.lease is not None:
                # Its server knows from which of them it would come back.
                living.add(record.kernel_id)
                busy.update(state.id for state in store.states(record.kernel_id))
        removals = store.retain(Policy(max_age=age), living=living, busy=busy, dry_run=dry_run)
        if removals and not dry_run:
            store.flush(_TIMEOUT)
        return [removal.state_id for removal in removals]

    def _with_state(self, state_id: str, work: Callable[[StateStore], object]) -> None:
        unknown: CkptError | None = None
        for opened in self._stores():
            try:
                with self._at(opened):
                    work(opened.store)
                    opened.store.flush(_TIMEOUT)
                return
            except CkptError as error:
                if error.reason != "unknown_state":
                    raise
                unknown = error
        assert unknown is not None
        raise unknown

    @contextmanager
    def _at(self, opened: _Opened) -> Iterator[None]:
        """While one is worked on, root acts on files as its owner does."""
        if opened.ring is not None:
            opened.ring.held()  # while the hub's key can still be read
        if isinstance(opened.store, TieredStore):
            yield  # what lies here of it is the service's own
            return
        with acting_as_owner(opened.folder):
            with translated(READING):
                check_records(opened.folder)
            yield

    def _stores(self) -> list[_Opened]:
        servers: tuple[str, ...] = ("",)
        if "{servername}" in (self._hub.store_url or ""):
            servers = tuple(dict.fromkeys(("", *self.person.servers, *self._found)))
        with self._lock:
            return [self._open(server) for server in servers]

    def _open(self, server: str) -> _Opened:
        if not self._hub.store_url:
            raise CkptError(
                "store_unavailable",
                "States are kept in the users' home folders, where this page cannot see them.",
                hint="Set c.GpuCkptHub.store_url to a place that all users' servers and this "
                "service can reach.",
            )
        url = filled(self._hub.store_url, self.person.name, server)
        _check_mounted(self._hub.store_url)
        if (known := self._opened.get(server)) is not None:
            return known
        further = self._hub.server_config.get("GpuCkpt", {})
        place = _Place(
            store_url=url,
            store_options=self._hub.store_options,
            owner=further.get("owner") or self.person.name,
            local_tier_dir=str(self._tiers),
            store_timeout=_TIMEOUT,
        )
        if (master := self._hub.master_key()) is not None:
            place.ring = KeyRing(_DerivedKey(master, self.person.name))
        store = place.open_store()
        liveness = Liveness(
            store,
            ttl=further.get("lease_ttl", _TTL),
            interval=further.get("lease_interval", _INTERVAL),
        )
        opened = self._opened[server] = _Opened(
            server, store, liveness, store.root / owner_folder(place.owner_name()), place.ring
        )
        return opened


def _check_mounted(template: str) -> None:
    """Refuse a folder that is not there at all: nobody would be seen to have states in it."""
    fixed = template.partition("{")[0].removeprefix("file://")
    if "://" in fixed:
        return
    folder = Path(fixed if "{" not in template else fixed.rpartition("/")[0] or "/").expanduser()
    if not folder.is_dir():
        raise CkptError(
            "store_unavailable",
            f"The folder {folder}, where states are kept, is not there.",
            hint="Is it mounted where this service runs?",
        )


def _states(server: str, listing: Listing) -> list[StateRow]:
    rows = [
        _state(server, record, listing.costs.get(record.id), record.meta.path)
        for record in listing.states
    ]
    for bad in listing.damaged:
        rows.append(
            StateRow(
                id=bad.state_id,
                kernel_id=bad.kernel_id,
                created=bad.created,
                server=server,
                cost=listing.costs.get(bad.state_id),
                problem=bad.message,
            )
        )
    return rows


def _state(server: str, record: StateRecord, cost: int | None, path: str | None) -> StateRow:
    return StateRow(
        id=record.id,
        kernel_id=record.meta.kernel_id,
        created=record.created,
        server=server,
        path=path,
        display_name=record.meta.display_name,
        reason=record.meta.reason,
        label=record.meta.label,
        frozen_seconds=record.meta.frozen_seconds,
        size=record.size,
        cost=cost,
        pinned=record.pinned,
        encrypted=record.key_id is not None,
        damage=record.damage,
    )


def _stops(records: Sequence[KernelRecord]) -> list[StopRow]:
    """The last stops of servers: all kernels of a server say the same of one."""
    found: dict[tuple[str, str], StopRow] = {}
    for record in records:
        stop = record.stop
        if stop is None or not 0 <= stop.saved <= stop.kernels <= _MOST_KERNELS:
            continue
        with suppress(ValueError, OverflowError):  # a time that is none, made up by its user
            if unix_seconds(stop.at) > 0 and 0 <= stop.seconds <= _LONGEST_STOP:
                row = StopRow(server=record.server, **msgspec.structs.asdict(stop))
                found[record.server, stop.at] = row
    return list(found.values())


def _kernels(
    opened: _Opened, records: Sequence[KernelRecord], states: Sequence[StateRow]
) -> list[KernelRow]:
    counts = Counter(state.kernel_id for state in states)
    newest = {state.kernel_id: state for state in reversed(states)}
    rows: dict[str, KernelRow] = {}
    for record in records:
        kernel_id, status = record.kernel_id, "ended"
        if opened.liveness.is_lost(record):
            status = "lost" if counts[kernel_id] else "ended"
        elif record.lease is not None:
            status = "hibernated" if record.hibernated else "running"
        rows[kernel_id] = KernelRow(
            kernel_id=kernel_id,
            status=cast("KernelStatus", status),
            server=opened.server,
            path=record.path,
            display_name=record.display_name,
            hostname=record.lease.hostname if record.lease is not None else None,
            states=counts[kernel_id],
        )
    for kernel_id, state in newest.items():
        if kernel_id not in rows:
            rows[kernel_id] = KernelRow(
                kernel_id=kernel_id,
                status="ended",
                server=opened.server,
                path=state.path,
                display_name=state.display_name,
                states=counts[kernel_id],
            )
    return sorted(rows.values(), key=lambda row: (_ORDER.index(row.status), row.path or "~"))
