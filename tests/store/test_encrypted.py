"""Whole stores with keys: what a thief or a forger can do, and what the owner always can."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.liveness import Liveness
from jupyter_gpu_ckpt.recovery import Leases
from jupyter_gpu_ckpt.store import KernelRecord, Lease, SaveFailure, StateRecord, StateStore
from jupyter_gpu_ckpt.store.failures import UNTOLD
from jupyter_gpu_ckpt.store.keys import KeyFile, KeyRing, new_key_file
from jupyter_gpu_ckpt.tracking import Tracker
from jupyter_gpu_ckpt.troubles import Troubles

from .conftest import KERNEL, collect_all, extract, make_meta, noise, pack_files, snapshot

SECRET = b"the password is hunter2 "

Open = Callable[..., StateStore]


@pytest.fixture
def keys(tmp_path: Path) -> list[KeyFile]:
    for name in ("key-0", "key-1"):
        new_key_file(tmp_path / name)
    return [KeyFile(tmp_path / "key-0"), KeyFile(tmp_path / "key-1")]


@pytest.fixture
def sealed(root: Path, keys: list[KeyFile]) -> StateStore:
    return StateStore(root, "ada", sealing=KeyRing(keys[0]))


def save(store: StateStore, image: Path, kernel_id: str = KERNEL) -> StateRecord:
    with store.begin(kernel_id) as writer:
        writer.add_tree(image)
        return writer.commit(make_meta(kernel_id))


def comes_back(store: StateStore, state: StateRecord, image: Path, tmp_path: Path) -> bool:
    dest = tmp_path / f"back-{os.urandom(4).hex()}"
    extract(store, state.id, dest)
    return snapshot(dest) == snapshot(image)


def reason(call: Callable[[], object]) -> str:
    with pytest.raises(CkptError) as caught:
        call()
    assert caught.value.hint
    return caught.value.reason


def manifest(root: Path, state: StateRecord) -> Path:
    return root / "ada" / "kernels" / state.meta.kernel_id / "states" / f"{state.id}.json"


def new_private(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def everything(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


def test_nothing_can_be_read_from_a_stolen_store(
    root: Path, sealed: StateStore, store: StateStore, image: Path, tmp_path: Path
) -> None:
    (image / "secret").write_bytes(SECRET * 3)
    state = save(sealed, image)
    sealed.mark(state.id, label="hunter3", pinned=True)
    assert state.key_id and sealed.state(state.id).meta.label == "hunter3"
    assert comes_back(sealed, state, image, tmp_path)
    stolen = everything(root)
    for word in (b"hunter", b"before the long run", b"a.ipynb", b"shell_port", b"node-a"):
        assert word not in stolen
    # The same without a key, to see that the test would see it.
    other = StateStore(root.with_name("plain"), "ada")
    save(other, image)
    assert b"a.ipynb" in everything(other.root) and b"hunter2" in everything(other.root)
    # The thief has the store and this program.
    assert store.states() == []
    ((state_id, _, why, _),) = store.damaged()
    assert state_id == state.id and "encrypted" in why
    for call in (
        lambda: store.state(state.id),
        lambda: store.open(state.id),
        lambda: extract(store, state.id, tmp_path / "x"),
        lambda: store.verify(state.id),
    ):
        assert reason(call) == "key_missing"
    assert not (tmp_path / "x").exists()


def test_equal_kernels_do_not_look_equal(
    root: Path, sealed: StateStore, keys: list[KeyFile], image: Path
) -> None:
    save(sealed, image)
    save(sealed, image, "another-kernel")
    eve = StateStore(root, "eve", sealing=KeyRing(keys[0]))
    save(eve, image)
    pages = [
        pack[at : at + 4096]
        for pack in (path.read_bytes() for path in pack_files(root))
        for at in range(0, len(pack) - 4096, 64)
    ]
    assert len(pages) > 1000
    assert len(pages) == len(set(pages))


def test_only_what_changed_is_stored_also_with_a_key(
    sealed: StateStore, image: Path, tmp_path: Path
) -> None:
    first = save(sealed, image)
    with open(image / "pages-1.img", "r+b") as file:
        file.write(b"changed")
    second = save(sealed, image)
    assert second.parent == first.id
    assert second.stored_size < first.stored_size / 50
    sealed.delete(first.id)
    collect_all(sealed)
    assert comes_back(sealed, second, image, tmp_path)
    assert sealed.verify(second.id).lost == []


def test_rotation(
    root: Path, sealed: StateStore, keys: list[KeyFile], image: Path, tmp_path: Path
) -> None:
    old = save(sealed, image)
    store = StateStore(root, "ada", sealing=KeyRing(keys[1], [keys[0]]))
    new = save(store, image)
    assert (new.parent, new.key_id == old.key_id) == (None, False)
    newer = save(store, image)
    assert newer.parent == new.id
    for state in (old, new, newer):
        assert comes_back(store, state, image, tmp_path)
    # Without the old key what is new goes on, and what is old is told.
    store = StateStore(root, "ada", sealing=KeyRing(keys[1]))
    assert {state.id for state in store.states()} == {new.id, newer.id}
    ((state_id, _, why, _),) = store.damaged()
    assert state_id == old.id and str(old.key_id) in why
    assert reason(lambda: store.open(old.id)) == "wrong_key"
    store.gc(grace_seconds=0)
    collect_all(store)
    assert comes_back(sealed, old, image, tmp_path), "a collection took what it cannot read"


def test_back_to_no_encryption_takes_a_word(
    root: Path, sealed: StateStore, keys: list[KeyFile], image: Path, tmp_path: Path
) -> None:
    state = save(sealed, image)
    before = snapshot(root)
    forgotten = StateStore(root, "ada")
    assert reason(lambda: forgotten.begin(KERNEL)) == "key_missing"
    assert snapshot(root) == before, "nothing is touched"
    meant = StateStore(root, "ada", sealing=KeyRing(None, [keys[0]]))
    plain = save(meant, image)
    assert plain.key_id is None
    assert comes_back(meant, state, image, tmp_path)
    assert comes_back(meant, plain, image, tmp_path)


def test_a_key_that_cannot_be_had_stops_saves_before_they_begin(
    root: Path, sealed: StateStore, keys: list[KeyFile], image: Path
) -> None:
    save(sealed, image)
    keys[0].path.unlink()
    before = snapshot(root)
    store = StateStore(root, "ada", sealing=KeyRing(keys[0]))
    assert reason(lambda: store.begin(KERNEL)) == "key_missing"
    assert store.states() == []
    assert len(store.damaged()) == 1
    keys[0].path.write_text("no key")
    keys[0].path.chmod(0o600)
    store = StateStore(root, "ada", sealing=KeyRing(keys[0]))
    assert reason(lambda: store.begin(KERNEL)) == "wrong_key"
    assert snapshot(root) == before


def test_a_key_that_is_missing_for_now_makes_no_lost_kernel_forgotten(
    root: Path, sealed: StateStore, keys: list[KeyFile], image: Path
) -> None:
    save(sealed, image)
    lease = Lease(node_id="gone", hostname="h", boot_id="b", server_pid=1, server_start=0.0,
                  renewed=0.0, ttl=0.0)  # fmt: skip
    for kernel_id in (KERNEL, "stateless"):
        sealed.put_kernel(
            KernelRecord(kernel_id=kernel_id, kernel_name="p", display_name="P", lease=lease)
        )
    for path in root.glob("ada/kernels/*/kernel.json"):
        os.utime(path, (0, 0))
    text = keys[0].path.read_text()
    keys[0].path.unlink()

    nobody = Tracker(*[lambda *_: None] * 7)  # type: ignore[arg-type]

    def leases() -> Leases:
        async def paths() -> dict[str, str]:
            return {}

        store = StateStore(root, "ada", sealing=KeyRing(keys[0]))
        return Leases(
            store,
            nobody,
            paths,
            ttl=1.0,
            interval=1.0,
            on_fenced=lambda kernel, host: None,
            troubles=Troubles(logging.getLogger()),
        )

    leases().forget_stateless(sealed.kernels())
    assert [record.kernel_id for record in sealed.kernels()] == [KERNEL]
    new_private(keys[0].path, text)
    assert [lost.record.kernel_id for lost in leases().lost()] == [KERNEL]


def test_the_small_files_of_kernels_tell_a_thief_nothing_of_their_work(
    root: Path, sealed: StateStore, keys: list[KeyFile], image: Path
) -> None:
    names = {"mine": "merger/secret.ipynb", "other": "merger/andere-\u00e4.ipynb"}
    for kernel_id, path in names.items():
        sealed.put_kernel(
            KernelRecord(kernel_id=kernel_id, kernel_name="p", display_name="P", path=path)
        )
    now = datetime.now(timezone.utc).isoformat()
    sealed.note_failure(
        SaveFailure(kernel_id="mine", at=now, since=now, cause="user", reason="no_space",
                    message="The file merger/data.csv is too large.",
                    hint="Delete merger/data.csv.", path=names["mine"])
    )  # fmt: skip
    save(sealed, image)

    def paths(store: StateStore) -> tuple[dict[str, str | None], list[tuple[str | None, ...]]]:
        found = {record.kernel_id: record.path for record in store.kernels()}
        (failure,) = store.failures()
        assert (failure.reason, failure.cause, failure.at) == ("no_space", "user", now)
        return found, [(failure.message, failure.hint, failure.path)]

    assert b"merger" not in everything(root)
    known = names, [("The file merger/data.csv is too large.", "Delete merger/data.csv.",
                     names["mine"])]  # fmt: skip
    nothing = dict.fromkeys(names), [(UNTOLD, None, None)]
    assert paths(sealed) == known
    rotated = KeyRing(keys[1], [keys[0]])
    assert paths(StateStore(root, "ada", sealing=rotated)) == known
    # Who has no key, or another one, knows of the kernels all the same.
    for ring in (None, KeyRing(keys[1])):
        assert paths(StateStore(root, "ada", sealing=ring)) == nothing
    # A server whose key is away keeps its lease, and does not tell the path either.
    text = keys[0].path.read_text()
    keys[0].path.unlink()
    for ring in (None, KeyRing(keys[0])):
        unable = StateStore(root, "ada", sealing=ring)
        unable.put_kernel(
            KernelRecord(kernel_id="late", kernel_name="p", display_name="P", path="merger/c")
        )
        unable.note_failure(
            SaveFailure(kernel_id="mine", at=now, since=now, cause="user", reason="no_space",
                        message="The file merger/d is too large.", path="merger/c")
        )  # fmt: skip
        assert b"merger" not in everything(root)
        assert paths(unable)[1] == nothing[1]
    new_private(keys[0].path, text)
    # A forger can take such a text away, not make one up, nor take another's.
    failure = root / "ada" / "kernels" / "mine" / "failure.json"
    for changes in (
        {"sealed": None, "message": "Run this.", "hint": "forged", "path": "forged.ipynb"},
        {"sealed": json.loads((failure.parent / "kernel.json").read_bytes())["sealed"]},
    ):
        failure.write_text(json.dumps({**json.loads(failure.read_bytes()), **changes}))
        assert paths(sealed)[1] == nothing[1]
    files = {name: root / "ada" / "kernels" / name / "kernel.json" for name in names}
    record, other = (json.loads(files[name].read_bytes()) for name in names)
    for changes in (
        {"sealed": None, "path": "forged.ipynb"},
        {"sealed": other["sealed"]},
        {"sealed": {**record["sealed"], "text": "AAAA"}},
        {"sealed": {**record["sealed"], "text": "\u00e4"}},
    ):
        files["mine"].write_text(json.dumps({**record, **changes}))
        assert paths(sealed)[0] == {**names, "mine": None, "late": None}


ALTERED: list[dict[str, object]] = [
    {"lease": None, "offer": "shutdown"},
    {"lease": None, "offer": "no such thing"},
    {"lease": None, "offer": "cull", "hibernated": True},
    {"kernel_name": "another", "display_name": "Another", "server": "another"},
    {"path": "forged.ipynb"},
    {"path": "forged.ipynb", "sealed": None},
    {"autosave": {"mode": "never", "nonsense": [1]}},
    {"unknown": {"to": "this version"}},
    *({"lease": change} for change in (
        {"ttl": -1e308}, {"ttl": 1e308}, {"renewed": 1e308}, {"renewed": -1}, {"server_pid": -1},
        {"server_pid": 2**62}, {"boot_id": ""}, {"machine_id": "x" * 9999}, {"hostname": "\x1b["},
    )),
]  # fmt: skip


@pytest.mark.parametrize("changes", ALTERED, ids=repr)
def test_an_altered_record_of_a_kernel_leads_to_no_wrong_restore(
    root: Path, sealed: StateStore, image: Path, changes: dict[str, object]
) -> None:
    """Whatever is not sealed: it decides if the kernel is offered, not what is restored."""
    state, other = save(sealed, image), save(sealed, image, "other")
    lease = Lease(node_id="gone", hostname="h", boot_id="b", server_pid=1, server_start=0.0,
                  renewed=0.0, ttl=0.0)  # fmt: skip
    for kernel_id in (KERNEL, "other"):
        sealed.put_kernel(
            KernelRecord(kernel_id=kernel_id, kernel_name="p", display_name="P", lease=lease,
                         path=f"{kernel_id}.ipynb")
        )  # fmt: skip
    path = root / "ada" / "kernels" / KERNEL / "kernel.json"
    record = json.loads(path.read_bytes())
    if isinstance(changed := changes.get("lease"), dict):
        changes = {"lease": {**record["lease"], **changed}}
    path.write_text(json.dumps({**record, **changes}))
    for file in root.glob("ada/kernels/*/kernel.json"):
        os.utime(file, (0, 0))
    liveness = Liveness(sealed, ttl=1.0, interval=1.0)
    lost = {one.kernel_id: one for one in sealed.kernels() if liveness.is_lost(one)}
    best = {kernel_id: sealed.best(kernel_id) for kernel_id in lost}
    assert best.pop("other") == (sealed.state(other.id), {})
    if KERNEL in lost:
        assert best[KERNEL] == (sealed.state(state.id), {})
        assert lost[KERNEL].path in (f"{KERNEL}.ipynb", None)
    else:
        assert "lease" in changes, "nothing says that somebody runs it"


# -- a forger, who can write to the store and has read its store.json ------------------------------


def test_states_from_before_the_key_stay_and_forged_ones_do_not_pass(
    root: Path, store: StateStore, sealed: StateStore, image: Path, tmp_path: Path
) -> None:
    old = save(store, image)
    new = save(sealed, image)
    assert new.parent is None, "nothing of what is not encrypted is counted on"
    assert {state.id for state in sealed.states()} == {old.id, new.id}
    assert sealed.state(old.id).key_id is None, "and one can see that it is not"
    assert comes_back(sealed, old, image, tmp_path)
    # The forger uses this program with the store's own key.
    (image / "evil").write_bytes(b"rm -rf")
    shutil.rmtree(root / "ada" / "keys")
    forged = save(store, image)
    assert reason(lambda: sealed.open(forged.id)) == "not_restorable"
    assert forged.id not in {state.id for state in sealed.states()}
    # Nor once the record of what was there is made anew.
    save(sealed, image)
    assert forged.id not in {state.id for state in sealed.states()}
    assert reason(lambda: sealed.open(forged.id)) == "not_restorable"


def test_a_state_saved_without_the_key_later_does_not_pass(
    root: Path, store: StateStore, sealed: StateStore, image: Path
) -> None:
    old = save(store, image)
    save(sealed, image)
    record = root / "ada" / "keys"
    record.rename(root / "keys")
    late = save(store, image)
    (root / "keys").rename(record)
    assert late.id not in {state.id for state in sealed.states()}
    assert reason(lambda: sealed.open(late.id)) == "not_restorable"
    assert old.id in {state.id for state in sealed.states()}


def test_an_altered_state_from_before_the_key_does_not_pass(
    root: Path, store: StateStore, sealed: StateStore, image: Path
) -> None:
    old = save(store, image)
    save(sealed, image)
    path = manifest(root, old)
    path.write_bytes(path.read_bytes().rstrip())
    assert reason(lambda: sealed.open(old.id)) == "not_restorable"


def test_states_from_before_the_key_can_be_ruled_out(
    root: Path, store: StateStore, keys: list[KeyFile], image: Path
) -> None:
    old = save(store, image)
    strict = StateStore(root, "ada", sealing=KeyRing(keys[0], read_unsealed=False))
    new = save(strict, image)
    assert [state.id for state in strict.states()] == [new.id]
    assert reason(lambda: strict.open(old.id)) == "not_restorable"


def test_what_was_known_stays_known_through_a_rotation(
    root: Path, store: StateStore, sealed: StateStore, keys: list[KeyFile], image: Path
) -> None:
    old = save(store, image)
    save(sealed, image)
    (root / "ada" / "keys").rename(root / "keys")
    late = save(store, image)
    (root / "keys").rename(root / "ada" / "keys")
    rotated = StateStore(root, "ada", sealing=KeyRing(keys[1], [keys[0]]))
    save(rotated, image)
    known = {state.id for state in rotated.states()}
    assert old.id in known and late.id not in known


@pytest.mark.parametrize("what", ["packs", "key", "sealed", "kernel", "state", "swap"])
def test_a_manifest_that_was_altered_or_moved_does_not_restore(
    root: Path, sealed: StateStore, image: Path, tmp_path: Path, what: str
) -> None:
    state = save(sealed, image)
    (image / "more").write_bytes(noise(1 << 16))
    other = save(sealed, image, "another-kernel")
    path = manifest(root, state)
    envelope = json.loads(path.read_bytes())
    target = state.id
    if what == "packs":
        envelope["packs"] = {pack: size + 1 for pack, size in envelope["packs"].items()}
    elif what == "key":
        envelope["key"] = "0" * 16
    elif what == "sealed":
        envelope["sealed"] = envelope["sealed"][:400].swapcase() + envelope["sealed"][400:]
    path.write_text(json.dumps(envelope, separators=(",", ":")))
    if what == "kernel":
        path.rename(manifest(root, other).with_name(path.name))
    elif what == "state":
        target = f"{state.id[:-8]}00000000"
        path.rename(path.with_name(f"{target}.json"))
    elif what == "swap":
        path.write_bytes(manifest(root, other).read_bytes())
    assert reason(lambda: sealed.open(target)) in ("state_damaged", "wrong_key")
    assert target not in {state.id for state in sealed.states()}
    assert comes_back(sealed, other, image, tmp_path)


def test_swapped_packs_do_not_restore(root: Path, sealed: StateStore, image: Path) -> None:
    state = save(sealed, image)
    save(sealed, image, "another-kernel")
    first, second = sorted(pack_files(root))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert reason(lambda: sealed.open(state.id)) == "state_damaged"


def test_marks_that_cannot_be_read_count_as_a_pin(
    root: Path, store: StateStore, sealed: StateStore, image: Path
) -> None:
    state = save(sealed, image)
    marks = manifest(root, state).with_suffix(".marks.json")
    marks.write_text("garbage")
    assert sealed.state(state.id).pinned
    sealed.mark(state.id, pinned=False)
    assert not sealed.state(state.id).pinned
    plain = save(StateStore(root.with_name("plain"), "ada"), image)
    assert not plain.pinned


def test_marks_that_are_not_sealed_are_not_believed(
    root: Path, sealed: StateStore, image: Path
) -> None:
    state = save(sealed, image)
    sealed.mark(state.id, pinned=True, label="keep this")
    marks = manifest(root, state).with_suffix(".marks.json")
    # Somebody who has no key has the state unpinned, or declared damaged.
    for body in ({}, {"pinned": False, "label": "not this"}, {"damage": "all of it"}):
        plain = json.dumps({"blake3": "00" * 32, "body": body}, separators=(",", ":"))
        marks.write_text(plain)
        found = sealed.state(state.id)
        assert (found.pinned, found.damage) == (True, None)
        assert found.meta.label == state.meta.label


def test_without_the_key_garbage_is_collected_and_nothing_else(
    root: Path, sealed: StateStore, store: StateStore, image: Path, tmp_path: Path
) -> None:
    first = save(sealed, image)
    (image / "more").write_bytes(noise(1 << 20))
    second = save(sealed, image)
    gone = save(sealed, image, "another-kernel")
    store.delete(gone.id)
    assert collect_all(store).packs == 1
    assert comes_back(sealed, second, image, tmp_path)
    (image / "more").unlink()
    assert comes_back(sealed, first, image, tmp_path)
