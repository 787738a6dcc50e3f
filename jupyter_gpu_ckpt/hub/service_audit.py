"""The audit log: who has done what with whose states, and what came of it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from ..errors import CkptError


class Doer(NamedTuple):
    """Who asks for something: a user or a service of the hub, and from which address."""

    name: str
    kind: Literal["user", "service"]
    address: str


class Entry(msgspec.Struct, kw_only=True):
    """One line. `result` is ``done``, or the reason why it failed."""

    at: str
    by: str
    by_kind: Literal["user", "service"] = "user"
    action: str
    user: str
    state: str | None = None
    detail: str | None = None
    result: str = "done"
    from_address: str = ""


class Audit:
    """Appends lines of JSON to a file, and says the same in the service's log.

    Parameters
    ----------
    file
        Mode 0600; made when needed.
    log
        The service's log.
    """

    def __init__(self, file: Path, log: logging.Logger) -> None:
        self._file = file
        self._log = log
        self._lock = threading.Lock()

    def write(self, entry: Entry) -> None:
        """Write one entry.

        Raises
        ------
        CkptError
            ``no_space``: it cannot be written; nothing may be done then.
        """
        line = msgspec.json.encode(entry)
        self._log.info("audit: %s", line.decode())
        try:
            with self._lock:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(self._file, flags, 0o600)
                try:
                    os.write(fd, line + b"\n")
                finally:
                    os.close(fd)
        except OSError as error:
            raise CkptError(
                "no_space",
                "The audit log cannot be written, so nothing was done.",
                hint="Make room, or check the service's folder.",
                details=str(error),
            ) from error
