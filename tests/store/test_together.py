"""Several processes in one store: killed writers, collectors and writers at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import StateStore
from jupyter_gpu_ckpt.store.layout import create_file, make_private_dir, move_into

from .conftest import KERNEL, Save, collect_all, extract, make_meta, noise, pack_files, snapshot

PRELUDE = """
import sys
from pathlib import Path
import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import StateStore
from tests.store.conftest import extract, KERNEL, make_meta
store = StateStore(Path(sys.argv[1]), "ada", workers=2)
"""

WRITER = (
    PRELUDE
    + """
print("ready", flush=True)
sys.stdin.readline()
while True:
    with store.begin(KERNEL) as writer:
        writer.add_tree(Path(sys.argv[2]))
        print(writer.commit(make_meta()).id, flush=True)
"""
)

COLLECTOR = (
    PRELUDE
    + """
import time
until = time.monotonic() + float(sys.argv[2])
rounds = removed = 0
while time.monotonic() < until:
    removed += store.gc(grace_seconds=0).packs
    rounds += 1
print(rounds, removed)
"""
)

# Saves and deletes the same content over and over, so that a collector always has
# garbage that a writer is about to count on again.
CHURN = (
    PRELUDE
    + """
import time
until = time.monotonic() + float(sys.argv[3])
saved = 0
while time.monotonic() < until:
    with store.begin(KERNEL) as writer:
        writer.add_tree(Path(sys.argv[2]))
        record = writer.commit(make_meta())
    target = Path(sys.argv[4]) / record.id
    extract(store, record.id, target)
    for path in Path(sys.argv[2]).iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes(), path
        (target / path.name).unlink()
    target.rmdir()
    store.delete(record.id)
    saved += 1
