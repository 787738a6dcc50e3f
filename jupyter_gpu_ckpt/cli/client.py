"""A client of one server's REST API."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, quote, urlencode, urlsplit, urlunsplit

import msgspec
from jupyter_server.utils import urldecode_unix_socket_path
from tornado.httpclient import HTTPClient, HTTPClientError, HTTPRequest, HTTPResponse
from tornado.netutil import Resolver
from tornado.simple_httpclient import HTTPStreamClosedError, SimpleAsyncHTTPClient

from ..models import ErrorBody
from .errors import CliError

CONNECT_TIMEOUT: Final = 10.0
REQUEST_TIMEOUT: Final = 60.0
#: Collecting garbage and deleting read the whole store, seconds.
LONG_TIMEOUT: Final = 3600.0

# What goes wrong is said once, by the error raised here.
logging.getLogger("tornado").addHandler(logging.NullHandler())

T = TypeVar("T")


class UnixResolver(Resolver):
    """Reaches a server that listens on a Unix socket: the host part names the socket."""

    async def resolve(self, host: str, port: int, family: Any = None) -> list[tuple[int, Any]]:
        return [(socket.AF_UNIX, urldecode_unix_socket_path(host))]


class _StockError(msgspec.Struct, frozen=True):
    """What the Jupyter Server's own API says when it fails."""

    message: str


def _stock(response: HTTPResponse) -> ErrorBody | None:
    try:
        said = msgspec.json.decode(response.body, type=_StockError)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return ErrorBody(said.message, "unknown_path" if response.code == 404 else "internal")


