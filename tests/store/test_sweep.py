"""The order of a collection's looks, against every order in which others may act meanwhile."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store.sweep import PackSeen, Present, sweep

NOW = 1e9


class _Killed(BaseException):
    pass


class Actor:
    """Code in a thread that goes on one step at a time, when it is told to."""

    def __init__(self, run: Callable[[Actor], None]) -> None:
        self.over = False
        self.error: BaseException | None = None
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._thread = threading.Thread(target=self._loop, args=(run,), daemon=True)
        self._thread.start()

    def _loop(self, run: Callable[[Actor], None]) -> None:
        self._turn.acquire()
        try:
            if not self._killed:
                run(self)
        except _Killed:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self._done.release()

    def step(self) -> None:
        """Called by the actor before each of its acts: others may go first."""
        self._done.release()
        self._turn.acquire()
        if self._killed:
            raise _Killed

    def go(self) -> None:
        """Let it act once."""
        self._turn.release()
        self._done.acquire()

    def kill(self) -> None:
        if not self.over:
            self._killed = True
            self.go()
        self._thread.join()


class Store:
    """What a store holds; each change is one that a file system makes at once."""

    def __init__(self) -> None:
        self.packs: set[str] = set()
        self.manifests: dict[str, list[str]] = {}
        self.notes: dict[str, list[str]] = {}
        self.presences: dict[str, list[str]] = {}
        self.dead: set[str] = set()
        self.announced: dict[int, list[str]] = {}
        #: Every state that there ever was on a node.
        self.ever: dict[str, list[str]] = {}
        #: Those whose upload has not ended.
        self.underway: set[str] = set()
        self._count = 0

    def new_id(self) -> str:
        self._count += 1
        return f"20261202T000000Z-{self._count:08x}"

    def check(self) -> None:
        for state in self.manifests.keys() - self.underway:
            packs = self.manifests[state]
            assert self.packs.issuperset(packs), f"{state} has lost packs"


def writer(store: Store, pick: Callable[[int], int]) -> Callable[[Actor], None]:
    def run(actor: Actor) -> None:
        me = store.new_id()
        parents = sorted(store.manifests)
        parent = parents[pick(len(parents))] if parents else None
        theirs = store.manifests[parent] if parent else []
        actor.step()
        store.presences[me] = theirs
        actor.step()
        if parent not in store.manifests:
            theirs = []
        mine = [f"{me}-0000", f"{me}-0001"]
        for pack in mine:
            actor.step()
            if me not in store.presences:
                return  # taken away: nothing can be moved from there
            store.packs.add(pack)
        actor.step()
        if me not in store.presences:
            return
        store.manifests[me] = mine + [pack for pack in theirs if pick(3)]
        actor.step()
        store.presences.pop(me, None)

    return run


def uploader(store: Store, pick: Callable[[int], int]) -> Callable[[Actor], None]:
    """Sends a state whose packs its node has, whatever became of those it was built on."""

    def run(actor: Actor) -> None:
        me = store.new_id()
        parents = sorted(store.ever)
        theirs = store.ever[parents[pick(len(parents))]] if parents else []
        needed = store.ever[me] = [f"{me}-0000", *theirs]
        store.underway.add(me)
        actor.step()
        store.presences[me] = needed
        send(actor, needed)
        actor.step()
        store.manifests[me] = needed
        actor.step()
        while any(set(needed) & set(packs) for packs in store.announced.values()):
            actor.step()
        send(actor, needed)
        store.underway.discard(me)
        actor.step()
        store.presences.pop(me, None)

    def send(actor: Actor, needed: list[str]) -> None:
        actor.step()
        for pack in sorted(set(needed) - store.packs):
            actor.step()
            store.packs.add(pack)

    return run


def reader(store: Store, pick: Callable[[int], int]) -> Callable[[Actor], None]:
    def run(actor: Actor) -> None:
        states = sorted(store.manifests)
        if not states:
            return
        state = states[pick(len(states))]
        packs = store.manifests[state]
        actor.step()
        store.presences[f"read-{state}"] = packs
        actor.step()
        if state in store.manifests:
            for pack in packs:
                actor.step()
                if f"read-{state}" in store.presences:
                    assert pack in store.packs, "a pack vanished from under a reader"
        store.presences.pop(f"read-{state}", None)

    return run


def deleter(store: Store, pick: Callable[[int], int]) -> Callable[[Actor], None]:
    def run(actor: Actor) -> None:
        for _ in range(2):
            states = sorted(store.manifests)
            if states:
                state = states[pick(len(states))]
                actor.step()
                if state in store.manifests:
                    store.notes[state] = store.manifests.pop(state)

    return run


def collector(store: Store) -> Callable[[Actor], None]:
    return lambda actor: _sweep(store, actor.step)


def _sweep(store: Store, step: Callable[[], None]) -> None:
    sweep(Files(store, step), grace_seconds=0, dry_run=False)


class Files:
    """The store as a collection sees it; others may act between any two things it sees."""

    def __init__(self, store: Store, step: Callable[[], None]) -> None:
        self._store = store
        self._step = step

    def now(self) -> float:
        return NOW

    def packs(self) -> Iterator[PackSeen]:
        for pack in sorted(self._store.packs):
            self._step()
            yield PackSeen(pack, 1, 0.0)

    def manifests(self) -> Iterator[tuple[str, str]]:
        for state in sorted(self._store.manifests):
            self._step()
            if state in self._store.manifests:
                yield state, ""

    def manifest(self, state_id: str) -> bytes | None:
        self._step()
        return _encoded(self._store.manifests.get(state_id))

    def deleted(self) -> Iterator[tuple[str, float]]:
        self._step()
        yield from [(state, NOW) for state in self._store.notes]

    def deleted_manifest(self, state_id: str) -> bytes | None:
        self._step()
        return _encoded(self._store.notes.get(state_id))

    def present(self) -> Iterator[Present]:
        self._step()
        for name, packs in sorted(self._store.presences.items()):
            self._step()
            state = None if name.startswith("read-") else name
            yield Present(name, state, name not in self._store.dead, frozenset(packs))

    def take_away(self, presence_id: str, *, dry_run: bool) -> int:
        self._step()
        self._store.presences.pop(presence_id, None)
        return 0

    @contextmanager
    def announced(self, pack_ids: list[str]) -> Iterator[None]:
        self._step()
        self._store.announced[id(self)] = pack_ids
        try:
            yield
            self._step()
        finally:
            # Where a collection was killed: an hour later.
            del self._store.announced[id(self)]

    def remove_pack(self, pack_id: str) -> None:
        self._step()
        self._store.packs.discard(pack_id)

    def remove_note(self, state_id: str) -> None:
        raise AssertionError("a note was removed that is not old")


def _encoded(packs: list[str] | None) -> bytes | None:
    if packs is None:
        return None
    return json.dumps({"body": {"format": 1, "packs": dict.fromkeys(packs, 1)}}).encode()


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_no_order_of_events_takes_a_pack_from_a_state(seed: int) -> None:
    for number in range(seed, seed + 50):
        _play(random.Random(number).randrange)


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_no_order_of_events_takes_a_pack_from_an_uploaded_state(seed: int) -> None:
    for number in range(seed, seed + 100):
        _play(random.Random(number).randrange, remote=True)


def _play(pick: Callable[[int], int], *, remote: bool = False) -> None:
    store = Store()
    kinds = [
        lambda: Actor(uploader(store, pick) if remote else writer(store, pick)),
        lambda: Actor(uploader(store, pick) if remote else writer(store, pick)),
        lambda: Actor(deleter(store, pick)),
        lambda: Actor(deleter(store, pick) if remote else reader(store, pick)),
        lambda: Actor(collector(store)),
        lambda: Actor(collector(store)),
    ]
    actors: list[Actor] = []
    try:
        for _ in range(20 + pick(180)):
            running = [actor for actor in actors if not actor.over]
            if len(running) < 4:
                actors.append(kinds[pick(len(kinds))]())
                continue
            # Some go on for long while others wait, as processes do.
            actor = running[0] if pick(3) else running[pick(len(running))]
            for _ in range(pick(6) + 1):
                if not actor.over:
                    actor.go()
                store.check()
            what = pick(40)
            if what == 0:
                actor.kill()
            elif what == 1 and store.presences:
                # It does not move for so long that it counts as dead; but it may wake up.
                store.dead.add(sorted(store.presences)[pick(len(store.presences))])
    finally:
        for actor in actors:
            actor.kill()
    for actor in actors:
        if actor.error is not None:
            raise actor.error
    store.check()
    store.dead |= store.presences.keys()
    _sweep(store, lambda: None)
    store.check()
    assert store.presences == {}
    if remote:
        return  # what is underway has come to an end in the middle
    needed = {pack for packs in store.manifests.values() for pack in packs}
    own = {pack for pack in store.packs if pack.rpartition("-")[0] in store.manifests}
    assert store.packs == needed | own


def test_a_state_that_comes_and_goes_between_the_looks_hands_its_packs_on() -> None:
    """The one chain of events that only the notes of deleted states tell of."""
    store = Store()
    pack = f"{store.new_id()}-0000"
    between, heir = store.new_id(), store.new_id()
    store.packs.add(pack)
    store.presences[between] = [pack]  # counts on a state that is deleted by now

    class Watched(Files):
        def present(self) -> Iterator[Present]:
            del store.presences[between]
            store.manifests[between] = [pack]
            yield from super().present()
            store.presences[heir] = store.manifests[between]
            store.notes[between] = store.manifests.pop(between)

    sweep(Watched(store, lambda: None), grace_seconds=0, dry_run=False)
    store.manifests[heir] = store.presences.pop(heir)
    store.check()


def test_a_collection_that_takes_for_ever_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its looks would prove nothing: notes of what came and went meanwhile may be gone."""
    store = Store()
    store.packs.add("20261202T000000Z-00000001-0000")
    times = iter([0.0, 1801.0])
    monkeypatch.setattr("time.clock_gettime", lambda _: next(times))
    with pytest.raises(CkptError, match="too slowly"):
        _sweep(store, lambda: None)
    assert store.packs


def test_a_presence_that_cannot_be_read_spares_all() -> None:
    class Unreadable(Files):
        def present(self) -> Iterator[Present]:
            yield Present("x", None, True, None)

    store = Store()
    store.packs.add("20261202T000000Z-00000001-0000")
    sweep(Unreadable(store, lambda: None), grace_seconds=0, dry_run=False)
    assert store.packs
    _sweep(store, lambda: None)
    assert not store.packs
