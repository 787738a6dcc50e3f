"""A store on a real S3 server, with a tier on each node, over a network that fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store.objects import Found, Objects
from jupyter_gpu_ckpt.store.packs import pack_key
from jupyter_gpu_ckpt.store.records import KernelRecord, Lease, StateRecord
from jupyter_gpu_ckpt.store.remote import RemoteFiles
from jupyter_gpu_ckpt.store.tiers import TieredStore
from tests.harness.s3 import Proxy, S3Server
from tests.store.conftest import KERNEL, extract, make_meta, noise, pack_files, snapshot
from tests.store.remote.conftest import everywhere
from tests.store.test_failures import failure

MIB = 1 << 20

Node = Callable[..., TieredStore]


@pytest.fixture
def node(url: str, proxy: Proxy, tmp_path: Path) -> Iterator[Node]:
    """Make a store as a server on some node has it; the node's name says which disk it has."""
    stores: list[TieredStore] = []

    def node(name: str = "a", *, start: bool = True, **traits: object) -> TieredStore:
        options = {"timeout": 10.0, "options": proxy.options, **traits}
        store = TieredStore(url, tmp_path / name, "ada", **options)  # type: ignore[arg-type]
        stores.append(store)
        if start:
            store.start()
        return store

    yield node
    for store in stores:
        store.stop(0)


def save(store: TieredStore, image: Path, kernel_id: str = KERNEL) -> StateRecord:
    with store.begin(kernel_id) as writer:
        writer.add_tree(image)
        return writer.commit(make_meta(kernel_id))


def wait_for(condition: Callable[[], object], timeout: float = 20) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def wait_durable(store: TieredStore, state_id: str) -> None:
    wait_for(lambda: store.state(state_id).durable)


def age(store: TieredStore) -> float:
    """Seconds since the kernel's lease was renewed."""
    beat = store.heartbeat(KERNEL)
    assert beat is not None
    return beat.age


