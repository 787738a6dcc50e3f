"""Who may see what: logins through JupyterHub, and its scopes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec
from jupyterhub.services.auth import HubOAuthenticated, UserNotAllowed
from tornado.httputil import HTTPServerRequest
from tornado.log import app_log
from tornado.web import HTTPError, RequestHandler

from ..errors import CkptError
from .service_actions import Actions
from .service_audit import Doer
from .service_census import Census
from .service_history import History
from .service_metrics import Metrics
from .service_reading import Person
from .service_scopes import ADMIN_UI, MANAGE, METRICS, READ

#: Seconds that the hub may take to say who somebody is.
_DEADLINE: Final = 15.0

_POLICY: Final = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)


class Visitor(NamedTuple):
    """Who asks: a user of the hub, or another service with a token.

    ``reads_all`` and ``manages``: sees all users' states, and may change them. ``measures``: may
    have the metrics.
    """

    name: str
    is_user: bool
    groups: tuple[str, ...]
    reads_all: bool
    manages: bool
    measures: bool

    def may_see(self, user: str) -> bool:
        """Whether a user's states may be shown."""
        return self.reads_all or (self.is_user and self.name == user)

    def may_change(self, user: str) -> bool:
        """Whether a user's states may be pinned and deleted."""
        return self.manages or (self.is_user and self.name == user)


def visitor_of(model: dict[str, Any]) -> Visitor:
    """What the hub's word of somebody means here."""
    scopes = set(model.get("scopes") or ())
    manages = bool(scopes & {MANAGE, ADMIN_UI})
    reads_all = manages or READ in scopes
    return Visitor(
        name=str(model["name"]),
        is_user=model.get("kind", "user") == "user",
        groups=tuple(model.get("groups") or ()),
        reads_all=reads_all,
        manages=manages,
        measures=reads_all or METRICS in scopes,
    )


def address_of(request: HTTPServerRequest, trusted: Collection[str]) -> str:
    """From where a request comes, as the hub's proxy saw it.

    Each proxy adds from where it got a request to ``X-Forwarded-For``; what is before that in it,
    and in other headers, is anybody's. ``trusted`` are addresses of proxies before the hub's.
    """
    found = request.remote_ip or ""
    for text in reversed(",".join(request.headers.get_list("X-Forwarded-For")).split(",")):
        try:
            address = ip_address(text.strip())
        except ValueError:
            break
        found = str(getattr(address, "ipv4_mapped", None) or address)
        if found not in trusted:
            break
    return found


class Handler(HubOAuthenticated, RequestHandler):  # type: ignore[misc]
    """Base of all handlers: nobody gets further without the hub's word.

    What changes something needs, besides a login's cookie, the token against request forgery
    (``_xsrf``), or a token of the hub's in ``Authorization``.
    """

    #: Whether a browser without a login is sent to the hub's.
    is_page = False

    census: Census
    history: History
    metrics: Metrics
    actions: Actions
    visitor: Visitor

    def initialize(
        self, census: Census, history: History, metrics: Metrics, actions: Actions
    ) -> None:
        """Take what all handlers share."""
        self.census = census
        self.history = history
        self.metrics = metrics
        self.actions = actions

    @property
    def who(self) -> Doer:
        """For the audit log."""
        address = address_of(self.request, self.settings["trusted_downstream"])
        return Doer(self.visitor.name, "user" if self.visitor.is_user else "service", address)

    def set_default_headers(self) -> None:
        """Nothing from elsewhere, no caches."""
        self.set_header("Content-Security-Policy", _POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")

    async def prepare(self) -> None:
        """Ask the hub who it is.

        Raises
        ------
        HTTPError
            403: not logged in, or not allowed; 502: the hub does not answer.
        """
        try:
            asked = self.hub_auth.get_user(self, sync=False)
            model = await asyncio.wait_for(asked, _DEADLINE)
        except HTTPError:
            raise
        except Exception as error:
            raise HTTPError(
                502, log_message=f"the hub: {error!r}", reason="JupyterHub does not answer"
            ) from error
        if not model:
            if self.is_page and self.request.method in ("GET", "HEAD"):
                self.redirect(self.get_login_url())
                return
            raise HTTPError(403, reason="Not logged in, or the page is too old: load it again")
        try:
            allowed = self.check_hub_user(model)
        except UserNotAllowed as error:
            raise HTTPError(403, reason="Your account may not use this service") from error
        self.current_user = allowed
        self.visitor = visitor_of(allowed)
        if self.request.method not in ("GET", "HEAD", "OPTIONS"):
            # The hub's library has looked at it for a cookie's login: twice holds better.
            self.check_xsrf_cookie()

    def log_exception(self, typ: Any, value: BaseException | None, tb: Any) -> None:
        """What visitors are told in words needs no traceback."""
        if isinstance(value, CkptError):
            app_log.warning("%s: %s", self._request_summary(), value.message)
        else:
            super().log_exception(typ, value, tb)

    def person(self, name: str) -> Person:
        """The user of that name, if the visitor may see her.

        Raises
        ------
        HTTPError
            404: there is no such user, or the visitor may not know.
        """
        if not self.visitor.may_see(name):
            raise HTTPError(404, reason="There is no such user")
        known = self.census.person(name)
        if known is not None:
            return known
        if self.visitor.is_user and name == self.visitor.name:
            return Person(name, self.visitor.groups)
        raise HTTPError(404, reason="There is no such user")

    def changeable(self, name: str) -> Person:
        """The same, if the visitor may change her states.

        Raises
        ------
        HTTPError
            404 as above; 403.
        """
        person = self.person(name)
        if not self.visitor.may_change(name):
            raise HTTPError(403, reason="You may see this user's states, and not change them")
        return person

    def url(self, *parts: str) -> str:
        """Path of a page of this service."""
        base = str(self.hub_auth.base_url).rstrip("/")
        return "/".join([base, *(quote(part, safe="") for part in parts)])


class ApiHandler(Handler):
    """Base of what answers programs: JSON, also for errors."""

    def say(self, value: object) -> None:
        """Answer with JSON."""
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.write(msgspec.json.encode(value))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Say what went wrong, without a traceback."""
        error = kwargs.get("exc_info", (None, None))[1]
        if isinstance(error, CkptError):
            self.set_status(error.status)
            body: dict[str, str | None] = {**error.as_dict(), "details": None}
        else:
            reason = {403: "forbidden", 404: "unknown_path"}.get(status_code, "internal")
            body = {"message": f"{self._reason}.", "reason": reason, "hint": None, "details": None}
        self.say(body)
        self.finish()
