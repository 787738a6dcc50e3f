"""Deleting, collecting, marks, costs and retention on real stores."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.recovery import Leases
from jupyter_gpu_ckpt.spool import Spool
from jupyter_gpu_ckpt.store import StateStore, catalog, kernel_store
from jupyter_gpu_ckpt.store.manifest import Body
from jupyter_gpu_ckpt.store.records import KernelRecord, Lease
from jupyter_gpu_ckpt.store.retention import Policy
from jupyter_gpu_ckpt.store.seal import Sealing
from jupyter_gpu_ckpt.tidying import Tidying
from jupyter_gpu_ckpt.tracking import Tracker
from jupyter_gpu_ckpt.troubles import Troubles

from .conftest import KERNEL, Save, collect_all, extract, make_meta, noise, pack_files, snapshot


def change(image: Path, seed: int) -> None:
    with open(image / "pages-1.img", "r+b") as file:
        file.seek(4096 * (seed % 500))
        file.write(noise(4096, seed))


def test_the_parent_may_be_deleted_while_a_save_builds_on_it(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    parent = save(image)
    change(image, 1)
    writer = store.begin(KERNEL)
    store.delete(parent.id)
    collect_all(store)
    writer.add_tree(image)
    collect_all(store)
    record = writer.commit(make_meta())
    assert record.parent == parent.id and record.stored_size < parent.stored_size / 50
    collect_all(store)
    extract(store, record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(image)
    store.delete(record.id)
    assert collect_all(store).packs == 2
    assert pack_files(store.root) == set()


def test_a_state_that_is_read_stays_whole_whoever_deletes_it(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    record = save(image)
    with store.open(record.id) as reader:
        store.delete(record.id)
        collect_all(store)
        reader.extract(tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(image)
    collect_all(store)
    assert pack_files(store.root) == set()
    assert list(store.root.glob("*/writers/*")) == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_among_writers_holds_no_collection_up(
    make: Callable[[Path], None], store: StateStore, save: Save, image: Path
) -> None:
    record = save(image)
    (owner,) = store.root.glob("*/writers")
    (folder := owner / "20260101T000000Z-00000000").mkdir()
    make(folder / "writer.json")
    store.delete(record.id)
    assert store.gc(grace_seconds=0).packs == 0, "it is too young to be nobody's"
    assert folder.exists()


def test_a_dry_run_says_what_a_collection_then_does(
    store: StateStore, save: Save, image: Path
) -> None:
    save(image)
    other = save(image, "another-kernel")
    size = store.costs()[other.id]
    store.delete(other.id)
    before = snapshot(store.root)
    dry = store.gc(grace_seconds=0, dry_run=True)
    assert snapshot(store.root) == before
    assert dry == (1, size)
    assert store.gc(grace_seconds=0) == dry
    assert store.gc(grace_seconds=0) == (0, 0)


def test_notes_of_deleted_states_go_after_an_hour(
    store: StateStore, save: Save, image: Path
) -> None:
    store.delete(save(image).id)
    (note,) = store.root.glob("*/deleted/*")
    store.gc(grace_seconds=0)
    assert note.exists()
    os.utime(note, (time.time() - 3700,) * 2)
    store.gc(grace_seconds=0)
    assert not note.exists()


def test_a_state_is_newer_than_the_one_before_whatever_the_clock_says(
    store: StateStore, save: Save, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that saved before was a day ahead; what dies here must not come back from that."""
    from datetime import datetime, timedelta

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=1)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("jupyter_gpu_ckpt.store.writer.datetime", Ahead)
        first = save(image)
    second = save(image)
    third = save(image)
    assert [state.id for state in store.states()] == [third.id, second.id, first.id]
    assert third.parent == second.id


def test_files_from_the_future_hold_nothing_up(store: StateStore, save: Save, image: Path) -> None:
    """A file server's clock was set back: nothing is lost, and a dead writer still goes."""
    kept = save(image)
    store.delete(save(image, "another-kernel").id)
    ahead = (time.time() + 86400,) * 2
    for path in [*pack_files(store.root), *store.root.glob("*/deleted/*")]:
        os.utime(path, ahead)
    assert store.gc(grace_seconds=0) == (0, 0)
    assert store.verify(kept.id).lost == []
    for path in pack_files(store.root):
        os.utime(path)
    assert store.gc(grace_seconds=0).packs == 1
    assert store.verify(kept.id).lost == []