def content(store: TieredStore, state_id: str, dest: Path) -> dict[bytes, tuple[int, bytes | None]]:
    extract(store, state_id, dest)
    return snapshot(dest)


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image that makes several packs, being small ones here."""
    monkeypatch.setattr("jupyter_gpu_ckpt.store.packwriter.PACK_SIZE", 4 * MIB)
    monkeypatch.setattr("jupyter_gpu_ckpt.store.objects._PART", MIB)
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "pages-1.img").write_bytes(noise(10 * MIB, seed=3))
    return folder


@everywhere
def test_a_state_is_local_then_durable_then_on_another_node(
    node: Node, image: Path, tmp_path: Path
) -> None:
    a = node("a", start=False)
    saved = save(a, image)
    assert not saved.durable
    assert [state.durable for state in a.states()] == [False]
    b = node("b")
    assert b.states() == []
    a.start()
    wait_durable(a, saved.id)
    time.sleep(2.1)  # what b has listed counts as fresh for so long
    (found,) = b.states()
    assert found == a.state(saved.id)
    assert found.durable and found.meta.label == "before the long run"
    assert content(b, saved.id, tmp_path / "out") == snapshot(image)


@everywhere
def test_the_node_is_lost(node: Node, image: Path, tmp_path: Path) -> None:
    a = node("a")
    first = save(a, image)
    (image / "core-1.img").write_bytes(b"later" * 99)
    second = save(a, image)
    assert second.parent == first.id
    assert a.stop(20) == []
    b = node("b")
    assert [state.id for state in b.states(KERNEL)] == [second.id, first.id]
    assert content(b, second.id, tmp_path / "out") == snapshot(image)
    # And it goes on from there, without storing anew what the other node has stored.
    (image / "one").write_bytes(b"2")
    third = save(b, image)
    assert third.parent == second.id
    assert third.stored_size < 100_000
    wait_durable(b, third.id)
    assert content(node("c"), third.id, tmp_path / "out3") == snapshot(image)


def test_lists_and_collections_take_few_requests(
    node: Node, image: Path, proxy: Proxy, tmp_path: Path
) -> None:
    a = node("a")
    for number in range(12):
        (image / "one").write_bytes(b"%d" % number)
        last = save(a, image)
    assert a.stop(30) == []
    b = node("b")
    assert len(b.states()) == 12
    proxy.requests.clear()
    b._mirror._refreshed = 0.0
    assert len(b.states()) == 12
    assert [r.method for r in proxy.requests] == ["GET"]
    proxy.requests.clear()
    b.gc()
    assert proxy.count() < 40, [r[:2] for r in proxy.requests]
    proxy.requests.clear()
    with b.open(last.id):
        pass
    assert proxy.count() <= 3  # the index, and two lists


def test_only_missing_packs_are_sent_after_a_cut(
    node: Node, big: Path, proxy: Proxy, tmp_path: Path
) -> None:
    a = node("a", start=False, timeout=1.0, parallel=1)
    saved = save(a, big)
    assert len(pack_files(a.root)) == 3
    proxy.fault("cut request", "PUT", "0002.pack", times=99)
    a.start()
    wait_for(lambda: a.warnings())
    assert proxy.count("PUT", "0000.pack") == proxy.count("PUT", "0001.pack") == 1
    assert a.stop(0) == [saved.id]
    # Nothing half is listed elsewhere.
    assert node("b").states() == []
    proxy.heal()
    again = node("a")
    wait_durable(again, saved.id)
    assert proxy.count("PUT", "0000.pack") == proxy.count("PUT", "0001.pack") == 1
    assert content(node("c"), saved.id, tmp_path / "out") == snapshot(big)


def test_an_unreachable_system_stops_nobody(
    node: Node, image: Path, proxy: Proxy, tmp_path: Path
) -> None:
    a = node("a", timeout=2.0)
    first = save(a, image)
    wait_durable(a, first.id)
    proxy.down()
    (image / "one").write_bytes(b"2")
    began = time.monotonic()
    second = save(a, image)
    assert {state.id: state.durable for state in a.states()} == {second.id: False, first.id: True}
    assert time.monotonic() - began < 5
    for _ in range(5):
        a.states()
    assert time.monotonic() - began < 6
    wait_for(lambda: a.states() and a.warnings())
    (warning,) = a.warnings()
    assert warning.reason == "store_unavailable"
    assert content(a, second.id, tmp_path / "out") == snapshot(image)
    with pytest.raises(CkptError, match="does not work"):
        a.delete(first.id)
    assert len(a.states()) == 2
    began = time.monotonic()
    assert a.stop(30) == [second.id]
    assert time.monotonic() - began < 20, "it waits for what does not work"
    proxy.heal()
    again = node("a")
    wait_durable(again, second.id)
    assert again.warnings() == []


def test_a_system_that_was_never_reached(node: Node, image: Path, proxy: Proxy) -> None:
    proxy.down()
    a = node("a")
    assert a.states() == []
    assert a.warnings()
    with pytest.raises(CkptError, match="never reached from this node"):
        save(a, image)


def test_a_state_that_is_deleted_meanwhile_is_not_uploaded(
    node: Node, big: Path, proxy: Proxy
) -> None:
    a = node("a", parallel=1)
    proxy.rate = 4 * MIB
    saved = save(a, big)
    wait_for(lambda: proxy.count("PUT", ".pack"))
    a.delete(saved.id)
    proxy.rate = None
    wait_for(lambda: not a._uploader.unsent() and not proxy_busy(a))
    assert a.states() == []
    assert node("b").states() == []


def proxy_busy(store: TieredStore) -> bool:
    return bool(store._remote.objects.list("writers"))


def test_what_is_deleted_here_is_gone_there(node: Node, image: Path) -> None:
    a = node("a")
    saved, kept = save(a, image), save(a, image)
    assert a.stop(20) == []
    b, a = node("b"), node("a")
    assert len(b.states()) == 2
    a.delete(saved.id)
    b._mirror._refreshed = 0.0
    assert [state.id for state in b.states()] == [kept.id]
    # What nobody needs any more goes, when its time has come.
    assert b.gc(grace_seconds=3600).packs == 0
    b.gc(grace_seconds=-1)
    assert {p.rpartition("-")[0] for p in a._remote.packs()} == {saved.id, kept.id}


@everywhere
def test_an_emptied_system_takes_no_states_along(node: Node, image: Path) -> None:
    a = node("a")
    saved = save(a, image)
    wait_durable(a, saved.id)
    for name in [*a._remote.objects.list("kernels"), "store.json"]:
        a._remote.objects.delete(name)
    a._mirror._refreshed = 0.0
    assert [state.id for state in a.states()] == [saved.id]
    (warning,) = a.warnings()
    assert "not the one that it was" in warning.message


def test_the_local_tier_lets_go_of_what_is_durable(node: Node, big: Path, tmp_path: Path) -> None:
    a = node("a", limit=5 * MIB)
    first = save(a, big)
    wait_durable(a, first.id)
    wait_for(lambda: sum(p.stat().st_size for p in pack_files(a.root)) <= 5 * MIB)
    assert content(a, first.id, tmp_path / "out") == snapshot(big)
    assert a.stop(5) == []
    assert sum(p.stat().st_size for p in pack_files(a.root)) <= 5 * MIB


def test_downloads_that_fail_are_tried_again(
    node: Node, big: Path, proxy: Proxy, tmp_path: Path
) -> None:
    a = node("a")
    saved = save(a, big)
    assert a.stop(30) == []
    b = node("b")
    proxy.fault("cut response", "GET", "0000.pack", times=2)
    proxy.fault("503", "GET", "0001.pack", times=2)
    proxy.fault("short response", "GET", "0002.pack", times=2)
    assert content(b, saved.id, tmp_path / "out") == snapshot(big)
    assert proxy.count("GET", "0001.pack") >= 4  # in ranges
    assert not list((b.root / "ada" / "tier" / "incoming").iterdir())


@pytest.mark.parametrize("harm", ["altered", "cut off"])
def test_a_pack_that_is_damaged_here_is_fetched_again(
    node: Node, big: Path, tmp_path: Path, harm: str
) -> None:
    store = node()
    record = save(store, big)
    wait_durable(store, record.id)
    for pack in pack_files(tmp_path / "a"):
        data = bytearray(pack.read_bytes())
        data[100:116] = bytes(16)
        data[-200:-184] = bytes(16)
        pack.write_bytes(data if harm == "altered" else data[:1000])
    assert content(store, record.id, tmp_path / "back") == snapshot(big)
    assert store.verify(record.id).lost == []


@everywhere
def test_a_pack_that_is_gone_is_damage(node: Node, big: Path, tmp_path: Path) -> None:
    a = node("a")
    saved = save(a, big)
    assert a.stop(30) == []
    b = node("b")
    b._remote.objects.delete(b._remote.pack_name(f"{saved.id}-0001"))
    with pytest.raises(CkptError, match="damaged") as damage:
        content(b, saved.id, tmp_path / "out")
    assert damage.value.reason == "state_damaged"
    lost = b.verify(saved.id).lost
    assert {entry.path for entry in lost} == {b"pages-1.img"}


@everywhere
def test_leases_are_seen_elsewhere_and_hold_nothing_up(node: Node, proxy: Proxy) -> None:
    def record(renewed: float) -> KernelRecord:
        lease = Lease(node_id="n", hostname="h", boot_id="b", server_pid=1, server_start=0.0,
                      renewed=renewed, ttl=30)  # fmt: skip
        return KernelRecord(kernel_id=KERNEL, kernel_name="p", display_name="P", lease=lease)

    a, b = node("a"), node("b")
    a.put_kernel(record(1.0))
    a._records.flush(10)
    (seen,) = b.kernels()
    assert seen == record(1.0)
    time.sleep(2.1)
    renewing = time.monotonic()
    a.renew_kernel(record(1.0))
    a._records.flush(10)
    assert age(b) < time.monotonic() - renewing + 1.0
    proxy.down()
    began = time.monotonic()
    for renewed in range(2, 12):
        a.put_kernel(record(renewed))
    assert time.monotonic() - began < 2
    assert a.kernel(KERNEL) == record(11)
    proxy.heal()
    wait_for(lambda: a._records.flush(10))
    b._mirror._rest_until = b._mirror._refreshed = 0.0
    assert b.kernels() == [record(11)]
    a.delete_kernel(KERNEL)
    a._records.flush(10)
    b._mirror._refreshed = 0.0
    assert b.kernels() == []


def test_a_nodes_own_clock_makes_no_lease_old_or_young(node: Node) -> None:
    lease = Lease(node_id="n", hostname="h", boot_id="b", server_pid=1, server_start=0.0,
                  renewed=1.0, ttl=30)  # fmt: skip
    a, b = node("a"), node("b")
    a.put_kernel(KernelRecord(kernel_id=KERNEL, kernel_name="p", display_name="P", lease=lease))
    a._records.flush(10)
    assert b.kernel(KERNEL) is not None and abs(age(b)) < 10
    (path,) = b.root.glob(f"ada/kernels/{KERNEL}/kernel.json")
    # It was set since the record was brought here.
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))
    assert abs(age(b)) < 10


def test_who_was_cut_off_does_not_undo_that_a_kernel_was_taken_over(
    node: Node, url: str, s3_server: S3Server
) -> None:
    def record(holder: str) -> KernelRecord:
        lease = Lease(node_id=holder, hostname=holder, boot_id="b", server_pid=1,
                      server_start=0.0, renewed=1.0, ttl=30)  # fmt: skip
        return KernelRecord(kernel_id=KERNEL, kernel_name="p", display_name="P", lease=lease)

    own = Proxy(s3_server.port)
    try:
        cut, other = node("a", options=own.options), node("b")
        cut.put_kernel(record("a"))
        assert cut.kernel(KERNEL) == record("a")
        own.down()
        cut.put_kernel(record("a"))
        time.sleep(2.1)
        assert cut.kernel(KERNEL) == record("a")
        assert age(cut) < 1.0
        assert other.kernel(KERNEL) == record("a")
        other.put_kernel(record("b"))
        own.heal()
        wait_for(lambda: cut._records.flush(1))
        cut._mirror._rest_until = cut._mirror._refreshed = 0.0
        assert cut.kernel(KERNEL) == record("b")
        other._mirror._refreshed = 0.0
        assert other.kernel(KERNEL) == record("b")
    finally:
        own.stop()


def test_pins_and_labels_are_seen_elsewhere(node: Node, image: Path) -> None:
    a, b = node("a"), node("b")
    early, late = save(a, image), save(a, image)
    a.mark(early.id, label="before it is uploaded")
    wait_durable(a, early.id)
    wait_durable(a, late.id)
    a.mark(late.id, pinned=True)
    a._records.flush(10)
    b._mirror._refreshed = 0.0
    seen = {state.id: state for state in b.states()}
    assert seen[late.id].pinned
    assert seen[early.id].meta.label == "before it is uploaded"


def test_an_encrypted_store_on_two_nodes(node: Node, image: Path, tmp_path: Path) -> None:
    from jupyter_gpu_ckpt.store.keys import KeyFile, KeyRing, new_key_file

    new_key_file(tmp_path / "key")
    ring = KeyRing(KeyFile(tmp_path / "key"), [])
    a = node("a", sealing=ring)
    saved = save(a, image)
    assert a.stop(20) == []
    everything = b"".join(p.read_bytes() for p in pack_files(a.root))
    assert b"row of a table" not in everything
    assert content(node("b", sealing=ring), saved.id, tmp_path / "out") == snapshot(image)
    without = node("c")
    with pytest.raises(CkptError) as error:
        without.state(saved.id)
    assert error.value.reason in ("key_missing", "wrong_key")


def test_a_fresh_node_knows_how_the_store_is_encrypted(
    node: Node, image: Path, tmp_path: Path
) -> None:
    """Even if the first thing that it does is a save: before it has listed anything."""
    from jupyter_gpu_ckpt.store.keys import KeyFile, KeyRing, new_key_file

    new_key_file(tmp_path / "key")
    plain = node("a")
    before = save(plain, image)
    assert plain.stop(20) == []
    sealing = KeyRing(KeyFile(tmp_path / "key"), [])
    saved = save(node("b", sealing=sealing), image)  # the first one with a key, on a fresh node
    b = node("b", sealing=sealing)
    wait_durable(b, saved.id)
    with pytest.raises(CkptError) as error:
        save(node("without", start=False), image)
    assert error.value.reason == "key_missing"
    c = node("c", sealing=sealing)
    save(c, image)
    for number, store in enumerate((b, c)):
        assert content(store, before.id, tmp_path / f"out {number}") == snapshot(image)


def test_no_name_in_the_bucket_leads_out_of_the_local_tier(
    node: Node, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = node("a")
    wait_durable(a, save(a, image).id)
    evil = ["keys/../../../evil.json", "keys//etc/evil.json", "keys/evil.json", "keys/a/b.json"]
    listed = Objects.list

    def more(objects: Objects, prefix: str) -> dict[str, Found]:
        """What a bucket may hold; not every server lets us make it so."""
        found = listed(objects, prefix)
        return found | {name: Found(2, "1", 0.0) for name in evil if name.startswith(prefix)}

    monkeypatch.setattr(Objects, "list", more)
    monkeypatch.setattr(Objects, "get", lambda *_: b"{}")
    b = node("b", start=False)
    before = {path for path in tmp_path.rglob("*.json") if path.is_file()}
    b._mirror.keys(b.root / "ada" / "keys")
    assert {path for path in tmp_path.rglob("*.json") if path.is_file()} == before


@everywhere
def test_nothing_is_shared_that_another_node_can_delete(
    node: Node, image: Path, tmp_path: Path
) -> None:
    a = node("a", limit=0)
    first = save(a, image)
    wait_for(lambda: not pack_files(a.root))
    assert a.stop(5) == []
    a = node("a", limit=0, start=False)
    second = save(a, image)
    b = node("b")
    b.delete(first.id)
    later = RemoteFiles.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFiles, "now", lambda files: later(files) + 60)
        assert b.gc(grace_seconds=1).packs
    a.start()
    wait_durable(a, second.id)
    assert content(b, second.id, tmp_path / "out") == snapshot(image)


def test_a_pack_that_is_collected_during_the_upload_is_sent_again(
    node: Node, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = node("a")
    first = save(a, image)
    assert a.stop(20) == []
    put = Objects.put
    harmed: list[str] = []

    def late(objects: Objects, name: str, data: bytes, **how: bool) -> bool:
        """A collector that looked before the upload began, and removes at its very end."""
        if "/states/" in name and not harmed:
            harmed.append(name)
            objects.delete(f"packs/{pack_key(f'{first.id}-0000')}")
        return put(objects, name, data, **how)

    a = node("a", start=False)
    second = save(a, image)
    monkeypatch.setattr(Objects, "put", late)
    a.start()
    wait_durable(a, second.id)
    assert harmed
    assert content(node("b"), second.id, tmp_path / "out") == snapshot(image)


def test_what_a_save_counts_on_is_not_evicted(node: Node, image: Path) -> None:
    a = node("a")
    first = save(a, image)
    wait_durable(a, first.id)
    a._limit = 0
    with a.begin(KERNEL) as writer:
        a._evict()
        writer.add_tree(image)
        second = writer.commit(make_meta())
    assert second.parent == first.id
    assert second.stored_size < first.stored_size // 4
    wait_for(lambda: not pack_files(a.root))


def test_two_servers_of_one_node_upload_each_state_once(
    node: Node, image: Path, proxy: Proxy
) -> None:
    first, second = node("a"), node("a")
    ids = []
    for number in range(4):
        (image / "one").write_bytes(os.urandom(9000))
        ids.append(save((first, second)[number % 2], image).id)
    assert first.stop(20) == [] == second.stop(20)
    for state in ids:
        assert proxy.count("PUT", f"states/{state}.json") == 1


def test_another_node_knows_of_a_save_that_failed(node: Node) -> None:
    a, b = node("a"), node("b", start=False)
    a.put_kernel(KernelRecord(kernel_id=KERNEL, kernel_name="p", display_name="P"))
    a.note_failure(failure())
    wait_for(lambda: [found.message for found in b.failures()] == ["Too large."])
    a.clear_failure(KERNEL)
    wait_for(lambda: b.failures() == [])
    assert [record.kernel_id for record in b.kernels()] == [KERNEL]
