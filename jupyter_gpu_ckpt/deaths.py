"""Whether a kernel's unexpected death is answered with a restore, and of which states."""

from __future__ import annotations

import time
from collections.abc import Callable


class DeathPolicy:
    """Decides, for one kernel, whether a death is answered by a restore.

    Parameters
    ----------
    window
        Seconds within which a restored kernel's death counts as caused by the state itself.
    limit
        How many such deaths in a row are tolerated before the state is left alone.
    clock
        Monotonic seconds.
    """

    def __init__(
        self, window: float, limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._window = window
        self._limit = limit
        self._clock = clock
        self._restored_at: float | None = None
        self._quick_deaths = 0
        #: States of the process that runs, oldest first: saved from it, or restored into it.
        self._own: list[str] = []

    @property
    def latest(self) -> str | None:
        """The state that the running process is most like: its newest, or where it came from."""
        return self._own[-1] if self._own else None

    def started_fresh(self) -> None:
        """An empty process runs: states of earlier ones are not what its user wants back."""
        self._own.clear()
        self._restored_at = None
        self._quick_deaths = 0

    def saved(self, state_id: str) -> None:
        """A state was made of the process that runs."""
        self._own.append(state_id)

    def restored(self, state_id: str) -> None:
        """The process that runs came out of this state: later ones are another story."""
        if state_id in self._own:
            del self._own[self._own.index(state_id) + 1 :]
        else:
            self._own = [state_id]
        self._restored_at = self._clock()

    def forget(self, state_id: str) -> None:
        """The state was deleted."""
        if state_id in self._own:
            self._own.remove(state_id)

    @property
    def has_state(self) -> bool:
        """Whether there is a state of the process that runs."""
        return bool(self._own)

    def states_to_restore(self) -> list[str]:
        """Ids of the states to restore after a death now, best one first; none to start empty.

        The next one is for the case that the one before it is damaged. Called once for each death.
        """
        quick = self._restored_at is not None and self._clock() - self._restored_at < self._window
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        return [] if self._quick_deaths > self._limit else self._own[::-1]
