"""Which states retention removes: whatever the states, it never takes what must stay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store.retention import Held, Policy, check_room, costs, plan

HOUR, DAY = 3600.0, 86400.0
NOW = 1000 * DAY


def held(
    name: str,
    age: float,
    packs: str = "",
    *,
    kernel: str = "k",
    pinned: bool = False,
    labelled: bool = False,
) -> Held:
    return Held(name, kernel, NOW - age, frozenset(packs), pinned, labelled)


def gone(states: Sequence[Held], policy: Policy, **more: object) -> dict[str, str]:
    sizes = dict.fromkeys(itertools.chain(*(state.packs for state in states)), 10)
    removals = plan(states, sizes, policy, now=NOW, **more)  # type: ignore[arg-type]
    return {removal.state_id: removal.why for removal in removals}


def test_with_nothing_set_everything_stays() -> None:
    assert gone([held(str(n), n * DAY, "a") for n in range(1000)], Policy()) == {}


def test_the_last_of_each_kernel() -> None:
    states = [held(f"{kernel}{n}", n, kernel=kernel) for kernel in "kl" for n in range(4)]
    rules = {name: "rules" for name in ("k2", "k3", "l2", "l3")}
    assert gone(states, Policy(keep_last=2)) == rules
    assert gone(states[::-1], Policy(keep_last=2)) == rules


def test_hours_and_days() -> None:
    states = [held(f"{n:03}", n * HOUR / 2 + 60) for n in range(24 * 2 * 5)]
    left = {s.id for s in states} - gone(states, Policy(keep_hourly=3)).keys()
    # NOW is midnight: :29 and :59 of each hour, the later one stays.
    assert left == {"000", "002", "004"}
    left = {s.id for s in states} - gone(states, Policy(keep_daily=3)).keys()
    assert left == {"000", "048", "096"}
    left = {s.id for s in states} - gone(
        states, Policy(keep_last=2, keep_hourly=3, keep_daily=2)
    ).keys()
    assert left == {"000", "001", "002", "004", "048"}


def test_hours_without_states_do_not_count() -> None:
    states = [held("new", 60), held("old", 40 * DAY), held("older", 80 * DAY)]
    assert gone(states, Policy(keep_hourly=2)) == {"older": "rules"}


def test_labels_and_pins() -> None:
    states = [
        held("0", 1),
        held("labelled", 2, labelled=True),
        held("2", 3),
        held("pinned", 400 * DAY, pinned=True),
        held("old label", 400 * DAY, labelled=True),
    ]
    assert gone(states, Policy(keep_last=1)) == {"2": "rules"}
    assert gone(states, Policy(max_age=DAY)) == {"old label": "age"}


def test_automatic_saves_do_not_push_out_what_the_user_saved() -> None:
    states = [held(f"auto {n}", n)._replace(automatic=True) for n in range(9)]
    states += [held("user", 50), held("user before", 60)]
    left = {s.id for s in states} - gone(states, Policy(keep_last=1)).keys()
    assert left == {"auto 0", "user"}


def test_the_newest_state_of_a_kernel_that_may_come_back_stays() -> None:
    states = [held("old", 40 * DAY, "a"), held("older", 50 * DAY, "b")]
    for policy in (Policy(max_age=DAY), Policy(quota=0)):
        assert set(gone(states, policy)) == {"old", "older"}
        assert set(gone(states, policy, living={"k"})) == {"older"}
        assert set(gone(states, policy, living={"k"}, busy={"older"})) == set()


def test_a_damaged_state_takes_no_other_ones_place() -> None:
    states = [
        held("unreadable", 1, pinned=True)._replace(intact=False),
        held("damaged", 2)._replace(intact=False),
        held("damaged before", 3)._replace(intact=False),
        held("whole", 40 * DAY),
        held("older", 50 * DAY),
    ]
    assert set(gone(states, Policy(max_age=DAY), living={"k"})) == {"older"}
    assert set(gone(states, Policy(keep_last=1))) == {"damaged", "damaged before", "older"}
    assert set(gone(states[1:3], Policy(max_age=0), living={"k"})) == {"damaged before"}


def test_quota_takes_the_oldest_first_and_none_in_vain() -> None:
    # "base" goes first, but its pack is needed by "next": no use. "alone" is what helps.
    states = [
        held("base", 5, "a"),
        held("next", 4, "ab"),
        held("alone", 3, "c"),
        held("last", 2, "abd"),
    ]
    assert gone(states, Policy(quota=40)) == {}
    assert gone(states, Policy(quota=30)) == {"alone": "quota"}
    assert gone(states, Policy(quota=30), busy={"alone"}) == {"last": "quota"}
    assert gone(states, Policy(quota=30), busy={"alone", "last"}) == {}, "nothing would help"


def test_a_quota_that_cannot_be_met_is_come_near_to() -> None:
    states = [held("a", 3, "a"), held("b", 2, "b", pinned=True), held("c", 1, "c")]
    assert gone(states, Policy(quota=5), living={"k"}) == {"a": "quota"}


def test_cost_is_what_deleting_frees() -> None:
    states = [held("base", 3, "ab"), held("next", 2, "bc"), held("copy", 1, "c")]
    assert costs(states, {"a": 1, "b": 10, "c": 100}) == {"base": 1, "next": 0, "copy": 0}
    assert costs(states[:2], {"a": 1, "b": 10, "c": 100}) == {"base": 1, "next": 100}
    assert costs(states, {}) == {"base": 0, "next": 0, "copy": 0}


def test_a_save_that_does_not_fit_is_refused() -> None:
    states = [held("old", 9, "a"), held("pinned", 8, "b", pinned=True), held("new", 7, "c")]
    sizes = dict.fromkeys("abc", 10)
    check_room(states, sizes, Policy(), 10**15, living={"k"})
    check_room(states, sizes, Policy(quota=30), 10, living={"k"})
    with pytest.raises(CkptError) as caught:
        check_room(states, sizes, Policy(quota=30), 11, living={"k"})
    assert caught.value.reason == "over_quota"
    assert caught.value.hint
    check_room(states, sizes, Policy(quota=30), 20)


held_states = st.lists(
    st.builds(
        held,
        st.uuids().map(str),
        st.one_of(st.integers(-5, 20).map(lambda n: n * HOUR / 2), st.floats(-1e3, 1e9)),
        st.text("abcdefgh", max_size=5),
        kernel=st.sampled_from("klm"),
        pinned=st.booleans(),
        labelled=st.booleans(),
    ),
    unique_by=lambda state: state.id,
    max_size=12,
)
some = st.one_of(st.just(0), st.integers(0, 5))
policies = st.builds(
    Policy,
    keep_last=some,
    keep_hourly=some,
    keep_daily=some,
    max_age=st.one_of(st.none(), st.floats(0, 1e6)),
    quota=st.one_of(st.none(), st.integers(0, 60)),
)


def bytes_of(states: Sequence[Held], sizes: dict[str, int]) -> int:
    return sum(sizes[pack] for pack in frozenset().union(*(state.packs for state in states)))


@given(held_states, policies, st.sets(st.sampled_from("klm")), st.data())
def test_whatever_the_states(
    states: list[Held], policy: Policy, living: set[str], data: st.DataObject
) -> None:
    sizes = {pack: data.draw(st.integers(0, 20)) for pack in "abcdefgh"}
    busy = {state.id for state in states if data.draw(st.booleans())}
    removals = plan(states, sizes, policy, now=NOW, living=living, busy=busy)
    by_id = {state.id: state for state in states}
    ids = [removal.state_id for removal in removals]
    assert len(set(ids)) == len(ids)
    left = [state for state in states if state.id not in ids]
    # What must never go.
    for name in ids:
        assert not by_id[name].pinned and name not in busy
    for kernel in living:
        mine = [state for state in states if state.kernel_id == kernel]
        if mine:
            assert max(mine, key=lambda s: (s.created, s.id)) in left
    # What it says comes back does.
    assert sum(r.bytes for r in removals) == bytes_of(states, sizes) - bytes_of(left, sizes)
    # Nothing that the quota takes could stay, and what is left fits unless nothing more may go.
    if policy.quota is not None:
        for removal in removals:
            if removal.why == "quota":
                more = bytes_of([*left, by_id[removal.state_id]], sizes)
                assert more > max(policy.quota, bytes_of(left, sizes))
        if bytes_of(left, sizes) > policy.quota:
            staying = [
                s
                for s in left
                if s.pinned
                or s.id in busy
                or (
                    s.kernel_id in living
                    and s == max((o for o in states if o.kernel_id == s.kernel_id), key=_age)
                )
            ]
            assert bytes_of(left, sizes) == bytes_of(staying, sizes)
    # What is gone by it is gone for good: a second pass finds nothing.
    assert plan(left, sizes, policy, now=NOW, living=living, busy=busy) == []
    # The room that is promised is there.
    if policy.quota is not None:
        room = policy.quota - bytes_of(
            [s for s in left if not _may_go(s, states, living, busy)], sizes
        )
        if room >= 0:
            check_room(states, sizes, policy, room, living=living, busy=busy)
        with pytest.raises(CkptError):
            check_room(states, sizes, policy, max(room, 0) + 1, living=living, busy=busy)


def _age(state: Held) -> tuple[float, str]:
    return state.created, state.id


def _may_go(state: Held, states: list[Held], living: set[str], busy: set[str]) -> bool:
    newest = max((o for o in states if o.kernel_id == state.kernel_id), key=_age)
    return not (state.pinned or state.id in busy or (state.kernel_id in living and state == newest))
