"""What the administrator's page says of users: its JSON, and what pages are made from."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..moments import read_moment
from ..store import SaveFailure, ServerStop

KernelStatus = Literal["running", "hibernated", "lost", "ended"]


class StateRow(msgspec.Struct, kw_only=True):
    """One saved state.

    ``cost`` is what deleting it alone would free; ``size`` what it holds. Both are bytes, and
    ``None`` where they are not known. ``frozen_seconds`` is how long the kernel stood still for it.
    ``problem`` says why not more is known of it: it is damaged,
    or encrypted with a key that the service does not have.
    """

    id: str
    kernel_id: str
    created: str
    server: str = ""
    path: str | None = None
    display_name: str | None = None
    reason: str | None = None
    label: str | None = None
    frozen_seconds: float | None = None
    size: int | None = None
    cost: int | None = None
    pinned: bool = False
    encrypted: bool = False
    damage: str | None = None
    problem: str | None = None


class KernelRow(msgspec.Struct, kw_only=True):
    """A kernel: whether it runs, and where its server is, or was."""

    kernel_id: str
    status: KernelStatus
    server: str = ""
    path: str | None = None
    display_name: str | None = None
    hostname: str | None = None
    states: int = 0


class FailureRow(SaveFailure, kw_only=True):
    """A kernel whose last save failed, and which named server it is of."""

    server: str = ""


class StopRow(ServerStop, kw_only=True):
    """What a server saved before it stopped, and which named server it is."""

    server: str = ""


class UserReport(msgspec.Struct, kw_only=True):
    """All that is known of one user's states.

    ``used`` are the bytes that they take in the store, which a quota counts, ``size`` the bytes
    that they hold. ``deleted``: the hub does not know the user any more. ``read`` is when the store
    was read last, ISO 8601 (UTC); ``problem`` says why it could not be since then: the rest is as
    it was at that time.
    """

    user: str
    deleted: bool = False
    allowed: bool = True
    quota: int | None = None
    read: str | None = None
    problem: str | None = None
    hint: str | None = None
    used: int = 0
    size: int = 0
    states: list[StateRow] = []
    kernels: list[KernelRow] = []
    failures: list[FailureRow] = []
    stops: list[StopRow] = []

    @property
    def newest(self) -> str | None:
        """When the newest state was saved."""
        return max((state.created for state in self.states), default=None)

    @property
    def oldest(self) -> str | None:
        """When the oldest state was saved."""
        return min((state.created for state in self.states), default=None)

    @property
    def lost(self) -> list[KernelRow]:
        """Kernels that ended without their user's wish."""
        return [kernel for kernel in self.kernels if kernel.status == "lost"]

    @property
    def share(self) -> float | None:
        """How much of the quota is used; ``None`` without one."""
        if self.quota is None:
            return None
        return self.used / self.quota if self.quota else float(self.used > 0)

    def summary(self) -> UserSummary:
        """Numbers only."""
        kernels = [kernel.status for kernel in self.kernels]
        return UserSummary(
            user=self.user,
            deleted=self.deleted,
            allowed=self.allowed,
            states=len(self.states),
            pinned=sum(state.pinned for state in self.states),
            damaged=sum(state.damage is not None for state in self.states),
            running=kernels.count("running"),
            hibernated=kernels.count("hibernated"),
            lost=kernels.count("lost"),
            failed=len(self.failures),
            last_failure=self.failures[0].message if self.failures else None,
            size=self.size,
            used=self.used,
            quota=self.quota,
            oldest=self.oldest,
            newest=self.newest,
            read=self.read,
            problem=self.problem,
        )


class UserSummary(msgspec.Struct, kw_only=True):
    """One user in numbers: of states, of kernels by status, of kernels whose last save failed."""

    user: str
    deleted: bool
    allowed: bool
    states: int
    pinned: int
    damaged: int
    running: int
    hibernated: int
    lost: int
    failed: int
    last_failure: str | None
    size: int
    used: int
    quota: int | None
    oldest: str | None
    newest: str | None
    read: str | None
    problem: str | None


def seconds(text: str) -> float:
    """Unix seconds of a time in ISO 8601."""
    return read_moment(text).timestamp()
