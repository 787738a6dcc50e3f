"""Who may take a kernel, among nodes that share nothing but an object store.

Of each claimant there is an object ``claims/<kernel id>/<token>.json``. He writes his, and lists
those of the kernel after that: of two, the one who wrote later sees the other's. Who sees
no other's has the claim, and keeps his object until the kernel's record is written. Of those
who see each other the lowest token stays and waits until the others are gone; they
remove theirs, wait until nobody has a claim, and begin anew: the record tells them then.

No clock of a node counts, and no conditional write, which not every system has; only that lists
show what was written before.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from ..errors import CkptError
from .backend import cancelled
from .clocks import uptime
from .objects import Found
from .remote import RemoteFiles, RemoteOwner

#: Age in seconds, by the store's clock, at which the claim of a process that has died is void.
_STALE_SECONDS: Final = 60.0
#: Seconds within which a claimant has done what he claimed for, or gives up.
_HOLD_SECONDS: Final = 30.0
#: Seconds that a claimant waits for others: until what the dead have left is void.
_PATIENCE_SECONDS: Final = 75.0
_LOOK_SECONDS: Final = 0.25


class _Claim(msgspec.Struct):
    hostname: str = ""


class Claims:
    """Claims to the kernels of one owner.

    Parameters
    ----------
    remote
        The owner's objects.
    """

    def __init__(self, remote: RemoteOwner) -> None:
        self._remote = remote.hasty(attempts=3)
        self._now = RemoteFiles(self._remote).now

    @contextmanager
    def held(self, kernel_id: str, stop: threading.Event | None = None) -> Iterator[Claim]:
        """For the block, nobody else has a claim to this kernel.

        Raises
        ------
        CkptError
            ``not_restorable``: others did not come to an end; ``store_unavailable``;
            ``cancelled``: `stop` was set.
        """
        claim = self._take(kernel_id, stop or threading.Event())
        try:
            yield claim
        finally:
            self._remote.forget(claim.name)

    def tidy(self) -> None:
        """Remove what claimants that have died left behind."""
        self._living(self._remote.objects.list("claims"))

    def _take(self, kernel_id: str, stop: threading.Event) -> Claim:
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            claim = Claim(f"claims/{kernel_id}/{secrets.token_hex(8)}.json")
            try:
                data = msgspec.json.encode(_Claim(socket.gethostname()))
                self._remote.objects.put(claim.name, data, check=False)
                while others := self._others(kernel_id, claim.name):
                    if min(others) < claim.name:
                        break
                    self._wait(others, end, stop)
                else:
                    claim.check()
                    return claim
            except BaseException:
                self._remote.forget(claim.name)
                raise
            self._remote.objects.delete(claim.name)
            while others := self._others(kernel_id):
                self._wait(others, end, stop)

    def _wait(self, others: list[str], end: float, stop: threading.Event) -> None:
        if time.monotonic() > end:
            where = self._remote.maybe(others[0])
            host = msgspec.json.decode(where, type=_Claim).hostname if where else "another node"
            raise CkptError(
                "not_restorable",
                f"A Jupyter server on {host} is about to bring this kernel back.",
                hint="Wait for it, or open the state as a new kernel.",
            )
        if stop.wait(_LOOK_SECONDS):
            raise cancelled()

    def _others(self, kernel_id: str, own: str = "") -> list[str]:
        """Names of the other claims that count."""
        found = self._remote.objects.list(f"claims/{kernel_id}")
        found.pop(own, None)
        return self._living(found)

    def _living(self, found: dict[str, Found]) -> list[str]:
        names = [name for name in found if name.endswith(".json")]
        if not names:
            return []
        now = self._now()
        void = {name for name in names if now - found[name].modified > _STALE_SECONDS}
        for name in void:
            self._remote.forget(name)
        return sorted(set(names) - void)


class Claim:
    """A claim that somebody has, or wants to have; `name` is that of its object."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._began = uptime()

    def check(self) -> None:
        """Raise ``not_restorable`` unless the claim is still good for a while."""
        if uptime() - self._began > _HOLD_SECONDS:
            raise CkptError(
                "not_restorable",
                "The state store answers too slowly to say whose this kernel is.",
                hint="Try again.",
            )
