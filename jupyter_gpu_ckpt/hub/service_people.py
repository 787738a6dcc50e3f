"""Who a hub's users are, in which groups, with which named servers: its REST API is asked."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from tornado.httpclient import AsyncHTTPClient, HTTPClientError

from .service_reading import Person

_PAGE: Final = 200
_TIMEOUT: Final = 10.0
#: So many users are asked for, whatever the hub says of more.
_MOST: Final = 100_000


class HubPeople:
    """Asks a hub for its users.

    Parameters
    ----------
    api_url
        The hub's API, such as ``http://127.0.0.1:8081/hub/api``.
    token
        The service's own.
    """

    def __init__(self, api_url: str, token: str) -> None:
        self._url = f"{api_url.rstrip('/')}/users"
        self._token = token

    async def ask(self) -> list[Person]:
        """All users, a page of the list after the other.

        Raises
        ------
        RuntimeError
            The hub refuses, or does not answer in words that are understood.
        OSError
            It cannot be reached.
        """
        people: list[Person] = []
        offset: int | None = 0
        while offset is not None and len(people) < _MOST:
            items, offset = await self._page(offset)
            people += [_person(item) for item in items]
        return people

    async def _page(self, offset: int) -> tuple[list[dict[str, Any]], int | None]:
        query = {"offset": offset, "limit": _PAGE, "include_stopped_servers": 1}
        try:
            answer = await AsyncHTTPClient().fetch(
                f"{self._url}?{urlencode(query)}",
                headers={
                    "Authorization": f"token {self._token}",
                    "Accept": "application/jupyterhub-pagination+json",
                },
                connect_timeout=_TIMEOUT,
                request_timeout=_TIMEOUT,
            )
            found = msgspec.json.decode(answer.body, type=dict[str, Any])
            following = found["_pagination"]["next"]
            return found["items"], None if following is None else int(following["offset"])
        except HTTPClientError as error:
            raise RuntimeError(f"{error.code} {error.message}") from error
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise RuntimeError("its answer is not understood") from error


def _person(item: dict[str, Any]) -> Person:
    return Person(
        str(item["name"]),
        tuple(sorted(item.get("groups") or ())),
        tuple(sorted(name for name in item.get("servers") or () if name)),
    )
