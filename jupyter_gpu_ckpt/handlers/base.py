"""What every REST handler shares: the keeper, JSON bodies in and out, JSON errors."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec
from jupyter_server.base.handlers import APIHandler
from jupyter_server.extension.handler import ExtensionHandlerMixin
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.httputil import responses

from ..errors import STATUS, CkptError
from ..keeper import Keeper
from ..models import Operation
from ..operations import FORGOTTEN

API: Final = "/gpu-ckpt/api"
AUTH_RESOURCE: Final = "gpu-ckpt"
MAX_BODY_BYTES: Final = 64 * 1024
#: Where the keeper is among the web application's settings; the app puts it there.
KEEPER_SETTING: Final = "jupyter_gpu_ckpt_keeper"

# What kernel, state and operation ids may look like. Anything else is an id nobody has, and never
# reaches a file name.
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
#: What is said of one: its kind's reason, its word, and what may have become of it.
_KINDS: Final = {
    "kernel": ("unknown_kernel", "kernel", "It may have ended: list the kernels anew."),
    "state": ("unknown_state", "saved state", "It may have been deleted: list the states anew."),
    "op": ("unknown_operation", "operation", FORGOTTEN),
}

_SEE: Final = "See the REST API's openapi.yaml."

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class EmptyBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A body that carries nothing."""


class GpuCkptHandler(ExtensionHandlerMixin, APIHandler):
    """Base class of the handlers.

    A :class:`~jupyter_gpu_ckpt.errors.CkptError` raised in a verb becomes the answer, with its
    status; anything else unexpected is logged here and answered as ``internal``, without a
    traceback.
    """

    auth_resource = AUTH_RESOURCE

    @property
    def keeper(self) -> Keeper:
        """The one keeper of this server."""
        keeper: Keeper = self.settings[KEEPER_SETTING]
        return keeper

    def body(self, kind: type[BodyT]) -> BodyT:
        """Decode and check the request's JSON body; no body stands for ``{}``.

        Raises
        ------
        CkptError
            ``bad_request`` when it is too long, not JSON, or not what `kind` says.
        """
        raw = self.request.body or b"{}"
        if len(raw) > MAX_BODY_BYTES:
            raise CkptError(
                "bad_request", f"The body is longer than {MAX_BODY_BYTES} bytes.", hint=_SEE
            )
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CkptError(
                "bad_request",
                f"The body is not what this request takes: {error}.",
                hint=_SEE,
            ) from None

    def checked_id(self, kind: str, value: str) -> str:
        """Return `value` when it can be an id of that kind (``kernel``, ``state``, ``op``).

        Raises
        ------
        CkptError
            The kind's ``unknown_...`` reason otherwise.
        """
        if _ID.fullmatch(value):
            return value
        reason, word, hint = _KINDS[kind]
        raise CkptError(reason, f"There is no {word} with this id.", hint=hint)

    def answer(self, value: Any, status: int = 200) -> None:
        """Finish with `value` (a struct or a list of them) as JSON."""
        self.set_status(status)
        self.finish(msgspec.json.encode(value))

    def accepted(self, operation: Operation) -> None:
        """Finish with 202, the operation, and the address where it can be followed."""
        location = url_path_join(self.base_url, API, "operations", operation.id)
        self.set_header("Location", location)
        self.answer(operation, 202)

    def no_content(self) -> None:
        """Finish with 204."""
        self.set_status(204)
        self.finish()

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log what a user cannot act on; tornado calls it for each exception of a verb."""
        if isinstance(value, CkptError):
            self.log.info("gpu-ckpt: %s (%s)", value.message, value.reason)
        else:
            super().log_exception(typ, value, tb)

    def send_error(self, status_code: int = 500, **kwargs: Any) -> None:
        """Give a `CkptError` its own status; tornado calls it for each exception of a verb."""
        error = _raised(kwargs)
        if isinstance(error, CkptError):
            status_code = error.status
        super().send_error(status_code, **kwargs)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer an error as JSON; tornado calls it, through :meth:`send_error`."""
        error = _raised(kwargs)
        if not isinstance(error, CkptError):
            error = _as_ckpt_error(status_code, error)
        self.finish(msgspec.json.encode(error.as_dict()))


def _raised(kwargs: dict[str, Any]) -> BaseException | None:
    exc_info = kwargs.get("exc_info")
    return exc_info[1] if exc_info else None


def _as_ckpt_error(status_code: int, error: BaseException | None) -> CkptError:
    """Put tornado's and Jupyter Server's own refusals into the same JSON shape."""
    if status_code in (401, 403):
        message = "You may not do this."
        if isinstance(error, web.HTTPError) and error.log_message:
            message = error.log_message
        return CkptError("forbidden", message, hint="Sign in, or give the server's token.")
    if 400 <= status_code < 500:
        phrase = responses.get(status_code, "Bad request")
        return CkptError(
            "bad_request", f"The server did not take this request: {phrase}.", hint=_SEE
        )
    return CkptError(
        "internal",
        "Something went wrong in the server.",
        hint="The server's log has the details.",
    )


assert {reason for reason, _, _ in _KINDS.values()} <= set(STATUS)
