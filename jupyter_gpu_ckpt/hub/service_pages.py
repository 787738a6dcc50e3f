"""The service's pages: they need no script, and take nothing from elsewhere."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from tornado.template import Loader
from tornado.web import HTTPError

from ..errors import CkptError
from . import service_words as words
from .service_access import Handler
from .service_actions import DAY, MOST_DAYS
from .service_history import ALL
from .service_plot import usage_plot
from .service_reading import Person
from .service_records import UserReport
from .service_tables import tables

FOLDER: Final = Path(__file__).parent
_LOADER: Final = Loader(str(FOLDER / "templates"), autoescape="xhtml_escape")
#: Days that a plot shows.
_PLOTTED: Final = 30
#: What a page says after something was done, by the word in its address.
_DONE: Final = {
    "pinned": "The state is pinned: it stays whatever the rules say.",
    "unpinned": "The state is not pinned any more.",
    "deleted": "The state is deleted. Its space is free within an hour or so.",
    "expired": "The states are deleted. Their space is free within an hour or so.",
}
#: In which order users can be listed, by the word in the address: biggest first, but names.
_ORDERS: Final = ("user", "used", "share", "states", "oldest", "failed", "lost")


class Page(Handler):
    """Base of pages."""

    is_page = True
    title = "Saved kernel states"

    def show(self, template: str, **values: Any) -> None:
        """Answer with a page."""
        now = time.time()
        self.set_header("Content-Type", "text/html; charset=utf-8")
        page = _LOADER.load(template).generate(
            handler=self,
            url=self.url,
            visitor=getattr(self, "visitor", None),
            xsrf=self.xsrf_form_html,
            words=words,
            age=partial(words.age, now=now),
            **{
                "title": self.title,
                "done": _DONE.get(self.get_query_argument("done", "")),
                **values,
            },
        )
        self.finish(page)

    def plot(self, user: str, quota: int | None = None) -> dict[str, Any]:
        """Usage over time: the drawing, where there is enough for one, and its numbers."""
        samples = self.history.of(user, time.time() - _PLOTTED * DAY)
        title = f"Bytes in the store, last {_PLOTTED} days"
        drawing = usage_plot(samples, title=title, quota=quota) if len(samples) > 1 else None
        every = max(1, len(samples) // 30)
        return {"plot": drawing, "samples": samples[::-every]}

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Say what went wrong, in words, without a traceback."""
        error = kwargs.get("exc_info", (None, None))[1]
        message, hint = f"{self._reason}.", None
        if isinstance(error, CkptError):
            self.set_status(error.status)
            message, hint = error.message, error.hint
        self.show("error.html", title="That did not work", message=message, hint=hint)


class UsersPage(Page):
    """``GET /``: all users, or the visitor's own page."""

    async def get(self) -> None:
        if not self.visitor.reads_all:
            if not self.visitor.is_user:
                raise HTTPError(403, reason="Only users, and who may see all, have a page")
            self.redirect(self.url("users", self.visitor.name))
            return
        reports = await self.census.all()
        order = self.get_query_argument("sort", "user")
        self.show(
            "users.html",
            title="Saved kernel states of all users",
            reports=_ordered(reports, order),
            order=order if order in _ORDERS else "user",
            problem=self.census.problem,
            read=self.census.finished,
            tables=tables(reports, time.time()),
            **self.plot(ALL),
        )


class UserPage(Page):
    """``GET /users/NAME``: one user's states, kernels and failures."""

    async def get(self, name: str) -> None:
        person = self.person(name)
        report = await self.census.one(person)
        self.show(
            "user.html",
            title=f"Saved kernel states of {name}",
            report=report,
            may_change=self.visitor.may_change(name),
            **self.plot(name, report.quota),
        )


class ActionPage(Page):
    """Base of pages that change something."""

    def back(self, person: Person, done: str) -> None:
        """To the user's page, which says what was done; a reload does not do it again."""
        self.redirect(f"{self.url('users', person.name)}?done={done}", status=303)


class PinPage(ActionPage):
    """``POST /users/NAME/states/ID/pin``."""

    async def post(self, name: str, state: str) -> None:
        person = self.changeable(name)
        pinned = self.get_body_argument("pinned") == "yes"
        await self.actions.pin(self.who, person, state, pinned)
        self.back(person, "pinned" if pinned else "unpinned")


class DeletePage(ActionPage):
    """``/users/NAME/states/ID/delete``: GET asks, POST does it."""

    async def get(self, name: str, state: str) -> None:
        person = self.changeable(name)
        report = await self.census.one(person)
        found = next((row for row in report.states if row.id == state), None)
        if found is None:
            raise CkptError(
                "unknown_state",
                "There is no saved state with this id.",
                hint="It may have been deleted: load the user's page anew.",
            )
        self.show("delete.html", title="Delete a saved state?", report=report, state=found)

    async def post(self, name: str, state: str) -> None:
        person = self.changeable(name)
        await self.actions.delete(self.who, person, state)
        self.back(person, "deleted")


class ExpirePage(ActionPage):
    """``/users/NAME/expire``: GET says which states would go, POST deletes them."""

    async def get(self, name: str) -> None:
        person, days = self.changeable(name), self._days(self.get_query_argument("days", "30"))
        going = set(await self.actions.expire(self.who, person, days, dry_run=True))
        report = await self.census.one(person)
        self.show(
            "expire.html",
            title="Delete old states?",
            report=report,
            days=days,
            most=MOST_DAYS,
            going=[state for state in report.states if state.id in going],
        )

    async def post(self, name: str) -> None:
        person, days = self.changeable(name), self._days(self.get_body_argument("days"))
        await self.actions.expire(self.who, person, days, dry_run=False)
        self.back(person, "expired")

    @staticmethod
    def _days(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise CkptError("bad_request", "Days are a number.") from None


class UnknownPage(Page):
    """What is not there."""

    async def prepare(self) -> None:
        await super().prepare()
        if not self._finished:
            raise HTTPError(404, reason="There is nothing at this address")


def _ordered(reports: list[UserReport], order: str) -> list[UserReport]:
    """Users by name, or those first of whom there is most."""
    by_name = sorted(reports, key=lambda report: report.user)
    match order:
        case "used":
            return sorted(by_name, key=lambda report: -report.used)
        case "share":
            return sorted(by_name, key=lambda report: -(report.share or 0.0))
        case "states":
            return sorted(by_name, key=lambda report: -len(report.states))
        case "oldest":
            return sorted(by_name, key=lambda report: report.oldest or "~")
        case "failed":
            return sorted(by_name, key=lambda report: -len(report.failures))
        case "lost":
            return sorted(by_name, key=lambda report: -len(report.lost))
    return by_name
