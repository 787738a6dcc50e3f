"""What can be done with users' states: pin, delete, expire; each in the audit log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import CkptError
from ..operations import now
from .service_audit import Audit, Doer, Entry
from .service_census import Census
from .service_metrics import Metrics
from .service_reading import Person, UserStores

T = TypeVar("T")

#: Seconds in a day, and the most days that "older than" takes.
DAY = 86400.0
MOST_DAYS = 3650


class Actions:
    """Does what a visitor asks for, after it has been noted who asks.

    Parameters
    ----------
    census, metrics, audit
        The service's.
    log
        For what fails afterwards.
    """

    def __init__(
        self, census: Census, metrics: Metrics, audit: Audit, log: logging.Logger | Any
    ) -> None:
        self._census = census
        self._metrics = metrics
        self._audit = audit
        self._log = log
        self._collecting: dict[str, asyncio.Task[None]] = {}

    async def pin(self, by: Doer, person: Person, state: str, pinned: bool) -> None:
        """Pin a state, or unpin it; raises :class:`CkptError`."""
        entry = self._entry(by, "pin" if pinned else "unpin", person, state=state)
        await self._do(entry, person, lambda stores: stores.pin(state, pinned))

    async def delete(self, by: Doer, person: Person, state: str) -> None:
        """Delete a state; raises :class:`CkptError`."""
        entry = self._entry(by, "delete", person, state=state)
        await self._do(entry, person, lambda stores: stores.delete(state))
        self._collect(person)

    async def expire(self, by: Doer, person: Person, days: float, *, dry_run: bool) -> list[str]:
        """Delete states older than so many days; returns their ids; raises :class:`CkptError`."""
        if not 0 <= days <= MOST_DAYS:
            raise CkptError("bad_request", f"Days are a number from 0 to {MOST_DAYS}.")

        def work(stores: UserStores) -> list[str]:
            return stores.expire(days * DAY, dry_run=dry_run)

        if dry_run:
            return await self._census.act(person, work)
        detail = f"older than {days:g} days"
        entry = self._entry(by, "expire", person, detail=detail)
        gone = await self._do(entry, person, work)
        self._collect(person)
        return gone

    def _entry(
        self,
        by: Doer,
        action: str,
        person: Person,
        *,
        state: str | None = None,
        detail: str | None = None,
    ) -> Entry:
        return Entry(
            at=now(),
            by=by.name,
            by_kind=by.kind,
            action=action,
            user=person.name,
            state=state,
            detail=detail,
            result="begun",
            from_address=by.address,
        )

    async def _do(self, entry: Entry, person: Person, work: Callable[[UserStores], T]) -> T:
        self._audit.write(entry)  # first: where it cannot be, nothing is done
        entry.result = "failed"
        try:
            result = await self._census.act(person, work)
            entry.result = "done"
            if isinstance(result, list):
                entry.detail = f"{entry.detail}: {' '.join(result) or 'none'}"
            return result
        except CkptError as error:
            entry.result = error.reason
            raise
        finally:
            entry.at = now()
            self._metrics.actions.labels(entry.action, entry.result).inc()
            try:
                self._audit.write(entry)
            except CkptError as error:  # it was done, and is in the service's log
                self._log.error("The audit log cannot be written: %s", error.details)

    def _collect(self, person: Person) -> None:
        """Free space in the background: who is to do it otherwise, if no server of hers runs."""

        async def collect() -> None:
            try:
                await self._census.act(person, lambda stores: stores.collect())
            except CkptError as error:
                self._log.warning("The space of deleted states is not free yet: %s", error.message)
            finally:
                del self._collecting[person.name]

        # What was deleted just now is left to a later one anyway: so one at a time will do.
        if person.name not in self._collecting:
            self._collecting[person.name] = asyncio.create_task(collect())
