"""What keeps the server from its saved states, said in its log once and not at every try."""

from __future__ import annotations

import logging
from typing import Any

from .errors import CkptError


class Troubles:
    """Warns of each trouble once, whatever it stops, until that works again; one a keeper.

    Its methods may be called from any thread.

    Parameters
    ----------
    log
        The server's.
    """

    def __init__(self, log: logging.Logger | Any) -> None:
        self._log = log
        self._said: dict[str, str] = {}

    def tell(self, consequence: str, error: CkptError) -> None:
        """Something does not work: ``consequence`` says what that means for the user."""
        line = error.in_a_line()
        known = line in self._said.values()
        self._said[consequence] = line
        if not known:
            self._log.warning("%s: %s", consequence, line)

    def over(self, consequence: str) -> None:
        """It worked: should it fail again, that is said again."""
        self._said.pop(consequence, None)
