"""Full disks, cancels, read-only folders: nothing half left, and the space comes back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import StateStore
from jupyter_gpu_ckpt.store.layout import sync_dir

from .conftest import (
    KERNEL,
    Save,
    collect_all,
    disk_bytes,
    extract,
    make_meta,
    noise,
    pack_files,
    snapshot,
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.root
def test_disk_full_while_saving(small_disk: Path, image: Path, tmp_path: Path) -> None:
    store = StateStore(small_disk / "store", "ada")
    with store.begin(KERNEL) as writer:
        writer.add_tree(image)
        kept = writer.commit(make_meta())
    before = store.usage()
    (image / "huge").write_bytes(noise(40 << 20))
    with pytest.raises(CkptError) as caught, store.begin(KERNEL) as writer:
        writer.add_tree(image)
    assert caught.value.reason == "no_space"
    assert caught.value.hint
    assert [s.id for s in store.states()] == [kept.id]
    # Folders for packs may stay; what was in them may not.
    assert store.usage() <= before + 256 * 4096
    assert disk_bytes(small_disk) <= before
    extract(store, kept.id, tmp_path / "back")
    (image / "huge").unlink()
    assert snapshot(tmp_path / "back") == snapshot(image)
    with store.begin(KERNEL) as writer:
        writer.add_tree(image)
        writer.commit(make_meta())


@pytest.mark.root
def test_disk_full_while_committing(small_disk: Path, image: Path) -> None:
    store = StateStore(small_disk / "store", "ada")
    with store.begin(KERNEL) as writer:
        writer.add_tree(image)
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(CkptError) as caught:
            writer.commit(make_meta())
    assert caught.value.reason == "no_space"
    filler.unlink()
    assert store.states() == []
    assert pack_files(store.root) == set()
    assert store.damaged() == []


def test_a_disk_that_fails_last_leaves_no_damaged_state(
    store: StateStore, save: Save, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = save(image)
    (image / "more").write_bytes(noise(1 << 20, seed=9))

    def fails(path: Path) -> None:
        if path.name == "kernels":  # when the manifest has its name already
            raise OSError(errno.EIO, "Input/output error")
        sync_dir(path)

    monkeypatch.setattr("jupyter_gpu_ckpt.store.writer.sync_dir", fails)
    packs = pack_files(store.root)
    with pytest.raises(CkptError) as caught:
        save(image)
    assert caught.value.reason == "store_unavailable"
    assert [state.id for state in store.states()] == [kept.id]
    assert pack_files(store.root) == packs


@pytest.mark.root
def test_disk_full_while_reading_back(small_disk: Path, store: StateStore, save: Save) -> None:
    source = store.root.parent / "big"
    source.mkdir()
    (source / "pages-1.img").write_bytes(noise(20 << 20))
    record = save(source)
    with pytest.raises(CkptError) as caught:
        extract(store, record.id, small_disk / "spool")
    assert caught.value.reason == "no_space"
    assert list(small_disk.iterdir()) == []


def test_size_limit_while_saving(store: StateStore, image: Path) -> None:
    """A limit on file size (as a quota might be) is told like a full disk."""
    program = """
import resource, signal, sys
from pathlib import Path
from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import StateStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = StateStore(Path(sys.argv[1]), "ada")
try:
    with store.begin("k") as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
        writer.add_tree(Path(sys.argv[2]))
except CkptError as error:
    print(error.reason)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, store.root, image],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout == "no_space\n"
    assert store.states() == []
    assert pack_files(store.root) == set()


def test_something_in_the_way(root: Path, store: StateStore) -> None:
    root.write_text("not a folder")
    for call in (lambda: store.begin(KERNEL), store.states, store.usage, store.gc):
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.reason == "store_unavailable"
        assert caught.value.hint
    assert root.read_text() == "not a folder"


@pytest.mark.root
def test_read_only_file_system(
    root: Path, store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    record = save(image)
    subprocess.run(["mount", "--bind", root, root], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
        for call in (
            lambda: store.begin(KERNEL),
            lambda: store.delete(record.id),
            lambda: store.gc(grace_seconds=0),
        ):
            with pytest.raises(CkptError) as caught:
                call()
            assert caught.value.reason == "store_unavailable"
            assert "ead-only" in caught.value.message
        extract(store, record.id, tmp_path / "back")
        assert store.states() == [record]
    finally:
        subprocess.run(["umount", root], check=True)
    assert snapshot(tmp_path / "back") == snapshot(image)


@pytest.mark.root
def test_store_of_an_ordinary_user_that_cannot_be_written(
    root: Path, image: Path, tmp_path: Path
) -> None:
    program = """
import os, sys
from pathlib import Path
from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import StateStore
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    StateStore(Path("/store"), "ada").begin("k")
except CkptError as error:
    print(error.reason, "|", error.hint)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    assert result.stdout.startswith("store_unavailable | Check that the folder")
    assert not Path("/store").exists()


def test_cancel_while_saving(store: StateStore, save: Save, image: Path) -> None:
    kept = save(image)
    before = pack_files(store.root)
    (image / "more").write_bytes(noise(30 << 20))
    cancel = threading.Event()

    with pytest.raises(CkptError) as caught, store.begin(KERNEL) as writer:
        writer.add_tree(image, progress=lambda done, total: cancel.set(), cancel=cancel)
    assert caught.value.reason == "cancelled"
    assert [s.id for s in store.states()] == [kept.id]
    assert pack_files(store.root) == before
    assert list(store.root.glob("*/writers/*")) == []


def test_cancel_while_reading_back(store: StateStore, save: Save, tmp_path: Path) -> None:
    source = tmp_path / "image"
    source.mkdir()
    (source / "pages-1.img").write_bytes(noise(30 << 20))
    record = save(source)
    cancel = threading.Event()
    with pytest.raises(CkptError) as caught:
        extract(
            store,
            record.id,
            tmp_path / "back",
            progress=lambda done, total: cancel.set(),
            cancel=cancel,
        )
    assert caught.value.reason == "cancelled"
    assert not (tmp_path / "back").exists()
    extract(store, record.id, tmp_path / "back")


def test_a_failing_progress_callback_ends_the_save(store: StateStore, image: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("listener broke")

    with pytest.raises(RuntimeError, match="listener broke"), store.begin(KERNEL) as writer:
        writer.add_tree(image, progress=fail)
    assert pack_files(store.root) == set()


def test_abort_leaves_what_others_use(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    """What another writer stores is its own, whoever else stores the same."""
    first = store.begin(KERNEL)
    first.add_tree(image)
    second = store.begin(KERNEL)
    second.add_tree(image)
    (image / "alone").write_bytes(noise(1 << 20, seed=5))
    third = store.begin(KERNEL)
    third.add_tree(image)
    first.abort()
    third.abort()
    record = second.commit(make_meta())
    (image / "alone").unlink()
    extract(store, record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(image)
    assert collect_all(store).packs == 0


def test_abort_twice_and_after_commit(store: StateStore, image: Path, tmp_path: Path) -> None:
    writer = store.begin(KERNEL)
    writer.add_tree(image)
    writer.abort()
    writer.abort()
    with pytest.raises(RuntimeError):
        writer.commit(make_meta())
    writer = store.begin(KERNEL)
    writer.add_tree(image)
    record = writer.commit(make_meta())
    writer.abort()
    extract(store, record.id, tmp_path / "back")
    assert os.listdir(tmp_path / "back")
