"""Many processes in one store, killed and stopped at random points: no state is ever lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.store import StateStore
from jupyter_gpu_ckpt.store.packs import pack_key
from jupyter_gpu_ckpt.store.seal import manifest_packs

from . import churn
from .conftest import disk_bytes

Packs = set[tuple[str, int]]

ROUNDS = 1000
#: It takes half a minute of two cores; more where others want them too.
SECONDS = 400.0


class Zygote:
    """The process that others are forked from."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.churn", root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def ask(self, *words: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def fast_root() -> Iterator[Path]:
    """A store in memory: a process that dies loses nothing there that a disk would keep."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "store"


@pytest.fixture
def zygote(fast_root: Path) -> Iterator[Zygote]:
    zygote = Zygote(fast_root)
    yield zygote
    zygote.end()


@pytest.mark.timeout(2 * SECONDS)
def test_a_thousand_deaths(fast_root: Path, zygote: Zygote) -> None:
    """Processes that save, read, delete and collect at once; one of them dies in each round.

    What a death has harmed is still harmed a round later: all is looked at after every second one.
    """
    store, dice = StateStore(fast_root, "ada", workers=1), random.Random(20261202)
    pids = [int(zygote.ask("start", n)) for n in range(4)]
    until = time.monotonic() + SECONDS
    rounds = stopped = 0
    intact: dict[str, Packs] = {}
    while rounds < ROUNDS:
        assert time.monotonic() < until, f"only {rounds} rounds in {SECONDS} seconds"
        victim = dice.randrange(len(pids))
        if dice.random() < 0.1:
            # It does nothing for a while, and then goes on where it was.
            os.kill(pids[victim], signal.SIGSTOP)
            time.sleep(dice.random() * 0.02)
            os.kill(pids[victim], signal.SIGCONT)
            stopped += 1
        time.sleep(dice.random() * 0.01)  # the point at which it dies
        assert zygote.ask("kill", pids[victim]) == "killed", "it failed before it was killed"
        pids[victim] = int(zygote.ask("start", 1000 + rounds))
        rounds += 1
        if rounds % 2 == 0:
            look(store, intact)
    for pid in pids:
        assert zygote.ask("kill", pid) == "killed", "it failed before it was killed"
    print(f"{rounds} rounds, {len(intact)} states, {stopped} stops")
    assert len(intact) >= 50, "too few states were saved for this to show anything"
    # In the end the space is what the states need.
    for path in fast_root.glob("*/writers/*"):
        os.utime(path, (0, 0))
    store.gc(grace_seconds=0)
    states = store.states()
    assert all([churn.check(store, state) for state in states])
    packs = {path.stem for path in fast_root.glob("*/packs/*/*")}
    needed = {pack for path in manifests(store) for pack in manifest_packs(read(path))}
    own = {pack for pack in packs if pack.rpartition("-")[0] in {state.id for state in states}}
    assert packs == needed | own
    assert list(fast_root.glob("*/writers/*")) == []
    for state in states:
        store.delete(state.id)
    store.gc(grace_seconds=0)
    assert not list(fast_root.glob("*/packs/*/*"))
    # Notes of deleted states go after an hour.
    for path in fast_root.glob("*/deleted/*"):
        os.utime(path, (0, 0))
    store.gc(grace_seconds=0)
    assert disk_bytes(fast_root) < 1000, "store.json is all that is left"


def look(store: StateStore, intact: dict[str, Packs]) -> None:
    """See that each listed state is what was saved.

    One that was read before is that as long as its packs, which nobody alters, are there.
    """
    states = {state.id: state for state in store.states()}
    needs = {path.stem: manifest_packs(read(path)) for path in manifests(store)}
    for state_id, state in states.items():
        packs = needs.get(state_id)
        if packs is None:
            continue  # deleted just now
        found = files_of(store, packs)
        if found is not None and found == intact.get(state_id):
            continue
        # Altered, unless it was deleted meanwhile or is seen for the first time.
        if churn.check(store, state):
            assert state_id not in intact, "a pack was written over"
            intact[state_id] = found or set()
    assert store.damaged() == []


def files_of(store: StateStore, packs: set[str]) -> Packs | None:
    """Identity of these packs' files; None if one is not there."""
    try:
        folder = store.root / "ada" / "packs"
        return {(pack, (folder / pack_key(pack)).stat().st_ino) for pack in packs}
    except FileNotFoundError:
        return None


def manifests(store: StateStore) -> list[Path]:
    return list(store.root.glob("ada/kernels/*/states/*.json"))


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
