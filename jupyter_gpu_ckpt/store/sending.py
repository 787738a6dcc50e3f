"""Small objects on their way to the remote tier, in the background: marks, kernel records."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from ..errors import CkptError
from .remote import RemoteOwner

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0


class Records:
    """Writes small objects in the background: of each only its newest content counts.

    One that could not be written at once is left alone when another node has written it
    meanwhile: what it says, such as who has taken over a kernel, is newer.
    """

    def __init__(self, remote: RemoteOwner, on_problem: Callable[[CkptError], None]) -> None:
        self._remote = remote
        self._on_problem = on_problem
        self._lock = threading.Condition()
        self._waiting: dict[str, bytes | None] = {}
        self._bases: dict[str, str | None] = {}
        self._late: set[str] = set()
        self._sent: dict[str, bytes] = {}
        self._sending: str | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def unsent(self) -> set[str]:
        """Names of objects that are not what they should be yet."""
        with self._lock:
            names = set(self._waiting)
            if self._sending is not None:
                names.add(self._sending)
            return names

    def send(self, name: str, data: bytes | None, base: str | None = None) -> None:
        """Have an object written, or removed if `data` is ``None``.

        `base` is the version that was known when that was decided.
        """
        with self._lock:
            if self._stopped:
                return
            if name not in self._late:
                self._bases[name] = base
            self._waiting[name] = data
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gpu-ckpt-records", daemon=True
                )
                self._thread.start()
            self._lock.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all is sent; whether it was."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._waiting and self._sending is None, timeout)

    def stop(self) -> None:
        """Send no more."""
        with self._lock:
            self._stopped = True
            self._waiting.clear()
            self._lock.notify_all()

    def _is_anothers(self, name: str, base: str | None) -> bool:
        """Whether an object was written from elsewhere since we knew it last."""
        there = self._remote.maybe(name)
        if there is None or there == self._sent.get(name):
            return False
        return base is None or self._remote.version(name) != base

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                name = next(iter(self._waiting))
                data = self._waiting.pop(name)
                self._sending = name
                late, base = name in self._late, self._bases.get(name)
            error: CkptError | None = None
            try:
                if late and self._is_anothers(name, base):
                    pass  # another node's word counts
                elif data is None:
                    self._remote.objects.delete(name)
                else:
                    self._remote.objects.put(name, data, check=False)
                    self._sent[name] = data
            except CkptError as failure:
                error = failure
            with self._lock:
                self._sending = None
                if error is None:
                    self._late.discard(name)
                else:
                    self._late.add(name)
                if error is not None and not self._stopped:
                    self._waiting.setdefault(name, data)  # unless there is something newer
                self._lock.notify_all()
                if error is None:
                    pause = _FIRST_PAUSE
                    continue
            self._on_problem(error)
            with self._lock:
                self._lock.wait_for(lambda: self._stopped, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
