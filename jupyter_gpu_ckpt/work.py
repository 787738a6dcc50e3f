"""What one kernel has done since it was last saved, and when it is to be saved for that."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

from .models import AutoSaveChoice, AutoSavePolicy
from .tracking import TrackedKernel

#: Longest time between two tries to save a kernel, in seconds.
_LONGEST_BACKOFF = 3600.0


class WorkObserver(Protocol):
    """Who acts on what a kernel does."""

    def worked(self, work: Work) -> None:
        """A kernel has something unsaved, or finished a cell. Not called for each message."""

    def asked(self, work: Work, data: dict[str, Any]) -> None:
        """A kernel sent a message to its server. Anything may be in it."""


class Work:
    """Work of one kernel that is in no state yet. Times are monotonic seconds.

    Implements :class:`~jupyter_gpu_ckpt.watch.WatchListener`.

    Parameters
    ----------
    kernel
        The kernel.
    policy
        What counts for it, until :attr:`policy` is set to something else.
    observer
        Hears of what it does.
    """

    def __init__(
        self, kernel: TrackedKernel, policy: AutoSavePolicy, observer: WorkObserver
    ) -> None:
        self.kernel = kernel
        self.policy = policy
        #: What the notebook's metadata choose, and when the notebook was changed that says so.
        self.notebook: tuple[AutoSaveChoice, Any] = (AutoSaveChoice(), None)
        #: When they may be looked at again, whether somebody does, and whether once more.
        self.look_after, self.is_looking, self.wants_look = -math.inf, False, False
        #: Whether the kernel wants its callbacks to be run before it is saved.
        self.has_hooks = False
        self.cull_failures = 0
        self._observer = observer
        self.started_fresh()

    def started_fresh(self) -> None:
        """An empty process runs: nothing in it is worth saving."""
        now = time.monotonic()
        #: Until the first cell runs, there is only what the kernel says at its start.
        self.is_pristine = True
        self._unsaved_since: float | None = None
        self.touched_at = now
        self._is_running = False
        #: Whether a cell ended since the observer was told last.
        self._has_ended = False
        #: When a cell ended that ran for long, and has not been saved.
        self.long_cell_at: float | None = None
        self.saved_at: float | None = None
        #: What the last save took: the time it froze the kernel, and all of it.
        self.frozen = self.seconds = 0.0
        self.failures = self.cull_failures = 0
        self._not_before = self._not_parked_before = now
        self.has_hooks = False

    @property
    def unsaved_since(self) -> float | None:
        """Since when there is something that no state holds; ``None``: there is nothing."""
        self._catch_up()
        return self._unsaved_since

    @property
    def is_running(self) -> bool:
        """Whether a cell runs."""
        self._catch_up()
        return self._is_running

    def _catch_up(self) -> None:
        if self.kernel.watch is not None:
            self.kernel.watch.catch_up()

    def restored(self) -> None:
        """The process came out of a state just now, or is a fresh one."""
        self.started_fresh()
        watch = self.kernel.watch
        if watch is None:
            return
        self.is_pristine = watch.now.execution_count is None
        if watch.now.execution_state == "busy":
            self._is_running = True
            self._unsaved_since = self.touched_at

    # -- WatchListener -------------------------------------------------------------------

    def cell_started(self, at: float) -> None:
        """A cell runs since that Unix time."""
        self._is_running, self.is_pristine = True, False
        self._not_parked_before = self.touched_at
        self._touched(_monotonic(at))

    def cell_ended(self, at: float, seconds: float) -> None:
        """A cell ended at that Unix time, after so long."""
        self._is_running = False
        ended = _monotonic(at)
        if 0 < self.policy.long_cell < seconds:
            self.long_cell_at = ended
        self._touched(ended)
        self._has_ended = True

    def all_told(self) -> None:
        """That was all for now."""
        if self._has_ended:
            self._has_ended = False
            self._observer.worked(self)

    def was_touched(self) -> None:
        """The kernel did something."""
        if not self.is_pristine:
            self._touched(time.monotonic())

    def _touched(self, at: float) -> None:
        self.touched_at = max(self.touched_at, at)
        if self._unsaved_since is None and (self.saved_at is None or at > self.saved_at):
            self._unsaved_since = at
            self._observer.worked(self)

    def asked(self, data: dict[str, Any]) -> None:
        """The kernel sent a message to its server."""
        self._observer.asked(self, data)

    # -- saves ---------------------------------------------------------------------------

    def saved(self, began: float, seconds: float, frozen: float) -> None:
        """A state was made of the process that runs; what it did since ``began`` is not in it."""
        self.saved_at, self.seconds, self.frozen = began, seconds, frozen
        self.failures = self.cull_failures = 0
        self._not_before = began
        self._unsaved_since = began if self._is_running or self.touched_at > began else None
        if self.long_cell_at is not None and self.long_cell_at <= began:
            self.long_cell_at = None

    def failed(self, retry: float) -> None:
        """It could not be saved: leave it alone for a while."""
        self.failures += 1
        wait = min(retry * 2 ** min(self.failures - 1, 20), _LONGEST_BACKOFF)
        self._not_before = time.monotonic() + wait

    def put_off(self, seconds: float = _LONGEST_BACKOFF) -> None:
        """It cannot be saved here or now: look again after a wait."""
        self._not_before = time.monotonic() + seconds

    def stay_on_gpu(self, seconds: float = _LONGEST_BACKOFF) -> None:
        """It is not to be parked before a wait, or a cell."""
        self._not_parked_before = time.monotonic() + seconds

    def _saves_due(self, max_cost: float) -> list[tuple[float, str]]:
        """When each policy wants what is in no state yet to be saved."""
        policy, times = self.policy, list[tuple[float, str]]()
        if self._unsaved_since is None:
            return times
        affordable = self._unsaved_since
        if self.saved_at is not None:
            affordable = self.saved_at + self.frozen / max_cost
        if self.long_cell_at is not None and policy.long_cell:
            times.append((max(self.long_cell_at, affordable), "long_cell"))
        if policy.idle and not self._is_running:
            times.append((self.touched_at + policy.idle, "idle"))
        if policy.interval:
            times.append((max(self._unsaved_since + policy.interval, affordable), "interval"))
        return times

    def due(self, max_cost: float) -> tuple[float, str] | None:
        """When it is to be saved next and which policy says so; ``None``: not as it is now.

        With ``hibernate`` its process is to be ended too, with ``park`` its GPUs to be freed.

        Parameters
        ----------
        max_cost
            Largest part of the time that a kernel may be frozen for saves while it works.
        """
        policy = self.policy
        if not policy.enabled:
            return None
        times = self._saves_due(max_cost)
        if (policy.hibernate or policy.park) and not (
            self._is_running or self.is_pristine or self.kernel.is_hibernated
        ):
            if policy.hibernate:
                times.append((self.touched_at + policy.hibernate, "hibernate"))
            if policy.park and self.kernel.parked is None:
                idle = self.touched_at + policy.park
                times.append((max(idle, self._not_parked_before), "park"))
        if not times:
            return None
        when, reason = min(times)
        return max(when, self._not_before), reason


def _monotonic(at: float) -> float:
    """A Unix time of this node in monotonic seconds: kernels are heard of a little later."""
    return time.monotonic() - max(0.0, time.time() - at)
