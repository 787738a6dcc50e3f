"""What keeps the server from its saved states, said in its log once and not at every try."""

from __future__ import annotations

import logging
import threading
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
        self._lock = threading.Lock()
        #: By consequence, reason and message; details differ from try to try.
        self._said: dict[str, tuple[str, str]] = {}
        #: Those of what is not tried again, so that nobody will say that it works.
        self._passing: set[tuple[str, str]] = set()

    def tell(self, consequence: str, error: CkptError, *, again: bool = True) -> None:
        """Something does not work: ``consequence`` says what that means for the user.

        ``again``: it is tried again, and :meth:`over` is called when it works.
        """
        trouble = (error.reason, error.message)
        with self._lock:
            known = trouble in self._passing or trouble in self._said.values()
            if again:
                self._said[consequence] = trouble
            else:
                self._passing.add(trouble)
        if not known:
            self._log.warning("%s: %s", consequence, error.in_a_line())

    def over(self, consequence: str) -> None:
        """It worked: should it fail again, or anything that the same had stopped, it is said."""
        with self._lock:
            ended = self._said.pop(consequence, None)
            self._said = {stopped: it for stopped, it in self._said.items() if it != ended}
            self._passing.clear()