print(saved)
"""
)


Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run() -> Iterator[Run]:
    """Start a program in another process; none outlives the test."""
    with ExitStack() as stack:

        def run(program: str, *args: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", program, *map(str, args)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def folder_with(tmp_path: Path, name: str, *parts: bytes) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    for number, part in enumerate(parts):
        (folder / f"pages-{number}.img").write_bytes(part)
    return folder


def test_a_writer_killed_at_any_point_leaves_only_garbage(
    store: StateStore, save: Save, run: Run, tmp_path: Path
) -> None:
    """Fifteen writers die, each somewhere in its first or second save."""
    shared = noise(3 << 20, seed=1)
    kept = save(folder_with(tmp_path, "kept", shared))
    kept_files = pack_files(store.root)
    committed: list[str] = []
    dice = random.Random(20261201)
    until = time.monotonic() + 20
    rounds = 0
    while rounds < 15 and time.monotonic() < until:
        own = noise(6 << 20, seed=100 + rounds)
        source = folder_with(tmp_path, f"image-{rounds}", shared, own, b"x" * 2_000_000)
        process = run(WRITER, store.root, source)
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(dice.random() * 0.12)  # the point at which it dies
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=30)
        committed += rest.split()
        rounds += 1
    assert rounds >= 5
    listed = {state.id for state in store.states()}
    # A state may be durable whose writer died before it could say so.
    assert {kept.id, *committed} <= listed
    assert store.damaged() == []
    for state in store.states():
        extract(store, state.id, tmp_path / "back" / state.id)
    assert store.gc(grace_seconds=3600).packs == 0, "the grace period has not passed"
    collect_all(store)
    for state in store.states():
        extract(store, state.id, tmp_path / "after" / state.id)
        assert snapshot(tmp_path / "after" / state.id) == snapshot(tmp_path / "back" / state.id)
        if state.id != kept.id:
            store.delete(state.id)
    collect_all(store)
    assert pack_files(store.root) == kept_files
    assert list(store.root.glob("*/writers/*/[0-9]*")) == []


def test_collectors_beside_writers(store: StateStore, run: Run, tmp_path: Path) -> None:
    """No grace at all, and still no block vanishes under a state being written or read."""
    seconds = 5
    first = folder_with(tmp_path, "first", noise(2 << 20, seed=1), noise(1 << 20, seed=2))
    second = folder_with(tmp_path, "second", noise(1 << 20, seed=2), noise(2 << 20, seed=3))
    writers = [
        run(CHURN, store.root, first, seconds, tmp_path),
        run(CHURN, store.root, second, seconds, tmp_path),
    ]
    collectors = [run(COLLECTOR, store.root, seconds) for _ in range(2)]
    for writer in writers:
        out, _ = writer.communicate(timeout=60)
        assert writer.returncode == 0
        assert int(out) >= 3
    rounds, removed = 0, 0
    for collector in collectors:
        out, _ = collector.communicate(timeout=60)
        assert collector.returncode == 0
        rounds += int(out.split()[0])
        removed += int(out.split()[1])
    assert rounds >= 10
    assert removed > 0, "the collectors had nothing to do: the test shows nothing"
    collect_all(store)
    assert pack_files(store.root) == set()


def test_a_running_writer_is_spared_whatever_the_grace(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    old = save(image)
    (image / "new").write_bytes(noise(1 << 20, seed=8))
    writer = store.begin(KERNEL)
    writer.add_tree(image)
    store.delete(old.id)
    store.gc(grace_seconds=0)
    record = writer.commit(make_meta())
    extract(store, record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(image)


def test_a_writer_on_another_node_is_spared_while_it_gives_signs_of_life(
    store: StateStore, image: Path
) -> None:
    """Its lock may be invisible here, as on some network file systems."""
    writer = store.begin(KERNEL)
    writer.add_tree(image)
    (folder,) = store.root.glob("*/writers/*")
    # What the folder would look like from here: not our boot, and nobody holds the lock.
    copy = (folder / "writer.json").read_bytes()
    there = json.loads(copy) | {"boot_id": "00000000-0000-0000-0000-000000000000"}
    began = (folder / "writer.json").stat().st_mtime_ns
    (folder / "writer.json").unlink()
    (folder / "writer.json").write_text(json.dumps(there))
    os.utime(folder / "writer.json", ns=(began, began))
    store.gc(grace_seconds=0)
    assert folder.exists()
    record = writer.commit(make_meta())
    assert store.states() == [record]

    writer = store.begin(KERNEL)
    (image / "more").write_bytes(noise(1 << 20, seed=3))
    writer.add_tree(image)
    (folder,) = store.root.glob("*/writers/*")
    (folder / "writer.json").unlink()
    (folder / "writer.json").write_text(json.dumps(there))
    os.utime(folder / "writer.json", (0, 0))
    collect_all(store)  # with a folder that nobody touched for long
    assert list(store.root.glob("*/writers/*")) == []
    with pytest.raises(CkptError) as caught:
        writer.commit(make_meta())
    assert caught.value.reason == "store_unavailable"
    assert store.states() == [record]


def test_servers_that_start_together_make_one_store(root: Path, run: Run, image: Path) -> None:
    program = (
        PRELUDE
        + """
print("ready", flush=True)
sys.stdin.readline()
with store.begin(KERNEL) as writer:
    writer.add_tree(Path(sys.argv[2]))
    record = writer.commit(make_meta())
assert record in store.states()
"""
    )
    servers = [run(program, root, image) for _ in range(4)]
    for server in servers:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
    for server in servers:
        assert server.stdin is not None
        server.stdin.write("\n")
        server.stdin.flush()
    for server in servers:
        server.communicate(timeout=60)
        assert server.returncode == 0
    store = StateStore(root, "ada")
    assert len(store.states()) == 4
    assert store.damaged() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_folder_that_another_removes_is_made_anew(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever deletes a kernel's last state removes its folder, just when the next one comes."""
    place = tmp_path / "kernels" / "kernel" / "state"
    make_dir = os.mkdir
    times = dict.fromkeys([place.parent, place.parent.parent], 3)

    def beside_a_remover(path: Path, mode: int) -> None:
        times[path] = times.get(path, 0) - 1
        if times[path] < 0:
            make_dir(path, mode)
        elif when == "before":
            raise FileExistsError  # it was there, and goes before anybody looks again
        else:
            make_dir(path, mode)
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", beside_a_remover)
    create_file(tmp_path / "temporary", b"state")
    move_into(tmp_path / "temporary", place)
    assert place.read_bytes() == b"state"
    with pytest.raises(FileExistsError):
        make_private_dir(place)
