"""Names of users and servers in paths and URLs, and of groups."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote, unquote

_FIELD: Final = re.compile(r"\{([^{}]*)\}")


def safe(name: str) -> str:
    """A name as one part of a path or URL; no two names become the same.

    Nothing in it leads out of a folder. ``_`` stands for no name, as for a server without one.
    """
    quoted = quote(name, safe="@") if name else "_"
    if quoted.startswith(".") or (name and quoted.startswith("_")):
        return f"%{ord(quoted[0]):02X}{quoted[1:]}"
    return quoted


def unsafe(part: str) -> str | None:
    """The name that :func:`safe` made this from; ``None`` where it made it from none."""
    name = "" if part == "_" else unquote(part)
    return name if safe(name) == part else None


def filled(template: str, user: str, server: str) -> str:
    """A template with the names filled in, made safe."""
    names = {"username": safe(user), "servername": safe(server)}
    return _FIELD.sub(lambda match: names[match[1]], template)


def fields(template: str) -> list[str]:
    """What a template has in braces."""
    return _FIELD.findall(template)


def groups_of(spawner: Any) -> list[str]:
    """Names of the groups that a spawner's user is in."""
    return [group.name for group in spawner.user.groups]
