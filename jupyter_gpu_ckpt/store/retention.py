"""Which states may go, and why; what a state really costs. Pure functions over what is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from ..errors import CkptError

_HOUR, _DAY = 3600, 86400


class Policy(msgspec.Struct, kw_only=True, frozen=True):
    """What is kept. With nothing set, everything.

    Parameters
    ----------
    keep_last
        States of each kernel that are kept because they are the newest. Those that a user
        saved and automatic ones count apart.
    keep_hourly, keep_daily
        Hours and days (UTC), of those that have any, of which each kernel's newest state (of
        either kind) is kept.
    max_age
        Seconds after which a state goes, whatever else would keep it but a pin; ``None``: never.
    quota
        Bytes that an owner's states may take; ``None``: no limit.
    """

    keep_last: int = 0
    keep_hourly: int = 0
    keep_daily: int = 0
    max_age: float | None = None
    quota: int | None = None


class Held(NamedTuple):
    """What retention knows of a state: `created` in Unix seconds, `packs` are all it needs.

    One that is not `intact` takes no other's place: who needs a state cannot do with it.
    """

    id: str
    kernel_id: str
    created: float
    packs: frozenset[str]
    pinned: bool = False
    labelled: bool = False
    automatic: bool = False
    intact: bool = True


Why = Literal["rules", "age", "quota"]


class Removal(NamedTuple):
    """A state that goes: `bytes` come back by it, given that those before it in the list go too."""

    state_id: str
    why: Why
    bytes: int


class _Space:
    """Which packs are needed while states come and go, and how many bytes that is."""

    def __init__(self, states: Iterable[Held], sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._users: Counter[str] = Counter()
        self.bytes = 0
        for state in states:
            self.add(state)

    def alone(self, state: Held) -> int:
        """Bytes that only this state, one of those there, needs."""
        return sum(self._sizes.get(pack, 0) for pack in state.packs if self._users[pack] == 1)

    def add(self, state: Held) -> int:
        """Add a state; returns the bytes that it needs beyond what is needed already."""
        new = 0
        for pack in state.packs:
            if not self._users[pack]:
                new += self._sizes.get(pack, 0)
            self._users[pack] += 1
        self.bytes += new
        return new

    def remove(self, state: Held) -> int:
        """Remove a state; returns the bytes that come back."""
        freed = self.alone(state)
        self._users.subtract(state.packs)
        self.bytes -= freed
        return freed


def costs(states: Sequence[Held], sizes: Mapping[str, int]) -> dict[str, int]:
    """What deleting each state alone would free, in bytes.

    Parameters
    ----------
    states
        All states of the owner.
    sizes
        Size of each pack, in bytes.
    """
    space = _Space(states, sizes)
    return {state.id: space.alone(state) for state in states}


def used(states: Iterable[Held], sizes: Mapping[str, int]) -> int:
    """Bytes that all states take together, which is what a quota counts."""
    needed: set[str] = set()
    for state in states:
        needed |= state.packs
    return sum(sizes.get(pack, 0) for pack in needed)


def plan(
    states: Sequence[Held],
    sizes: Mapping[str, int],
    policy: Policy,
    *,
    now: float,
    living: Collection[str] = (),
    busy: Collection[str] = (),
) -> list[Removal]:
    """Which states go, in the order of removal.

    Parameters
    ----------
    states
        All states of the owner; those that cannot be read as if they were pinned.
    sizes
        Size of each pack, in bytes.
    policy
        What to keep.
    now
        Unix time.
    living
        Kernels that run anywhere or are lost: their newest intact state always stays.
    busy
        States that are in use right now.
    """
    spared = _spared(states, living, busy)
    gone: dict[str, Why] = {}
    if policy.max_age is not None:
        for state in states:
            if state.id not in spared and now - state.created > policy.max_age:
                gone[state.id] = "age"
    if policy.keep_last or policy.keep_hourly or policy.keep_daily:
        kept = _kept_by_rules(states, policy)
        for state in states:
            if state.id not in spared | kept:
                gone.setdefault(state.id, "rules")
    left = [state for state in states if state.id not in gone]
    if policy.quota is not None:
        for state in _for_quota(left, sizes, policy.quota, spared):
            gone[state.id] = "quota"
    space = _Space(states, sizes)
    going = [state for state in states if state.id in gone]
    return [
        Removal(state.id, gone[state.id], space.remove(state)) for state in sorted(going, key=_age)
    ]


def check_room(
    states: Sequence[Held],
    sizes: Mapping[str, int],
    policy: Policy,
    estimate: int,
    *,
    living: Collection[str] = (),
    busy: Collection[str] = (),
) -> None:
    """Refuse a save that the quota has no room for, even if all went that may go.

    Parameters
    ----------
    states, sizes, policy, living, busy
        As for :func:`plan`.
    estimate
        Bytes that the new state would store.

    Raises
    ------
    CkptError
        ``over_quota``.
    """
    if policy.quota is None:
        return
    spared = _spared(states, living, busy)
    staying = used((state for state in states if state.id in spared), sizes)
    if staying + estimate > policy.quota:
        raise CkptError(
            "over_quota",
            f"The kernel was not saved: it needs about {_mib(estimate)}, and states that have to "
            f"stay take {_mib(staying)} of the quota of {_mib(policy.quota)}.",
            hint="Delete states or unpin them, or have the quota raised (c.GpuCkpt.quota).",
        )


def _spared(
    states: Iterable[Held], living: Collection[str], busy: Collection[str]
) -> frozenset[str]:
    newest: dict[str, Held] = {}
    for state in states:
        if state.kernel_id in living:
            newest[state.kernel_id] = max(newest.get(state.kernel_id, state), state, key=_use)
    pinned = (state.id for state in states if state.pinned)
    return frozenset({*pinned, *busy, *(state.id for state in newest.values())})


def _kept_by_rules(states: Iterable[Held], policy: Policy) -> frozenset[str]:
    # Apart, or automatic saves would soon push out what a user saved with a purpose.
    kinds: dict[tuple[str, bool, bool], list[Held]] = {}
    kept = set()
    for state in sorted(states, key=_age, reverse=True):
        # A label is a user's word that this one matters; it takes no other's place.
        if state.labelled:
            kept.add(state.id)
        else:
            kind = state.kernel_id, state.automatic, state.intact
            kinds.setdefault(kind, []).append(state)
    for mine in kinds.values():
        kept.update(state.id for state in mine[: policy.keep_last])
        kept |= _newest_of_each(mine, policy.keep_hourly, lambda s: s.created // _HOUR)
        kept |= _newest_of_each(mine, policy.keep_daily, lambda s: s.created // _DAY)
    return frozenset(kept)


def _newest_of_each(
    newest_first: Iterable[Held], most: int, time_of: Callable[[Held], float]
) -> set[str]:
    chosen: dict[float, str] = {}
    for state in newest_first:
        if len(chosen) == most and time_of(state) not in chosen:
            break
        if most:
            chosen.setdefault(time_of(state), state.id)
    return set(chosen.values())


def _for_quota(
    states: Sequence[Held], sizes: Mapping[str, int], quota: int, spared: Collection[str]
) -> list[Held]:
    """Oldest first, as many as it takes; but none whose removal helps nothing."""
    space = _Space(states, sizes)
    gone = []
    for state in sorted(states, key=_age):
        if space.bytes <= quota:
            break
        if state.id not in spared:
            space.remove(state)
            gone.append(state)
    # Where the quota cannot be met, as near as one can get.
    bound = max(quota, space.bytes)
    for state in sorted(gone, key=_age, reverse=True):
        space.add(state)
        if space.bytes > bound:
            space.remove(state)
        else:
            gone.remove(state)
    return gone


def _age(state: Held) -> tuple[float, str]:
    return state.created, state.id


def _use(state: Held) -> tuple[bool, float, str]:
    return state.intact, state.created, state.id


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
