"""What a parked kernel has in host memory, for the models."""

from __future__ import annotations

import msgspec


class Parked(msgspec.Struct, frozen=True):
    """A kernel whose GPU memory is in host memory, ``host_bytes`` of it, about.

    ``position`` is its place among those that wait for the same GPU, from 1; null: it does not.
    ``waiting`` says in words what for.
    """

    since: str
    host_bytes: int
    position: int | None = None
    waiting: str | None = None