class Server:
    """One running server.

    Parameters
    ----------
    url
        Its URL with the base URL; a token in the query and a trailing ``/lab`` or ``/tree``
        are understood, so that the address of a browser works.
    token
        Its token, ``None`` or empty for a server without authentication.
    root_dir
        Its root folder on this machine, ``None`` when not known.
    verify
        Whether to check the server's TLS certificate.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        root_dir: str | None = None,
        verify: bool = True,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "http+unix") or not parts.netloc:
            raise CliError(
                f"This is not the URL of a server: {url}",
                "bad_request",
                hint="It looks like http://localhost:8888/ .",
                exit_code=2,
            )
        path = parts.path.rstrip("/")
        for page in ("/lab", "/tree"):
            path = path.removesuffix(page)
        in_query = parse_qs(parts.query).get("token", [""])[0]
        self.url = urlunsplit((parts.scheme, parts.netloc, path + "/", "", ""))
        self.root_dir = root_dir
        self._token = token or in_query
        #: Whether its TLS certificate is checked.
        self.verify = verify

    def get(self, kind: type[T], *parts: str, **query: str | None) -> T:
        """GET a resource below ``/gpu-ckpt/api``, as `kind`; raises `CliError`."""
        return self.decode(kind, self._request("GET", parts, query))

    def post(
        self, kind: type[T], *parts: str, body: Any = None, timeout: float = REQUEST_TIMEOUT
    ) -> T:
        """POST to a resource; returns the answer as `kind`; raises `CliError`."""
        return self.decode(kind, self._request("POST", parts, {}, body or {}, timeout))

    def put(self, kind: type[T], *parts: str, body: Any) -> T:
        """PUT a resource; returns the answer as `kind`; raises `CliError`."""
        return self.decode(kind, self._request("PUT", parts, {}, body))

    def patch(self, kind: type[T], *parts: str, body: Any) -> T:
        """PATCH a resource; returns the answer as `kind`; raises `CliError`."""
        return self.decode(kind, self._request("PATCH", parts, {}, body))

    def delete(self, *parts: str) -> None:
        """DELETE a resource; raises `CliError`."""
        self._request("DELETE", parts, {}, None, LONG_TIMEOUT)

    def dismiss(self, kernel_id: str) -> None:
        """Dismiss a lost kernel; raises `CliError`."""
        self._request("POST", ("lost", kernel_id, "dismiss"), {}, {})

    def jupyter(
        self, method: str, path: str, *, body: Any = None, timeout: float = REQUEST_TIMEOUT
    ) -> HTTPResponse:
        """Ask the Jupyter Server itself: a path below ``/api``, quoted; raises `CliError`."""
        return self._fetch(method, f"api/{path}", {}, body, timeout)

    def headers(self) -> dict[str, str]:
        """What lets a request in."""
        # A server without authentication still wants an XSRF token from what could be a browser.
        xsrf = secrets.token_hex(16)
        headers = {"Accept": "application/json", "Cookie": f"_xsrf={xsrf}", "X-XSRFToken": xsrf}
        if self._token:
            headers["Authorization"] = f"token {self._token}"
        return headers

    def _request(
        self,
        method: str,
        parts: tuple[str, ...],
        query: dict[str, str | None],
        body: Any = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> HTTPResponse:
        path = "/".join(["gpu-ckpt", "api", *(quote(p, safe="") for p in parts)])
        return self._fetch(method, path, query, body, timeout)

    def _fetch(
        self, method: str, below: str, query: dict[str, str | None], body: Any, timeout: float
    ) -> HTTPResponse:
        address = urlsplit(self.url)
        path = address.path + below
        asked = {key: value for key, value in query.items() if value is not None}
        # What a script asks for does not show that a person is there.
        asked["no_track_activity"] = "1"
        scheme = "http" if address.scheme == "http+unix" else address.scheme
        headers = self.headers()
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = HTTPRequest(
            urlunsplit((scheme, address.netloc, path, urlencode(asked), "")),
            method=method,
            headers=headers,
            body=None if body is None else msgspec.json.encode(body),
            connect_timeout=CONNECT_TIMEOUT,
            request_timeout=timeout,
            follow_redirects=False,
            validate_cert=self.verify,
        )
        options = {"resolver": UnixResolver()} if address.scheme == "http+unix" else {}
        client = HTTPClient(SimpleAsyncHTTPClient, **options)
        try:
            return client.fetch(request)
        except HTTPClientError as error:
            raise self._refused(error) from None
        except ssl.SSLError as error:
            raise self._unreachable(
                error.reason or str(error), "SSL_CERT_FILE can name the authority to trust."
            ) from None
        except OSError as error:
            raise self._unreachable(error.strerror or str(error)) from None
        finally:
            client.close()

    def decode(self, kind: type[T], response: HTTPResponse) -> T:
        """An answer as `kind`; raises `CliError`."""
        try:
            return msgspec.json.decode(response.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise CliError(
                f"The server at {self.url} gave an answer this command does not understand.",
                "bad_request",
                hint="Is its jupyter-gpu-ckpt of another version?",
            ) from None

    def _refused(self, error: HTTPClientError) -> CliError:
        if isinstance(error, HTTPStreamClosedError) or error.response is None:
            return self._unreachable(error.message)
        body: ErrorBody | None
        try:
            body = msgspec.json.decode(error.response.body, type=ErrorBody)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = _stock(error.response)
        if body is not None and error.code != 403:
            return CliError(body.message, body.reason, hint=body.hint, details=body.details)
        if error.code in (301, 302, 401, 403):
            return CliError(
                f"The server at {self.url} does not let this command in.",
                "forbidden",
                hint="Give its token with --token or in JUPYTER_TOKEN.",
                details=body.message if body is not None else None,
            )
        if error.code == 404:
            return CliError(
                f"The server at {self.url} does not have jupyter-gpu-ckpt enabled.",
                "no_server",
                hint="See 'jupyter server extension list' in the server's environment.",
            )
        return CliError(
            f"The server at {self.url} failed: {error}.", "internal", hint="Look at its log."
        )

    def _unreachable(
        self, why: str, hint: str = "'jupyter server list' shows the servers that run here."
    ) -> CliError:
        message = f"The server at {self.url} cannot be reached: {why}."
        return CliError(message, "unreachable", hint=hint)
