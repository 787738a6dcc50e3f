"""Whose states there are, by the folders of the store: the hub forgets users and servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from ..errors import CkptError
from ..store.backend import Backend
from ..store.layout import owner_folder
from .names import filled, unsafe

_SERVER: Final = "{servername}"
_USER: Final = "{username}"
#: Names that are looked at, and servers that are read, of one user: she makes the folders.
_LOOKED_AT: Final = 10_000
_MOST: Final = 100
#: The same of all users.
_USERS_LOOKED_AT: Final = 200_000
_MOST_USERS: Final = 10_000


class _Pattern(NamedTuple):
    """A folder, and what the names in it that stand for somebody begin and end with."""

    folder: str
    before: str = ""
    after: str = ""

    def names(self, found: Iterable[str], name_of: Callable[[str], str | None]) -> list[str]:
        """The names that stand for somebody, as `name_of` reads them; in order."""
        parts = (
            name.removeprefix(self.before).removesuffix(self.after)
            for name in found
            if name.startswith(self.before) and name.endswith(self.after)
        )
        return sorted({name for part in parts if (name := name_of(part))})


class _Folder:
    """A folder of the store, here or on a remote system, whose folders can be listed; blocks."""

    def __init__(self, path: str, options: dict[str, Any], timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._remote = Backend(path, options, timeout) if "://" in path else None

    def names(self, most: int) -> list[str]:
        """Names of the folders in it, so many at most; none where it is not there."""
        if self._remote is None:
            try:
                with os.scandir(Path(self._path).expanduser()) as entries:
                    looked_at = islice(entries, most)
                    # Users make folders: a link, which leads elsewhere, is none.
                    return [e.name for e in looked_at if e.is_dir(follow_symlinks=False)]
            except FileNotFoundError:
                return []
        try:
            paths = self._remote.call("ls", self._remote.root, detail=False, limit=self._timeout)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in islice(paths, most)]

    def close(self) -> None:
        """Nothing is asked any more."""
        if self._remote is not None:
            self._remote.close()


class _Places:
    """Finds names by folders that stand for them; none where there is no such pattern."""

    def __init__(self, pattern: _Pattern | None, options: dict[str, Any], timeout: float) -> None:
        self._pattern = pattern
        self._folder = None if pattern is None else _Folder(pattern.folder, options, timeout)

    def _names(self, most: int, name_of: Callable[[str], str | None]) -> list[str]:
        """The names that the first so many folders stand for; blocks."""
        if self._pattern is None or self._folder is None:
            return []
        return self._pattern.names(self._folder.names(most), name_of)

    def close(self) -> None:
        """Nothing is asked any more."""
        if self._folder is not None:
            self._folder.close()


class UserPlaces(_Places):
    """Finds the names of all who have states: also of those whom the hub has deleted.

    By the folders that stand for users, as in ``s3://states/{username}``, or by their parts of one
    store for all. Where servers' folders come before, none is found.

    Parameters
    ----------
    template
        The setting ``store_url``.
    options
        fsspec's options for it.
    timeout
        Seconds that a remote store may take to answer.
    """

    def __init__(self, template: str, options: dict[str, Any], timeout: float) -> None:
        super().__init__(_users_pattern(template), options, timeout)
        self._template = template

    def find(self) -> list[str]:
        """Their names, in order; blocks.

        Raises
        ------
        Exception
            What the store raises.
        """
        found = self._names(_USERS_LOOKED_AT, unsafe if _USER in self._template else _owner)
        return list(islice(filter(self._has_store, found), _MOST_USERS))

    def _has_store(self, name: str) -> bool:
        """Whether there may be a store, and not just a folder of that name, such as a home."""
        url = self._template.removeprefix("file://")
        if "://" in url or _SERVER in url:
            return True
        store = Path(filled(url, name, "")).expanduser() / owner_folder(name)
        return os.path.lexists(store / "store.json")


class ServerPlaces(_Places):
    """Finds the names of a user's servers by the folders of their states.

    Only where the user's own folder holds one for each server, as in
    ``s3://states/{username}/{servername}``; elsewhere none is found.

    Parameters
    ----------
    template
        The setting ``store_url``.
    options
        fsspec's options for it.
    user
        Whose servers they are.
    timeout
        Seconds that a remote store may take to answer.
    """

    def __init__(self, template: str, options: dict[str, Any], user: str, timeout: float) -> None:
        super().__init__(_pattern(template, user), options, timeout)

    def find(self) -> list[str]:
        """Their names, in order; blocks.

        Raises
        ------
        Exception
            What the store raises.
        """
        return self._names(_LOOKED_AT, unsafe)[:_MOST]


def _owner(part: str) -> str | None:
    """The user whose part of a store for all has that name."""
    name = unquote(part)
    try:
        return name if owner_folder(name) == part else None
    except CkptError:
        return None


def _users_pattern(template: str) -> _Pattern | None:
    if not template:
        return None
    if "{" not in template:
        return _Pattern(template.removeprefix("file://"))
    upto, found, rest = template.partition(_USER)
    if not found or "{" in upto:
        return None
    folder, _, before = upto.rpartition("/")
    return _Pattern(folder.removeprefix("file://"), before, rest.partition("/")[0])


def _pattern(template: str, user: str) -> _Pattern | None:
    if template.count(_SERVER) != 1:
        return None
    upto, _, rest = template.partition(_SERVER)
    folder, _, before = upto.rpartition("/")
    after = rest.partition("/")[0]
    if _USER not in folder or _USER in before + rest:
        return None  # a folder of several users' servers
    return _Pattern(filled(folder.removeprefix("file://"), user, ""), before, after)
