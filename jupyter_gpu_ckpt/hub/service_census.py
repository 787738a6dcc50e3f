"""What is known of all users: read in the background, each store with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from ..errors import CkptError
from ..operations import now
from .errands import Errands
from .service_places import UserPlaces
from .service_reading import Person, UserStores
from .service_records import UserReport
from .settings import GpuCkptHub

T = TypeVar("T")

#: Stores that are read at the same time.
_PARALLEL: Final = 4
#: Seconds for one user's store; where a thread hangs in it, no other is sent after it.
_DEADLINE: Final = 30.0
#: Seconds that a remote store may take to say whose states it holds.
_PLACES: Final = 10.0
#: Seconds that a page waits for what is not known yet.
_PATIENCE: Final = 5.0
#: Seconds for which what was read of one user is new enough for a page about her.
_FRESH: Final = 5.0


class Census:
    """The users of a hub and what their stores hold, as they were read last.

    Users whom the hub has deleted are among them while they have states.

    Pages are made from this and wait for no store. All methods are for the event loop.

    Parameters
    ----------
    hub
        The administrator's settings.
    people
        Coroutine function that asks the hub for its users; may raise anything.
    folder
        The service's own folder.
    interval
        Seconds between the starts of two readings.
    on_round
        Called after each reading of all.
    log
        Where it is said what could not be read.
    """

    def __init__(
        self,
        hub: GpuCkptHub,
        people: Callable[[], Awaitable[list[Person]]],
        folder: Path,
        *,
        interval: float,
        on_round: Callable[[], None],
        log: logging.Logger | Any,
    ) -> None:
        self._hub = hub
        self._people = people
        self._tiers = folder / "tiers"
        self._interval = interval
        self._on_round = on_round
        self._log = log
        # Where the administrator names one owner for all, folders are not the users'.
        names_owner = "owner" in hub.server_config.get("GpuCkpt", {})
        template = "" if names_owner else hub.store_url or ""
        self._places = UserPlaces(template, hub.store_options, timeout=_PLACES)
        self._places_fail = False
        self._stores: dict[str, UserStores] = {}
        self._reports: dict[str, UserReport] = {}
        self._read_at: dict[str, float] = {}
        self._turns = asyncio.Semaphore(_PARALLEL)
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._errands = Errands()
        self._first = asyncio.Event()
        #: Why the hub's users are not known, or not as they are now.
        self.problem: str | None = None
        #: When all were read last, Unix seconds, and how long that took.
        self.finished: float | None = None
        self.took = 0.0

    async def run(self) -> None:
        """Read all again and again, until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self.round()
            except Exception:
                # Whatever it is, the next round must come.
                self._log.exception("The users' states could not be read")
            self._first.set()
            await asyncio.sleep(max(1.0, self._interval - (time.monotonic() - began)))

    async def round(self) -> None:
        """Read all users' stores once."""
        began = time.monotonic()
        # Who has states is asked first: whom the hub makes meanwhile it does know then.
        with_states = await self._with_states()
        try:
            people = await asyncio.wait_for(self._people(), _DEADLINE)
        except Exception as error:
            if self.problem is None:
                self._log.warning("The hub does not say who its users are: %s", error)
            why = str(error) or type(error).__name__
            self.problem = f"The hub does not say who its users are: {why}"
        else:
            self.problem = None
            known = {person.name for person in people}
            people += [Person(name, deleted=True) for name in with_states if name not in known]
            for person in people:
                self._meet(person)
            for gone in self._stores.keys() - {person.name for person in people}:
                self._forget(gone)
        await asyncio.gather(*(self._begin(name) for name in list(self._stores)))
        self.finished, self.took = time.time(), time.monotonic() - began
        self._on_round()

    async def all(self) -> list[UserReport]:
        """What is known of all users, by name; waits a little where nothing is known yet."""
        if not self._first.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._first.wait(), _PATIENCE)
        return self.known()

    def known(self) -> list[UserReport]:
        """What is known of all users at this moment."""
        # Of those whom the hub has deleted there may be a folder, and nothing in it: until that
        # was looked into, it stands for nobody.
        names = (
            name for name in self._stores if name in self._reports or not self._is_deleted(name)
        )
        reports = [self._report(name) for name in sorted(names)]
        return [one for one in reports if not one.deleted or one.states or one.problem]

    async def one(self, person: Person) -> UserReport:
        """What is known of one user, read now if that takes no long."""
        self._meet(person)
        if time.monotonic() - self._read_at.get(person.name, float("-inf")) > _FRESH:
            await asyncio.wait([self._begin(person.name)], timeout=_PATIENCE)
        return self._report(person.name)

    def person(self, name: str) -> Person | None:
        """A user whom the hub has named, or who has come here."""
        stores = self._stores.get(name)
        return None if stores is None else stores.person

    async def act(self, person: Person, work: Callable[[UserStores], T]) -> T:
        """Do something in a user's stores, in a thread, and read them anew.

        Raises
        ------
        CkptError
            What the work raises; ``timeout``, and then it may still come about. It is not begun
            while something that was asked for earlier hangs.
        """
        self._meet(person)
        name, stores = person.name, self._stores[person.name]
        result = await self._errands.run(("act", name), lambda: work(stores), _DEADLINE)
        before = self._reading.get(name)
        if before is not None:  # it may have read what was there before
            await asyncio.wait([before], timeout=_PATIENCE)
        self._read_at.pop(name, None)
        await asyncio.wait([self._begin(name)], timeout=_PATIENCE)
        return result

    def close(self) -> None:
        """Nothing is read any more."""
        self._places.close()
        for stores in self._stores.values():
            stores.close()

    # -- how -------------------------------------------------------------------------------

    async def _with_states(self) -> list[str]:
        """Names of all users who have states; those known as deleted, where that is not known."""
        try:
            found = await self._errands.run(("users",), self._places.find, _DEADLINE)
        except Exception as error:
            if not self._places_fail:
                self._log.warning("States of deleted users are not looked for: %s", error)
            self._places_fail = True
            return [name for name, stores in self._stores.items() if stores.person.deleted]
        self._places_fail = False
        return found

    def _meet(self, person: Person) -> None:
        known = self._stores.get(person.name)
        if known is None:
            self._stores[person.name] = UserStores(self._hub, person, self._tiers)
        elif known.person != person:
            servers = tuple(dict.fromkeys((*person.servers, *known.person.servers)))
            known.person = person._replace(servers=servers)

    def _forget(self, name: str) -> None:
        self._reports.pop(name, None)
        self._read_at.pop(name, None)
        self._reading.pop(name, None)
        self._stores.pop(name).close()

    def _report(self, name: str) -> UserReport:
        found = self._reports.get(name)
        if found is not None:
            return found
        return UserReport(
            user=name, deleted=self._is_deleted(name), problem="It has not been read yet."
        )

    def _is_deleted(self, name: str) -> bool:
        person = self.person(name)
        return person is not None and person.deleted

    def _begin(self, name: str) -> asyncio.Task[None]:
        """The reading of a user's store that is under way, or a new one."""
        task = self._reading.get(name)
        if task is None or task.done():
            task = self._reading[name] = asyncio.create_task(self._read(name))
        return task

    async def _read(self, name: str) -> None:
        stores = self._stores.get(name)
        if stores is None:
            return
        async with self._turns:
            try:
                report = await self._errands.run(("read", name), stores.read, _DEADLINE)
            except CkptError as error:
                self._failed(name, error.message, error.hint)
            except Exception as error:
                self._log.exception("The states of %s could not be read", name)
                self._failed(name, f"It could not be read: {type(error).__name__}.", None)
            else:
                report.read = now()
                self._reports[name] = report
                self._read_at[name] = time.monotonic()

    def _failed(self, name: str, message: str, hint: str | None) -> None:
        """One user's store that cannot be read is one row with a reason, and what was known."""
        before = self._report(name)
        if before.problem != message:
            self._log.warning("The states of %s cannot be read: %s", name, message)
        # Whether the hub knows her is known all the same.
        self._reports[name] = msgspec.structs.replace(
            before, problem=message, hint=hint, deleted=self._is_deleted(name)
        )
