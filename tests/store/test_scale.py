"""Lists and collections read manifests only, however much the states hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from jupyter_gpu_ckpt.store import StateStore
from jupyter_gpu_ckpt.store.index import FileEntry, Index, PackEntry, decode_index, encode_index
from jupyter_gpu_ckpt.store.manifest import Body, IndexPlace, encode_manifest
from jupyter_gpu_ckpt.store.owner import open_owner
from jupyter_gpu_ckpt.store.packs import pack_id, pack_key

from .conftest import KERNEL, make_meta

STATES, BLOBS, A_PACK = 200, 10_000, 32


def shared_packs() -> list[str]:
    """The packs of a save that all states were built on."""
    return [pack_id("20261201T000000Z-00000000", n) for n in range(-(-BLOBS // A_PACK))]


def manifest(number: int) -> Body:
    """Of a state with many blocks, most of which it shares with the others."""
    state = f"20261202T000000Z-{number:08x}"
    own = pack_id(state, 0)
    shared = {pack: 32 << 20 for pack in shared_packs()}
    items = [{"kind": "anon", "name": f"[{n}]", "size": 1 << 20} for n in range(100)]
    contents = {
        "size": BLOBS << 20, "new": 1 << 20, "parent": None, "kinds": [], "items": items,
    }  # fmt: skip
    return Body(
        format=2, id=state, created="2026-12-02T00:00:00.000Z", size=BLOBS << 20,
        stored_size=1 << 20, parent=None, key_id=None, packs=shared | {own: 1 << 20},
        index=IndexPlace(
            pack=own, number=0, offset=0, length=1, codec=0, size=1, salt="", name="00" * 32
        ),
        meta=msgspec.structs.replace(make_meta(), contents=contents),
    )  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> StateStore:
    """A store of many large states; what is in the packs matters to nobody here."""
    store = StateStore(tmp_path_factory.mktemp("large") / "store", "ada")
    owner = open_owner(store.root, "ada", create=True)
    assert owner is not None
    owner.states_of(KERNEL).mkdir(parents=True)
    for number in range(STATES):
        body = manifest(number)
        owner.manifest(KERNEL, body.id).write_bytes(encode_manifest(body, owner.sealing))
        path = owner.packs / pack_key(body.index.pack)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return store


def seconds(call: Callable[[], object]) -> float:
    """CPU time of a call, the least of three: others on the same cores only ever add to it."""
    times = []
    for _ in range(3):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def test_states(large: StateStore) -> None:
    assert len(large.states()) == STATES
    assert seconds(large.states) < 0.5


def test_list_with_costs(large: StateStore) -> None:
    assert len(large.listing().states) == STATES
    assert seconds(large.listing) < 0.8


def test_contents(large: StateStore) -> None:
    state = large.states()[100].id
    assert large.state(state).meta.contents
    assert seconds(lambda: large.state(state)) < 0.1


def test_collection(large: StateStore) -> None:
    assert seconds(lambda: large.gc(dry_run=True)) < 0.5


def test_index(tmp_path: Path) -> None:
    index = Index()
    index.packs = [PackEntry("20261201T000000Z-00000000-0000", bytes(16), None, 1)]
    for number in range(BLOBS):
        index.blobs.append(0, number, number << 20, 1 << 20, 0, 256, number.to_bytes(32, "big"))
        index.runs.append(number * 256, 256, number, 0)
    index.files = [
        FileEntry(path=b"a", mode=0o600, mtime_ns=0, size=BLOBS << 20, first_run=0, runs=BLOBS)
    ]
    data = encode_index(index)
    assert seconds(lambda: decode_index(data)) < 0.5
    again = decode_index(data)
    assert encode_index(again) == data
    assert list(again.runs_of(again.files[0])) == list(index.runs_of(index.files[0]))
