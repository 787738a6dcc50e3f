"""A REST client that holds every answer against ``openapi.yaml``."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests

from tests.harness.client import Message, wait_for
from tests.harness.server import JupyterServer
from tests.server import spec

OVER = ("done", "failed", "cancelled")


def metrics(server: JupyterServer) -> dict[str, float]:
    """Prometheus metrics of a server, by names with labels, in order of the labels' names."""
    answer = server.client._http.get(f"{server.base_url}metrics", timeout=30)
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


class Api:
    """The API of one server, as a program uses it."""

    def __init__(self, server: JupyterServer) -> None:
        self.server = server
        self._http = requests.Session()
        self._http.trust_env = False
        self._http.headers["Authorization"] = f"token {server.token}"

    def request(
        self, method: str, path: str, /, *, body: Any = None, status: int = 200, **query: str
    ) -> Any:
        """Send a request, fail unless it is answered with `status` as described, decode it."""
        answer = self._answer(method, path, body, query)
        content = answer.json() if answer.content else None
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {content}"
        spec.check(method, path, status, content)
        return content

    def get(self, path: str, /, **kwargs: Any) -> Any:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, /, **kwargs: Any) -> Any:
        return self.request("POST", path, body=body, **kwargs)

    def delete(self, path: str, /, **kwargs: Any) -> Any:
        return self.request("DELETE", path, **kwargs)

    def error(
        self, method: str, path: str, status: int, body: Any = None, /, **query: str
    ) -> Message:
        """Send a request that must fail with `status`; return the error."""
        return dict(self.request(method, path, body=body, status=status, **query))

    def begin(self, path: str, body: Any = None) -> Message:
        """Start an operation; its Location must lead to it."""
        answer = self._answer("POST", path, body, {})
        content = answer.json()
        assert answer.status_code == 202, content
        spec.check("POST", path, 202, content)
        followed = self._http.get(urljoin(answer.url, answer.headers["Location"]), timeout=30)
        assert followed.json()["id"] == content["id"]
        return dict(content)

    def finish(self, operation: Message, timeout: float = 60) -> Message:
        """Wait until an operation is over, however it ended."""

        def look() -> Message | None:
            now = dict(self.get(f"/operations/{operation['id']}"))
            return now if now["status"] in OVER else None

        return dict(wait_for(f"the {operation['kind']} is over", look, timeout))

    def done(self, path: str, body: Any = None, timeout: float = 60) -> Message:
        """Start an operation and wait for it; fail unless it is done; return its result."""
        operation = self.finish(self.begin(path, body), timeout)
        assert operation["status"] == "done", operation
        assert operation["progress"] == 1
        return dict(operation["result"])

    def failed(self, path: str, body: Any = None, timeout: float = 60) -> Message:
        """The error of something that must not work, whether at once or in its operation."""
        answer = self._answer("POST", path, body, {})
        content = answer.json()
        spec.check("POST", path, answer.status_code, content)
        if answer.status_code != 202:
            return dict(content)
        operation = self.finish(content, timeout)
        assert operation["status"] == "failed", operation
        return dict(operation["error"])

    def raw(self, method: str, target: str, body: bytes | None = None) -> tuple[int, Message]:
        """Send a request line as it is: ordinary clients tidy up paths."""
        address = urlsplit(self.server.base_url)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        try:
            headers = {"Authorization": f"token {self.server.token}"}
            connection.request(method, f"/gpu-ckpt/api{target}", body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def _answer(
        self, method: str, path: str, body: Any, query: dict[str, str]
    ) -> requests.Response:
        url = f"{self.server.base_url}gpu-ckpt/api{path}"
        return self._http.request(method, url, json=body, params=query, timeout=60)
