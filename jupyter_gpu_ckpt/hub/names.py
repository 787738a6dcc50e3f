"""Names of users and servers in paths and URLs, and of groups."""

from __future__ import annotations

import re
from typing import Any, Final

from ..place_settings import path_part

_FIELD: Final = re.compile(r"\{([^{}]*)\}")


def filled(template: str, user: str, server: str) -> str:
    """A template with the names filled in, so that no two lead to the same place.

    As ``{username}`` in ``GpuCkpt.store_url``.
    """
    named = path_part(server)
    if named.startswith("_"):  # which alone stands for a server without a name
        named = f"%5F{named[1:]}"
    names = {"username": path_part(user), "servername": named or "_"}
    return _FIELD.sub(lambda match: names[match[1]], template)


def fields(template: str) -> list[str]:
    """What a template has in braces."""
    return _FIELD.findall(template)


def groups_of(spawner: Any) -> list[str]:
    """Names of the groups that a spawner's user is in."""
    return [group.name for group in spawner.user.groups]