@pytest.fixture
def small_store(tmp_path: Path) -> Iterator[StateStore]:
    """A store on a file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", folder], check=True)
    yield StateStore(folder / "store", "ada")
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.root
def test_a_full_disk_is_emptied_by_deleting(
    small_store: StateStore, image: Path, tmp_path: Path
) -> None:
    """With not a byte left, states can still be deleted, and their space comes back."""
    store, ids = small_store, []
    with pytest.raises(CkptError) as caught:
        for number in range(40):
            (image / "pages-1.img").write_bytes(noise(2 << 20, number))
            with store.begin(f"kernel-{number}") as writer:
                writer.add_tree(image)
                ids.append(writer.commit(make_meta(f"kernel-{number}")).id)
    assert caught.value.reason == "no_space"
    filler = store.root / "filler"
    with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    for state in ids[:-1]:
        store.delete(state)
    assert store.gc(grace_seconds=0).packs >= len(ids) - 1
    assert shutil.disk_usage(store.root).free > 8 << 20
    assert [state.id for state in store.states()] == [ids[-1]]
    assert store.verify(ids[-1]).lost == []


def test_a_collection_of_hundreds_of_states_takes_no_second(
    store: StateStore, save: Save, image: Path
) -> None:
    first = save(image)
    (manifest,) = store.root.glob("*/kernels/*/states/*.json")
    data = manifest.read_bytes()
    for number in range(200):
        # Their checksums are wrong, which a collection does not look at.
        manifest.with_name(f"{first.id[:-8]}{number:08x}.json").write_bytes(data)
    began = time.monotonic()
    assert store.gc(grace_seconds=0, dry_run=True) == (0, 0)
    assert time.monotonic() - began < 1


# -- marks -----------------------------------------------------------------------------------------


def test_marks(store: StateStore, save: Save, image: Path) -> None:
    record = save(image)
    assert (record.pinned, record.meta.label) == (False, "before the long run")
    assert store.mark(record.id, pinned=True).pinned
    marked = store.mark(record.id, label="good")
    assert (marked.pinned, marked.meta.label) == (True, "good")
    assert store.states() == [marked] == [StateStore(store.root, "ada").state(record.id)]
    marked = store.mark(record.id, label=None, verified="2026-12-02T03:04:05Z", pinned=False)
    assert (marked.pinned, marked.meta.label, marked.verified) == (
        False,
        None,
        "2026-12-02T03:04:05Z",
    )
    store.delete(record.id)
    assert list(store.root.glob("*/kernels/*/states/*")) == []
    with pytest.raises(CkptError) as caught:
        store.mark(record.id, pinned=True)
    assert caught.value.reason == "unknown_state"


# -- retention -------------------------------------------------------------------------------------


def test_costs_are_what_deleting_frees(store: StateStore, save: Save, image: Path) -> None:
    first = save(image)
    change(image, 1)
    second = save(image)
    other = save(image, "another-kernel")
    costs = store.costs()
    assert costs[first.id] == 0, "the second needs all of it but its list, in the same pack"
    assert 0 < costs[second.id] < costs[other.id] / 50
    for state in (second, other, first):
        expected = store.costs()[state.id]
        store.delete(state.id)
        assert collect_all(store).bytes == expected


def test_rules_are_applied_to_real_states(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    states = []
    for seed in range(6):
        change(image, seed)
        states.append(save(image))
        store.mark(states[-1].id, label=None)
    store.mark(states[0].id, pinned=True)
    store.mark(states[1].id, label="kept")
    policy = Policy(keep_last=2)
    dry = store.retain(policy, living={KERNEL}, dry_run=True)
    assert {removal.state_id for removal in dry} == {states[2].id, states[3].id}
    assert len(store.states()) == 6
    assert store.retain(policy, living={KERNEL}) == dry
    collect_all(store)
    left = store.states()
    assert [state.id for state in left] == [states[n].id for n in (5, 4, 1, 0)]
    for state in left:
        assert store.verify(state.id).lost == []
    extract(store, states[5].id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(image)


def test_a_quota_frees_what_it_says(store: StateStore, save: Save, image: Path) -> None:
    old = save(image)
    other = save(image, "another-kernel")
    costs = store.costs()
    assert store.retain(Policy(quota=sum(costs.values()))) == []
    with pytest.raises(CkptError) as caught:
        store.room(Policy(quota=sum(costs.values())), 1, living={KERNEL, "another-kernel"})
    assert caught.value.reason == "over_quota"
    (removal,) = store.retain(Policy(quota=costs[other.id]), living={"another-kernel"})
    assert (removal.state_id, removal.why, removal.bytes) == (old.id, "quota", costs[old.id])
    assert collect_all(store).bytes == removal.bytes


def test_what_cannot_be_read_is_never_removed(store: StateStore, save: Save, image: Path) -> None:
    damaged = save(image)
    save(image)
    (manifest,) = store.root.glob(f"*/kernels/*/states/{damaged.id}.json")
    manifest.write_bytes(manifest.read_bytes()[:-40])
    store.retain(Policy(keep_last=1, max_age=0.0, quota=0))
    collect_all(store)
    assert [bad[0] for bad in store.damaged()] == [damaged.id]
    assert any(damaged.id in path.name for path in pack_files(store.root))


def test_the_best_state_is_the_newest_that_is_not_damaged(
    store: StateStore, save: Save, image: Path
) -> None:
    """By time: what follows the second in an id is chance."""
    assert store.best(KERNEL) is None
    oldest, *newer = [save(image).id for _ in range(8)]
    for state_id in newer:
        store.mark(state_id, damage="A block is gone.")
    best = store.best(KERNEL)
    assert best is not None
    assert best[0].id == oldest
    assert best[1] == dict.fromkeys(sorted(newer, reverse=True), "A block is gone.")
    store.mark(oldest, damage="A block is gone.")
    best = store.best(KERNEL)
    assert best is not None
    assert (best[0].id, best[1]) == (newer[-1], {}), "perhaps it is only out of reach"


def test_a_server_that_starts_reads_what_is_there_once(
    store: StateStore, save: Save, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tidies up by that; only at what goes, and for garbage, it has to look again."""
    lease = Lease(node_id="gone", hostname="far", boot_id="b", server_pid=1, server_start=0.0,
                  renewed=1.0, ttl=1.0)  # fmt: skip
    records = [
        KernelRecord(kernel_id=kernel_id, kernel_name="p", display_name="P", lease=lease)
        for kernel_id in (KERNEL, "stateless", "unreadable")
    ]
    for record in records:
        store.put_kernel(record)
    states = [save(image) for _ in range(4)]
    damaged = save(image, kernel_id="unreadable")
    (manifest,) = store.root.glob(f"*/kernels/*/states/{damaged.id}.json")
    manifest.write_bytes(b"{}")
    (path,) = store.root.glob("*/kernels/unreadable/kernel.json")
    path.write_bytes(b"{}")
    for path in store.root.glob("*/kernels/*/kernel.json"):
        os.utime(path, (0, 0))
    read: list[str] = []
    decode, load = catalog.decode_manifest, kernel_store._load_kernel

    def counted_manifest(data: bytes, sealing: Sealing, kernel_id: str, state_id: str) -> Body:
        read.append(state_id)
        return decode(data, sealing, kernel_id, state_id)

    def counted_record(path: Path, sealing: Sealing) -> KernelRecord | None:
        read.append(path.parent.name)
        return load(path, sealing)

    log = logging.getLogger("test-of-tidying")
    troubles = Troubles(log)
    tracker = Tracker(*[lambda *_: None] * 7)  # type: ignore[arg-type]
    keeper = SimpleNamespace(
        store=store, tracker=tracker, log=log, troubles=troubles,
        spool=Spool(tmp_path / "spool"), operations=list, retention=lambda: Policy(max_age=0.0),
        leases=Leases(
            store, tracker, dict, ttl=1.0, interval=1.0,  # type: ignore[arg-type]
            on_fenced=lambda kernel, host: None, troubles=troubles,
        ),
    )  # fmt: skip

    async def delete(state_id: str) -> None:
        store.delete(state_id)

    keeper.delete_state = delete
    said: list[str] = []
    log.addHandler(handler := logging.Handler())
    monkeypatch.setattr(handler, "emit", lambda entry: said.append(entry.getMessage()))
    monkeypatch.setattr(catalog, "decode_manifest", counted_manifest)
    monkeypatch.setattr(kernel_store, "_load_kernel", counted_record)
    asyncio.run(Tidying(keeper, threading.Event()).begin())  # type: ignore[arg-type]

    everything = [record.kernel_id for record in records] + [s.id for s in [*states, damaged]]
    once, again = read[: len(everything)], read[len(everything) :]
    assert sorted(once) == sorted(everything)
    assert set(again) == {KERNEL} | {state.id for state in states}
    (warning,) = said
    assert warning.startswith("2 things") and damaged.id in warning and "unreadable" in warning
    assert [record.kernel_id for record in store.kernels()] == [KERNEL]
    assert [state.id for state in store.states()] == [states[3].id]
    assert manifest.exists() and path.exists()
