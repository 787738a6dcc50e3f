"""Altered, truncated and missing files: one clear error, and nothing else is touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import KernelRecord, StateStore

from .conftest import KERNEL, Save, chunk_files, collect_all, noise, snapshot

Damage = Callable[[Path], object]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path, to: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:to])


DAMAGES: list[Damage] = [
    lambda path: flip(path, 5),
    lambda path: flip(path, path.stat().st_size // 2),
    lambda path: flip(path, path.stat().st_size - 3),
    lambda path: cut(path, 0),
    lambda path: cut(path, 7),
    lambda path: cut(path, path.stat().st_size // 2),
    lambda path: cut(path, path.stat().st_size - 2),
    lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
]


def manifest_of(store: StateStore, state_id: str) -> Path:
    (path,) = store.root.glob(f"*/kernels/*/states/{state_id}.json")
    return path


@pytest.mark.parametrize("damage", DAMAGES)
def test_manifest(
    store: StateStore, save: Save, image: Path, tmp_path: Path, damage: Damage
) -> None:
    older, bad = save(image), save(image)
    damage(manifest_of(store, bad.id))
    assert [s.id for s in store.states()] == [older.id]
    ((listed, why),) = store.damaged()
    assert listed == bad.id
    assert "manifest" in why
    for call in (lambda: store.state(bad.id), lambda: store.materialise(bad.id, tmp_path / "b")):
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.reason == "state_damaged"
        assert bad.id in caught.value.message
    assert not (tmp_path / "b").exists()
    collect_all(store)
    store.materialise(older.id, tmp_path / "older")
    assert snapshot(tmp_path / "older") == snapshot(image)
    store.delete(bad.id)
    assert store.damaged() == []


def test_manifest_of_another_state(store: StateStore, save: Save, image: Path) -> None:
    first, second = save(image), save(image, "other")
    shutil.copyfile(manifest_of(store, first.id), manifest_of(store, second.id))
    assert [s.id for s in store.states()] == [first.id]
    with pytest.raises(CkptError, match="another state") as caught:
        store.state(second.id)
    assert caught.value.reason == "state_damaged"


def test_manifest_made_up_without_the_key(store: StateStore, save: Save, image: Path) -> None:
    record = save(image)
    path = manifest_of(store, record.id)
    body = json.loads(path.read_text())["body"]
    body["meta"]["argv"] = ["evil"]
    raw = json.dumps(body).encode()
    forged = b'{"blake3":"%s","body":%s}' % (blake3(raw).hexdigest().encode(), raw)
    path.write_bytes(forged)
    with pytest.raises(CkptError, match="checksum") as caught:
        store.state(record.id)
    assert caught.value.reason == "state_damaged"


@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
@pytest.mark.parametrize("which", ["raw", "compressed", "index"])
def test_block(store: StateStore, save: Save, tmp_path: Path, damage: Damage, which: str) -> None:
    source = tmp_path / "image"
    source.mkdir()
    (source / "pages-1.img").write_bytes(noise(1 << 20) if which == "raw" else b"text\n" * 300_000)
    if which != "index":
        # A second file whose blocks stay intact.
        (source / "pages-2.img").write_bytes(noise(1 << 19, seed=2))
    record = save(source)
    index = json.loads(manifest_of(store, record.id).read_text())["body"]["index"]
    files = {path for path in chunk_files(store.root) if path.name != index}
    if which == "index":
        (victim,) = (path for path in chunk_files(store.root) if path.name == index)
        named = "list of blocks"
    else:
        sizes = {path: path.stat().st_size for path in files}
        victim = (
            max(files, key=sizes.__getitem__)
            if which == "raw"
            else min(files, key=sizes.__getitem__)
        )
        named = "pages-1.img"
    damage(victim)
    with pytest.raises(CkptError, match=named) as caught:
        store.materialise(record.id, tmp_path / "back")
    assert caught.value.reason == "state_damaged"
    assert caught.value.hint
    assert not (tmp_path / "back").exists()


def test_a_block_lost_with_the_machine_is_written_again(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    """A power cut can leave a named file empty; the next save must not count on it."""
    save(image)
    for file in chunk_files(store.root):
        file.write_bytes(b"")
    record = save(image)
    store.materialise(record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(image)


def test_state_of_a_newer_format(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    from jupyter_gpu_ckpt.store.manifest import decode_manifest, encode_manifest
    from jupyter_gpu_ckpt.store.owner import open_owner

    old, new = save(image), save(image)
    owner = open_owner(store.root, "ada", create=False)
    assert owner is not None
    path = manifest_of(store, new.id)
    body = decode_manifest(path.read_bytes(), owner.manifest_key)
    body.format = 99
    path.write_bytes(encode_manifest(body, owner.manifest_key))
    assert [s.id for s in store.states()] == [old.id]
    with pytest.raises(CkptError, match="newer version") as caught:
        store.state(new.id)
    assert caught.value.reason == "not_restorable"
    assert caught.value.hint == "Upgrade jupyter-gpu-ckpt to restore it."
    # What it needs cannot be known, so nothing at all is removed.
    store.delete(old.id)
    files = chunk_files(store.root)
    with pytest.raises(CkptError, match="nothing was removed"):
        collect_all(store)
    assert chunk_files(store.root) == files


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.write_text('{"format": 2, "anything": "else"}'), "format 2"),
        (lambda path: path.write_text("{"), "damaged"),
        (lambda path: flip(path, path.read_bytes().index(b'"key"') + 12), "damaged"),
        (lambda path: path.unlink(), "lost its store.json"),
    ],
)
def test_store_file(store: StateStore, save: Save, image: Path, change: Damage, says: str) -> None:
    save(image)
    path = store.root / "ada" / "store.json"
    good = path.read_bytes()
    files = chunk_files(store.root)
    change(path)
    for call in (
        store.states,
        store.usage,
        lambda: store.begin(KERNEL),
        lambda: collect_all(store),
    ):
        with pytest.raises(CkptError, match=says) as caught:
            call()
        assert caught.value.reason == "store_unavailable"
        assert caught.value.hint
    assert chunk_files(store.root) == files
    path.write_bytes(good)
    assert len(store.states()) == 1


def test_kernel_record(store: StateStore) -> None:
    good = KernelRecord(kernel_id="good", kernel_name="p", display_name="P")
    bad = KernelRecord(kernel_id="bad", kernel_name="p", display_name="P")
    store.put_kernel(good)
    store.put_kernel(bad)
    (path,) = store.root.glob("*/kernels/bad/kernel.json")
    cut(path, 20)
    assert store.kernels() == [good]
    with pytest.raises(CkptError) as caught:
        store.kernel("bad")
    assert caught.value.reason == "state_damaged"
    store.put_kernel(bad)
    assert store.kernels() == [bad, good]


def test_image_with_something_else_than_files(store: StateStore, image: Path) -> None:
    (image / "link").symlink_to("/etc/passwd")
    wrong = pytest.raises(CkptError, match="neither a file nor a folder")
    with wrong, store.begin(KERNEL) as writer:
        writer.add_tree(image)
    assert chunk_files(store.root) == set()
