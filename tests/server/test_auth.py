"""Who may do what: every verb is behind the server's own authentication and authorization."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.cookies import SimpleCookie
from typing import Any

import pytest
from jupyter_server.auth import Authorizer
from tornado.httpclient import HTTPClientError, HTTPResponse

from tests.server import spec

SOMEONE = "00000000-0000-4000-8000-000000000000"


def requests() -> Iterator[tuple[str, str]]:
    """Every described request, with ids that nobody has."""
    for path, item in spec.document()["paths"].items():
        for part in ("kernel_id", "state_id", "operation_id"):
            path = path.replace(f"{{{part}}}", SOMEONE)
        yield from ((method.upper(), path) for method in item if method in spec.METHODS)


REQUESTS = list(requests())


class ReadOnly(Authorizer):
    """Lets everybody read; notes what it was asked."""

    asked: list[tuple[str, str]]

    def is_authorized(self, handler: Any, user: Any, action: str, resource: str) -> bool:
        type(self).asked.append((action, resource))
        return action == "read"


@pytest.fixture
def jp_server_config() -> dict[str, Any]:
    ReadOnly.asked = []
    return {
        "ServerApp": {
            "jpserver_extensions": {"jupyter_gpu_ckpt": True},
            "allow_unauthenticated_access": False,
            "authorizer_class": ReadOnly,
            "reraise_server_extension_failures": True,
        }
    }


def parts(path: str) -> list[str]:
    return ["gpu-ckpt", "api", *path.strip("/").split("/")]


async def refused(answer: Any) -> HTTPResponse:
    with pytest.raises(HTTPClientError) as raised:
        await answer
    response = raised.value.response
    assert response is not None
    return response


@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_nothing_without_signing_in(
    jp_fetch: Callable[..., Any], method: str, path: str
) -> None:
    response = await refused(
        jp_fetch(
            *parts(path),
            method=method,
            headers={"Authorization": "token of-somebody-else"},
            allow_nonstandard_methods=True,
        )
    )
    body = json.loads(response.body)
    assert (response.code, body["reason"]) == (403, "forbidden")
    spec.check(method, path, response.code, body)
    assert ReadOnly.asked == []


@pytest.mark.parametrize(("method", "path"), [r for r in REQUESTS if r[0] != "GET"])
async def test_changes_need_the_right_to_write(
    jp_fetch: Callable[..., Any], method: str, path: str
) -> None:
    response = await refused(jp_fetch(*parts(path), method=method, allow_nonstandard_methods=True))
    body = json.loads(response.body)
    assert (response.code, body["reason"]) == (403, "forbidden")
    assert ReadOnly.asked == [("write", "gpu-ckpt")]


@pytest.mark.parametrize(("method", "path"), [r for r in REQUESTS if r[0] == "GET"])
async def test_reading_needs_the_right_to_read(
    jp_fetch: Callable[..., Any], method: str, path: str
) -> None:
    try:
        response = await jp_fetch(*parts(path))
    except HTTPClientError as error:
        assert error.response is not None
        response = error.response
    # Ids nobody has: there is nothing to read, but one may ask.
    assert response.code in ((404,) if SOMEONE in path else (200,)), response.body
    spec.check(method, path, response.code, json.loads(response.body))
    assert ReadOnly.asked == [("read", "gpu-ckpt")]


async def test_a_page_elsewhere_cannot_use_the_login_cookie(
    jp_serverapp: Any, jp_fetch: Callable[..., Any], http_server_client: Any, jp_base_url: str
) -> None:
    token = jp_serverapp.identity_provider.token
    signed_in = await http_server_client.fetch(f"{jp_base_url}api/status?token={token}")
    cookies = SimpleCookie()
    for line in signed_in.headers.get_list("Set-Cookie"):
        cookies.load(line)
    cookie = "; ".join(f"{name}={morsel.value}" for name, morsel in cookies.items())
    ReadOnly.asked.clear()
    url = f"{jp_base_url}gpu-ckpt/api/gc"
    response = await refused(
        http_server_client.fetch(url, method="POST", body="{}", headers={"Cookie": cookie})
    )
    body = json.loads(response.body)
    assert (response.code, body["reason"]) == (403, "forbidden")
    assert "_xsrf" in body["message"]
    assert ReadOnly.asked == []


async def test_looking_can_be_kept_from_counting_as_activity(
    jp_serverapp: Any, jp_fetch: Callable[..., Any]
) -> None:
    settings = jp_serverapp.web_app.settings
    settings.pop("api_last_activity", None)
    await jp_fetch("gpu-ckpt", "api", "operations", params={"no_track_activity": "1"})
    assert "api_last_activity" not in settings
    await jp_fetch("gpu-ckpt", "api", "operations")
    assert "api_last_activity" in settings


async def test_a_path_that_does_not_exist_is_refused_as_json(
    jp_fetch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(method: str, path: str, **headers: str) -> tuple[int, str]:
        wrong = jp_fetch(
            "gpu-ckpt/api" + path, method=method, headers=headers, allow_nonstandard_methods=True
        )
        response = await refused(wrong)
        body = json.loads(response.body)
        assert set(body) == {"message", "reason", "hint", "details"}
        return response.code, body["reason"]

    paths = ("", "/", "/kernel", f"/kernels/{SOMEONE}/", "/states/a/b/c")
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        for path in paths:
            assert await answer(method, path) == (404, "unknown_path")
            assert await answer(method, path, Authorization="token x") == (403, "forbidden")
    monkeypatch.setattr(ReadOnly, "is_authorized", lambda *_: False)
    assert await answer("GET", "/kernel") == (403, "forbidden")


async def test_a_verb_that_does_not_exist_is_refused_as_json(
    jp_fetch: Callable[..., Any],
) -> None:
    response = await refused(jp_fetch("gpu-ckpt", "api", "doctor", method="POST", body="{}"))
    body = json.loads(response.body)
    assert (response.code, body["reason"]) == (405, "bad_request")
    assert set(body) == {"message", "reason", "hint", "details"}
