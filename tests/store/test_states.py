"""Listing, looking up and deleting states; kernel records; who may see what."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import GcResult, KernelRecord, Lease, StateStore

from .conftest import KERNEL, Save, collect_all, extract, make_meta, noise, pack_files

OTHER = "kernel_2"


def test_a_store_that_is_not_there_is_empty_and_stays_away(root: Path, store: StateStore) -> None:
    assert store.states() == []
    assert store.damaged() == []
    assert store.kernels() == []
    assert store.kernel(KERNEL) is None
    assert store.gc() == GcResult(0, 0)
    assert store.usage() == 0
    store.delete_kernel(KERNEL)
    assert not root.exists()


def test_states_are_listed_newest_first(store: StateStore, save: Save, image: Path) -> None:
    first = save(image)
    second = save(image, OTHER, "b.ipynb")
    third = save(image)
    assert [s.id for s in store.states()] == [third.id, second.id, first.id]
    assert [s.id for s in store.states(KERNEL)] == [third.id, first.id]
    assert [s.id for s in store.states(path="b.ipynb")] == [second.id]
    assert store.states("nobody") == []
    assert store.state(second.id) == second
    assert second.meta == make_meta(OTHER, "b.ipynb")
    assert second.created.endswith("Z")
    assert StateStore(store.root, "ada").states() == store.states()


def test_an_unchanged_kernel_costs_next_to_nothing_to_save_again(
    store: StateStore, save: Save, image: Path
) -> None:
    first = save(image)
    second = save(image)
    # The list of what it is made of.
    assert second.stored_size < 2048
    with open(image / "pages-1.img", "r+b") as file:
        file.write(b"changed")
    third = save(image)
    # One page of noise and the new list.
    assert 4096 < third.stored_size < 4096 + 2048
    assert first.size == second.size == third.size
    assert (first.parent, second.parent, third.parent) == (None, first.id, second.id)
    assert len(pack_files(store.root)) == 3


@pytest.mark.parametrize(
    "state_id",
    [
        "20261201T223101Z-00000000",
        "",
        ".",
        "../../../etc/passwd",
        "20261201T223101Z-0000000g",
        "20261201T223101Z-00000000\n",
        "20261201T223101Z-00000000/../x",
        "x" * 5000,
        "\0",
    ],
)
def test_unknown_and_impossible_state_ids(
    store: StateStore, save: Save, image: Path, tmp_path: Path, state_id: str
) -> None:
    save(image)
    for call in (
        lambda: store.state(state_id),
        lambda: store.delete(state_id),
        lambda: extract(store, state_id, tmp_path / "back"),
    ):
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.reason == "unknown_state"
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("kernel_id", ["", "..", "a/b", "../x", "a\n", "a\0", "k" * 129, "ä"])
def test_impossible_kernel_ids(store: StateStore, kernel_id: str) -> None:
    record = KernelRecord(kernel_id=kernel_id, kernel_name="p", display_name="P")
    for call in (
        lambda: store.begin(kernel_id),
        lambda: store.states(kernel_id),
        lambda: store.kernel(kernel_id),
        lambda: store.put_kernel(record),
        lambda: store.delete_kernel(kernel_id),
    ):
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.reason == "unknown_kernel"


def test_another_owners_state_is_unknown(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    record = save(image)
    store.put_kernel(KernelRecord(kernel_id=KERNEL, kernel_name="p", display_name="P"))
    for name in ("eve", "../ada", "ada/../ada", ".."):
        eve = StateStore(store.root, name)
        assert eve.states() == []
        assert eve.kernels() == []
        with pytest.raises(CkptError, match="no saved state"):
            eve.state(record.id)
        with pytest.raises(CkptError, match="no saved state"):
            eve.delete(record.id)
        with pytest.raises(CkptError, match="no saved state"):
            extract(eve, record.id, tmp_path / "back")
    assert store.state(record.id) == record


def test_equal_blocks_of_two_owners_do_not_look_equal(
    store: StateStore, save: Save, image: Path
) -> None:
    save(image)
    eve = StateStore(store.root, "eve")
    with eve.begin(KERNEL) as writer:
        writer.add_tree(image)
        writer.commit(make_meta())
    names: list[set[bytes]] = []
    for owner in (store, eve):
        with owner.open(owner.states()[0].id) as reader:
            names.append({reader.index.blobs.name(n) for n in range(len(reader.index.blobs))})
    assert not names[0] & names[1]


def test_deleted_states_give_their_space_back(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    first = save(image)
    (image / "more").write_bytes(noise(3 << 20, seed=9))
    second = save(image)
    store.delete(second.id)
    before = store.usage()
    assert [s.id for s in store.states()] == [first.id]
    with pytest.raises(CkptError, match="no saved state"):
        store.delete(second.id)
    assert store.gc() == GcResult(0, 0), "younger than the grace period"
    for file in pack_files(store.root):
        os.utime(file, (0, 0))
    dry = store.gc(dry_run=True)
    assert dry.bytes > 3 << 20
    assert store.usage() == before
    assert store.gc() == dry
    assert before - store.usage() >= 3 << 20
    extract(store, first.id, tmp_path / "back")
    store.delete(first.id)
    collect_all(store)
    assert pack_files(store.root) == set()


def test_a_collection_that_is_stopped_takes_nothing_it_should_not(
    store: StateStore, save: Save, image: Path
) -> None:
    kept = save(image)
    (image / "other.img").write_bytes(noise(3 << 20))
    store.delete(save(image).id)
    stop = threading.Event()
    stop.set()
    before = len(pack_files(store.root))
    assert store.gc(grace_seconds=0, stop=stop) == GcResult(0, 0)
    assert len(pack_files(store.root)) == before
    collect_all(store)
    extract(store, kept.id, image.parent / "again")


def test_everything_is_private_whatever_the_umask(
    root: Path, store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    old = os.umask(0)
    try:
        record = save(image)
        store.put_kernel(KernelRecord(kernel_id=KERNEL, kernel_name="p", display_name="P"))
        extract(store, record.id, tmp_path / "back")
    finally:
        os.umask(old)
    found = [root, *root.rglob("*")]
    assert len(found) > 10
    for path in found:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert stat.S_IMODE((tmp_path / "back").stat().st_mode) == 0o700


def test_a_folder_others_can_write_to_is_refused(
    root: Path, store: StateStore, image: Path
) -> None:
    root.mkdir()
    root.chmod(0o777)
    for call in (lambda: store.begin(KERNEL), store.states):
        (root / "ada").mkdir(exist_ok=True)
        with pytest.raises(CkptError, match="Other users") as caught:
            call()
        assert caught.value.reason == "store_unavailable"
        assert caught.value.hint
    root.chmod(0o1777)
    with store.begin(KERNEL) as writer:
        writer.add_tree(image)
        writer.commit(make_meta())
    assert stat.S_IMODE((root / "ada").stat().st_mode) == 0o700


def test_a_folder_planted_by_another_user_is_refused(root: Path, store: StateStore) -> None:
    root.mkdir()
    (root / "elsewhere").mkdir()
    (root / "ada").symlink_to(root / "elsewhere")
    with pytest.raises(CkptError) as caught:
        store.begin(KERNEL)
    assert caught.value.reason == "store_unavailable"
    assert list((root / "elsewhere").iterdir()) == []


@pytest.mark.root
def test_a_folder_of_another_user_is_refused(root: Path, store: StateStore) -> None:
    (root / "ada").mkdir(parents=True)
    os.chown(root / "ada", 12345, 12345)
    with pytest.raises(CkptError, match="another user") as caught:
        store.begin(KERNEL)
    assert caught.value.reason == "store_unavailable"


def test_kernel_records(store: StateStore, save: Save, image: Path) -> None:
    lease = Lease(
        node_id="n", hostname="h", boot_id="b", server_pid=1, server_start=2.5, renewed=3.5, ttl=30
    )
    record = KernelRecord(
        kernel_id=KERNEL,
        kernel_name="python3",
        display_name="Python 3",
        path="ä.ipynb",
        lease=lease,
    )
    other = KernelRecord(kernel_id=OTHER, kernel_name="ir", display_name="R", dismissed=True)
    store.put_kernel(record)
    store.put_kernel(other)
    assert store.kernel(KERNEL) == record
    assert store.kernels() == [record, other]
    record.lease = None
    store.put_kernel(record)
    assert StateStore(store.root, "ada").kernel(KERNEL) == record
    state = save(image)
    store.delete_kernel(KERNEL)
    assert store.kernel(KERNEL) is None
    assert store.states(KERNEL) == [state]
    store.delete_kernel(KERNEL)


def test_kernel_records_are_never_seen_half_written(store: StateStore) -> None:
    record = KernelRecord(kernel_id=KERNEL, kernel_name="p", display_name="x" * 100_000)
    store.put_kernel(record)
    failures: list[BaseException] = []
    over = threading.Event()

    def read() -> None:
        try:
            while not over.is_set():
                assert store.kernel(KERNEL) == record
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(100):
        store.put_kernel(record)
    over.set()
    reader.join()
    assert not failures


def test_hundreds_of_states_are_listed_without_reading_their_blocks(
    store: StateStore, save: Save, image: Path
) -> None:
    save(image)
    for _ in range(30):
        save(image)
    # The lists are in packs: with all of them gone the states are still listed.
    for file in pack_files(store.root):
        file.unlink()
    assert len(store.states()) == 31
