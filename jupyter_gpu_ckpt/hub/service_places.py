"""Which named servers have a store of their own: those that the hub has deleted have one too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..store.backend import Backend
from .names import filled, unsafe

_SERVER: Final = "{servername}"
_USER: Final = "{username}"
#: Names that are looked at, and servers that are read, of one user: she makes the folders.
_LOOKED_AT: Final = 10_000
_MOST: Final = 100


class _Pattern(NamedTuple):
    """A folder, and what the names in it that stand for servers begin and end with."""

    folder: str
    before: str
    after: str


class ServerPlaces:
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
        self._pattern = _pattern(template, user)
        self._timeout = timeout
        self._remote: Backend | None = None
        if self._pattern is not None and "://" in self._pattern.folder:
            self._remote = Backend(self._pattern.folder, options, timeout)

    def find(self) -> list[str]:
        """Their names, in order; blocks.

        Raises
        ------
        Exception
            What the store raises.
        """
        if self._pattern is None:
            return []
        found = set()
        for name in islice(self._names(self._pattern.folder), _LOOKED_AT):
            begins, ends = name.startswith(self._pattern.before), name.endswith(self._pattern.after)
            if begins and ends:
                part = name.removeprefix(self._pattern.before).removesuffix(self._pattern.after)
                found.add(unsafe(part))
        return sorted(name for name in found if name)[:_MOST]

    def close(self) -> None:
        """Nothing is asked any more."""
        if self._remote is not None:
            self._remote.close()

    def _names(self, folder: str) -> Iterable[str]:
        if self._remote is None:
            try:
                with os.scandir(Path(folder).expanduser()) as entries:
                    return [entry.name for entry in islice(entries, _LOOKED_AT)]
            except FileNotFoundError:
                return []
        root = self._remote.root
        try:
            paths = self._remote.call("ls", root, detail=False, limit=self._timeout)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]


def _pattern(template: str, user: str) -> _Pattern | None:
    if template.count(_SERVER) != 1:
        return None
    upto, _, rest = template.partition(_SERVER)
    folder, _, before = upto.rpartition("/")
    after = rest.partition("/")[0]
    if _USER not in folder or _USER in before + rest:
        return None  # a folder of several users' servers
    return _Pattern(filled(folder.removeprefix("file://"), user, ""), before, after)
