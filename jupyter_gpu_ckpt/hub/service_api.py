"""The service's answers for programs: JSON, CSV and Prometheus."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from tornado.web import HTTPError

from ..errors import CkptError
from .service_access import ApiHandler
from .service_metrics import CONTENT_TYPE
from .service_records import StateRow, UserReport, UserSummary

_T = TypeVar("_T")


class MetricsHandler(ApiHandler):
    """``GET metrics``: for who may have them."""

    async def get(self) -> None:
        if not self.visitor.measures:
            raise HTTPError(403, reason="The metrics need the scope custom:gpu-ckpt:metrics")
        self.set_header("Content-Type", CONTENT_TYPE)
        self.write(self.metrics.text())


class UsersApi(ApiHandler):
    """``GET api/users``: all users in numbers, or the visitor alone."""

    async def get(self) -> None:
        self.say({"problem": self.census.problem, "users": await self.summaries()})

    async def summaries(self) -> list[UserSummary]:
        """Of whom the visitor may see."""
        if self.visitor.reads_all:
            return [report.summary() for report in await self.census.all()]
        if not self.visitor.is_user:
            return []
        return [(await self.census.one(self.person(self.visitor.name))).summary()]


class UsersCsv(UsersApi):
    """``GET users.csv``: the same as a table."""

    async def get(self) -> None:
        _send(self, "users", UserSummary.__struct_fields__, await self.summaries())


class UserApi(ApiHandler):
    """``GET api/users/NAME``: states, kernels and failures of one user."""

    async def get(self, name: str) -> None:
        self.say(await self.report(name))

    async def report(self, name: str) -> UserReport:
        """What is known of a user whom the visitor may see."""
        return await self.census.one(self.person(name))


class StatesCsv(UserApi):
    """``GET users/NAME/states.csv``: one user's states as a table."""

    async def get(self, name: str) -> None:
        _send(self, "states", StateRow.__struct_fields__, (await self.report(name)).states)


class _Pinned(msgspec.Struct, forbid_unknown_fields=True):
    pinned: bool


class _Expiry(msgspec.Struct, forbid_unknown_fields=True):
    days: float
    dry_run: bool = True


class StateApi(ApiHandler):
    """``PATCH`` and ``DELETE api/users/NAME/states/ID``."""

    async def patch(self, name: str, state: str) -> None:
        person, body = self.changeable(name), _decoded(self.request.body, _Pinned)
        await self.actions.pin(self.who, person, state, body.pinned)
        self.set_status(204)

    async def delete(self, name: str, state: str) -> None:
        person = self.changeable(name)
        await self.actions.delete(self.who, person, state)
        self.set_status(204)


class ExpireApi(ApiHandler):
    """``POST api/users/NAME/expire``: which states go, or went."""

    async def post(self, name: str) -> None:
        person, body = self.changeable(name), _decoded(self.request.body, _Expiry)
        gone = await self.actions.expire(self.who, person, body.days, dry_run=body.dry_run)
        self.say({"states": gone, "dry_run": body.dry_run})


class UnknownApi(ApiHandler):
    """What is not there."""

    async def prepare(self) -> None:
        await super().prepare()
        raise HTTPError(404, reason="There is nothing at this address")


def _decoded(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise CkptError(
            "bad_request",
            f"The request is not understood: {error}.",
            hint="Send what the documentation of the page's API says.",
        ) from error


def _send(
    handler: ApiHandler, name: str, columns: Sequence[str], rows: Sequence[msgspec.Struct]
) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(getattr(row, column)) for column in columns])
    handler.set_header("Content-Type", "text/csv; charset=utf-8")
    handler.set_header("Content-Disposition", f'attachment; filename="{name}.csv"')
    handler.write(text.getvalue())


def _cell(value: object) -> object:
    """A value for a spreadsheet, which would take some texts of users' for formulas."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value
