"""Altered, truncated and missing files: one clear error, and nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import KernelRecord, Lease, StateStore
from jupyter_gpu_ckpt.store.damage import Damaged
from jupyter_gpu_ckpt.store.index import decode_index, encode_index
from jupyter_gpu_ckpt.store.manifest import decode_manifest, encode_manifest
from jupyter_gpu_ckpt.store.owner import open_owner
from jupyter_gpu_ckpt.store.packs import LocalPacks, read_footer
from jupyter_gpu_ckpt.store.retention import Policy
from jupyter_gpu_ckpt.store.seal import NullSealing

from .conftest import KERNEL, Save, collect_all, extract, make_meta, noise, pack_files, snapshot

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


def a_lease() -> Lease:
    return Lease(
        node_id="n", hostname="h", boot_id="b", server_pid=1, server_start=1.0, renewed=1.0, ttl=0.0
    )


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
    ((listed, _, why, _),) = store.damaged()
    assert listed == bad.id
    assert "manifest" in why
    for call in (lambda: store.state(bad.id), lambda: extract(store, bad.id, tmp_path / "b")):
        with pytest.raises(CkptError) as caught:
            call()
        assert caught.value.reason == "state_damaged"
        assert bad.id in caught.value.message
    assert not (tmp_path / "b").exists()
    collect_all(store)
    extract(store, older.id, tmp_path / "older")
    assert snapshot(tmp_path / "older") == snapshot(image)
    store.delete(bad.id)
    assert store.damaged() == []


def test_manifest_of_another_state(store: StateStore, save: Save, image: Path) -> None:
    first, second = save(image), save(image, "other")
    shutil.copyfile(manifest_of(store, first.id), manifest_of(store, second.id))
    assert [s.id for s in store.states()] == [first.id]
    with pytest.raises(CkptError, match="checksum") as caught:
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


def place_of(store: StateStore, state_id: str, which: str) -> tuple[Path, int, int]:
    """Which bytes of which pack hold the index, the footer, or what a file begins with."""
    with store.open(state_id) as reader:
        index = reader.index
        (pack,) = {entry.id for entry in index.packs}
        (path,) = (p for p in pack_files(store.root) if p.stem == pack)
        end = sum(index.blobs.length)
        if which == "index":
            (body,) = [
                json.loads(manifest_of(store, state_id).read_text())["body"]["index"],
            ]
            return path, body["offset"], body["offset"] + body["length"]
        if which == "footer":
            return path, end + reader_index_length(store, state_id), path.stat().st_size
        file = next(f for f in index.files if f.path == os.fsencode(which))
        run = next(iter(index.runs_of(file)))
        at = index.blobs.offset[run.blob]
        return path, at, at + index.blobs.length[run.blob]


def reader_index_length(store: StateStore, state_id: str) -> int:
    body = json.loads(manifest_of(store, state_id).read_text())["body"]
    return int(body["index"]["length"])


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    """A file stored raw and one compressed, of a blob each."""
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "noise.img").write_bytes(noise(1 << 20))
    (folder / "text.img").write_bytes(b"text\n" * 209_715)
    return folder


@pytest.mark.parametrize("which", ["noise.img", "text.img", "index"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_altered_bytes(
    store: StateStore, save: Save, two_files: Path, tmp_path: Path, which: str, where: str
) -> None:
    record = save(two_files)
    path, begin, end = place_of(store, record.id, which)
    flip(path, {"first": begin, "middle": (begin + end) // 2, "last": end - 9}[where])
    named = "list of blocks" if which == "index" else which
    with pytest.raises(CkptError, match=named) as caught:
        extract(store, record.id, tmp_path / "back")
    assert caught.value.reason == "state_damaged"
    assert caught.value.hint
    assert not (tmp_path / "back").exists()
    if which == "index":
        with pytest.raises(CkptError, match=named):
            store.verify(record.id)
        return
    result = store.verify(record.id)
    (lost,) = result.lost
    assert (lost.path, lost.offset, lost.length) == (
        os.fsencode(which),
        0,
        (two_files / which).stat().st_size,
    )
    assert path.stem in lost.why
    assert result.blobs == 2
    assert result.footers == []


@pytest.mark.parametrize("to", [0, 7, 0.3, 0.9])
def test_a_pack_that_is_cut_off_or_missing(
    store: StateStore, save: Save, tmp_path: Path, to: float
) -> None:
    """Incremental, so that the index is elsewhere and all that is lost can be told."""
    source = tmp_path / "image"
    source.mkdir()
    (source / "pages-1.img").write_bytes(noise(3 << 20))
    save(source)
    (victim,) = pack_files(store.root)
    with open(source / "pages-1.img", "r+b") as file:
        file.seek(4096)
        file.write(b"changed")
    record = save(source)
    size = victim.stat().st_size
    if to:
        cut(victim, int(to if to > 1 else to * size))
    else:
        victim.unlink()
    with pytest.raises(CkptError, match=r"pages-1\.img at byte .*(missing|cut off)"):
        extract(store, record.id, tmp_path / "back")
    result = store.verify(record.id)
    assert victim.stem in result.footers
    assert all(victim.stem in lost.why for lost in result.lost)
    gone = sum(lost.length for lost in result.lost)
    # The second save stored a page of the first block. Which of the blocks, which are stored in
    # parallel, lies at the end of the pack is left to chance.
    if to == 0.9:
        assert gone in (1 << 20, (1 << 20) - 4096)
    else:
        assert gone == (3 << 20) - 4096


def test_a_damaged_footer_loses_nothing(
    store: StateStore, save: Save, two_files: Path, tmp_path: Path
) -> None:
    first = save(two_files)
    path, begin, end = place_of(store, first.id, "footer")
    for at in (begin, end - 40, end - 1):
        flip(path, at)
        result = store.verify(first.id)
        assert (result.lost, result.footers) == ([], [path.stem])
        # What cannot be compared is stored anew.
        again = StateStore(store.root, "ada")
        with again.begin(KERNEL, parent=first.id) as writer:
            writer.add_tree(two_files)
            second = writer.commit(make_meta())
        assert second.stored_size > 1 << 20
        flip(path, at)
        extract(again, second.id, tmp_path / str(at))
        assert snapshot(tmp_path / str(at)) == snapshot(two_files)


def test_a_pack_lost_with_the_machine_is_not_counted_on(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    """A broken disk can leave a file empty; the next save stores all of it again."""
    save(image)
    for file in pack_files(store.root):
        file.write_bytes(b"")
    record = save(image)
    extract(store, record.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(image)


def test_what_a_check_found_damaged_is_stored_again(
    store: StateStore, save: Save, two_files: Path, tmp_path: Path
) -> None:
    record = save(two_files)
    path, begin, _ = place_of(store, record.id, "noise.img")
    flip(path, begin + 5)
    assert store.verify(record.id).lost
    again = save(two_files)
    assert store.verify(again.id).lost == []
    extract(store, again.id, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(two_files)


def test_what_another_server_found_damaged_is_stored_again(
    store: StateStore, save: Save, two_files: Path, tmp_path: Path
) -> None:
    record = save(two_files)
    path, begin, _ = place_of(store, record.id, "noise.img")
    flip(path, begin + 5)
    newest = save(two_files)  # shares it; nobody has looked at this one
    store.mark(record.id, damage="1.0 MB of it cannot be read back.")
    another = StateStore(store.root, "ada")
    with another.begin(KERNEL, parent=newest.id) as writer:
        writer.add_tree(two_files)
        again = writer.commit(make_meta())
    assert another.verify(again.id).lost == []
    with another.begin(KERNEL) as writer:
        writer.add_tree(two_files)
        assert writer.commit(make_meta()).stored_size < again.stored_size // 4, "shared again"


@pytest.mark.parametrize("pack", ["../../../../etc/x", "/etc/x", "", "x\0y"])
def test_no_pack_has_a_name_that_leads_out_of_the_store(
    store: StateStore, save: Save, image: Path, pack: str
) -> None:
    record = save(image)
    with store.open(record.id) as reader:
        reader.index.packs[0].id = pack
        with pytest.raises(Damaged, match="impossible name"):
            decode_index(encode_index(reader.index))
    owner = open_owner(store.root, "ada", create=False)
    assert owner is not None
    path = manifest_of(store, record.id)
    body = decode_manifest(path.read_bytes(), owner.sealing, KERNEL, record.id)
    body.packs[pack] = 1
    path.write_bytes(encode_manifest(body, owner.sealing))
    with pytest.raises(CkptError, match="impossible packs"):
        store.state(record.id)


def test_a_block_cannot_fill_the_memory(store: StateStore, save: Save, image: Path) -> None:
    with store.open(save(image).id) as reader:
        reader.index.blobs.length[0] = 1 << 31
        with pytest.raises(Damaged, match="unreadable"):
            decode_index(encode_index(reader.index))


@pytest.mark.parametrize(
    "place",
    [
        {"size": 4 << 30},
        {"length": 4 << 30},
        {"size": 4 << 30, "length": 4 << 30},
        {"size": -1},
        {"length": -1},
        {"offset": 1 << 63},
        {"offset": -1},
        {"number": -1},
        {"codec": 77},
        {"size": 0},
        {"length": 0},
    ],
    ids=str,
)
def test_no_place_of_an_index_fills_the_memory(
    store: StateStore, save: Save, image: Path, place: dict[str, int]
) -> None:
    state = save(image)
    owner = open_owner(store.root, "ada", create=False)
    assert owner is not None
    path = manifest_of(store, state.id)
    body = decode_manifest(path.read_bytes(), owner.sealing, KERNEL, state.id)
    for name, value in place.items():
        setattr(body.index, name, value)
    path.write_bytes(encode_manifest(body, owner.sealing))
    tracemalloc.start()
    try:
        with pytest.raises(CkptError, match="list of blocks") as caught:
            store.open(state.id)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.reason == "state_damaged"


@pytest.mark.parametrize("at", range(1, 17))
def test_a_byte_at_the_end_of_a_block_is_noticed_or_of_no_effect(
    store: StateStore, save: Save, two_files: Path, tmp_path: Path, at: int
) -> None:
    record = save(two_files)
    path, _, end = place_of(store, record.id, "text.img")
    flip(path, end - at)
    try:
        extract(store, record.id, tmp_path / "back")
    except CkptError as error:
        assert error.reason == "state_damaged"
    else:
        assert snapshot(tmp_path / "back") == snapshot(two_files)


def test_a_block_beyond_every_file_is_damage(store: StateStore, save: Save, image: Path) -> None:
    with store.open(save(image).id) as reader:
        reader.index.blobs.offset[0] = (1 << 64) - 1
        with pytest.raises(Damaged, match="unreadable"):
            decode_index(encode_index(reader.index))


def test_a_footer_cannot_fill_the_memory(tmp_path: Path) -> None:
    pack, key, sealing = "20261201T000000Z-00000000-0000", bytes(32), NullSealing(bytes(32))
    bomb = zstandard.ZstdCompressor().compress(bytes(48 << 20))
    trailer = struct.pack("<8sIIQ16s32s", b"JGC pack", 2, len(bomb), 100, bytes(16), b"")
    check = blake3(pack.encode() + bomb + trailer, key=key).digest()
    packs = LocalPacks(tmp_path)
    packs.path(pack).parent.mkdir()
    packs.path(pack).write_bytes(bomb + trailer + check)
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="wrong size"):
            read_footer(packs, pack, key, sealing)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
        packs.close()


def test_a_state_whose_gpu_memory_is_in_files_is_of_a_later_format(
    store: StateStore, image: Path
) -> None:
    """Versions that would restore it without that memory refuse it; all others they read."""
    formats = []
    for entries in (
        [{"pid": 7, "stored": True}],
        [{"pid": 7, "stored": False}],
        [{"pid": 7}],
        None,
    ):
        with store.begin(KERNEL) as writer:
            writer.add_tree(image)
            meta = make_meta()
            meta.gpu = None if entries is None else {"processes": entries}
            record = writer.commit(meta)
        formats.append(store.state(record.id).format)
        store.delete(record.id)
    assert formats == [3, 2, 2, 2]


def test_state_of_a_newer_format(
    store: StateStore, save: Save, image: Path, tmp_path: Path
) -> None:
    from jupyter_gpu_ckpt.store.manifest import decode_manifest, encode_manifest
    from jupyter_gpu_ckpt.store.owner import open_owner

    old, new = save(image), save(image)
    owner = open_owner(store.root, "ada", create=False)
    assert owner is not None
    path = manifest_of(store, new.id)
    body = decode_manifest(path.read_bytes(), owner.sealing, KERNEL, new.id)
    body.format = 99
    path.write_bytes(encode_manifest(body, owner.sealing))
    assert [s.id for s in store.states()] == [old.id]
    with pytest.raises(CkptError, match="newer version") as caught:
        store.state(new.id)
    assert caught.value.reason == "not_restorable"
    assert caught.value.hint == "Upgrade jupyter-gpu-ckpt to restore it."
    # What it needs cannot be known, so nothing at all is removed.
    store.delete(old.id)
    files = pack_files(store.root)
    with pytest.raises(CkptError, match="nothing was removed"):
        collect_all(store)
    assert pack_files(store.root) == files


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.write_text('{"format": 3, "anything": "else"}'), "format 3"),
        (lambda path: path.write_text('{"format": 1, "key": ""}'), "development version"),
        (lambda path: path.write_text("{"), "damaged"),
        (lambda path: flip(path, path.read_bytes().index(b'"key"') + 12), "damaged"),
        (lambda path: path.unlink(), "lost its store.json"),
    ],
)
def test_store_file(store: StateStore, save: Save, image: Path, change: Damage, says: str) -> None:
    save(image)
    path = store.root / "ada" / "store.json"
    good = path.read_bytes()
    files = pack_files(store.root)
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
    assert pack_files(store.root) == files
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


def a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def a_lease_of_another_version(path: Path) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"lease": {"node": "a", "until": "tomorrow"}}))


#: What may lie in a store beside one that is in order: how, and what it is harmed of.
AMONG_OTHERS: dict[str, Callable[[Path, str], object]] = {
    "record cut": lambda kernel, _: cut(kernel / "kernel.json", 20),
    "record empty": lambda kernel, _: cut(kernel / "kernel.json", 0),
    "record is a folder": lambda kernel, _: a_folder(kernel / "kernel.json"),
    "record is another's": lambda kernel, _: text(
        kernel / "kernel.json", '{"kernel_id": "x", "kernel_name": "p", "display_name": "P"}'
    ),
    "lease of another version": lambda kernel, _: a_lease_of_another_version(
        kernel / "kernel.json"
    ),
    "manifest cut": lambda kernel, state: cut(kernel / f"states/{state}.json", 99),
    "manifest of another version": lambda kernel, state: text(
        kernel / f"states/{state}.json", '{"version": 1, "chunks": ["ab"]}'
    ),
    "manifest is a folder": lambda kernel, state: a_folder(kernel / f"states/{state}.json"),
    "marks are a folder": lambda kernel, state: a_folder(kernel / f"states/{state}.marks.json"),
    "marks cut": lambda kernel, state: text(kernel / f"states/{state}.marks.json", "{"),
    "failure is a folder": lambda kernel, _: a_folder(kernel / "failure.json"),
    "failure cut": lambda kernel, _: text(kernel / "failure.json", "{"),
    "a state of a time that never was": lambda kernel, _: text(
        kernel / "states/20269931T996199Z-00000000.json", "{}"
    ),
    "a kernel that nobody can have": lambda kernel, _: text(
        kernel.parent / "an old one/kernel.json",
        '{"kernel_id": "an old one", "kernel_name": "p", "display_name": "P"}',
    ),
    "a file among kernels": lambda kernel, _: text(kernel.parent / "notes", "?"),
}


@pytest.mark.parametrize("harm", AMONG_OTHERS)
def test_one_thing_that_cannot_be_read_hides_no_other(
    store: StateStore, save: Save, image: Path, harm: str
) -> None:
    good = KernelRecord(kernel_id="good", kernel_name="p", display_name="P")
    bad = KernelRecord(kernel_id="bad", kernel_name="p", display_name="P", lease=a_lease())
    for record in (good, bad):
        store.put_kernel(record)
    state, other = save(image, "good").id, save(image, "bad").id
    (kernel,) = store.root.glob("*/kernels/bad")
    AMONG_OTHERS[harm](kernel, other)

    assert good in store.kernels()
    assert state in [one.id for one in store.states()]
    assert store.best("good") == (store.state(state), {})
    listing = store.listing()
    assert state in [one.id for one in listing.states]
    assert {one.state_id for one in listing.damaged} <= {other}
    assert store.failures() == []
    for record in (good, bad):
        assert store.has_states(record.kernel_id)
    assert state not in [one.state_id for one in store.retain(Policy(keep_last=1))]
    # Whatever cannot be read is named, with what to do.
    for error in store.unreadable_kernels():
        assert "bad" in error.message and error.hint
    assert len(store.unreadable_kernels()) == (harm.startswith(("record", "lease")))
    try:
        store.gc()
    except CkptError as error:
        assert other in error.message and "rm" in (error.hint or "")
    # It can be got rid of, and then garbage is collected.
    store.put_kernel(bad) if harm != "record is a folder" else None
    store.delete(other)
    collect_all(store)
    collect_all(store)
    assert store.damaged() == []
    with store.open(state) as reader:
        assert not reader.check().lost


def test_image_with_something_else_than_files(store: StateStore, image: Path) -> None:
    (image / "link").symlink_to("/etc/passwd")
    wrong = pytest.raises(CkptError, match="neither a file nor a folder")
    with wrong, store.begin(KERNEL) as writer:
        writer.add_tree(image)
    assert pack_files(store.root) == set()
