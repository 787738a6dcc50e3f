"""What an upload sends, and what it leaves as it is, while others are at work."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_gpu_ckpt.store.packs import pack_id, pack_key
from jupyter_gpu_ckpt.store.remote import RemoteFiles
from tests.harness.s3 import Proxy
from tests.store.conftest import pack_files, snapshot

from .test_tiers import Node, content, node, save, wait_durable, wait_for

__all__ = ["node"]


def test_it_waits_for_a_collection_that_may_remove_what_it_needs(
    node: Node, image: Path, proxy: Proxy, tmp_path: Path
) -> None:
    a = node("a")
    first = save(a, image)
    wait_durable(a, first.id)
    pack = pack_id(first.id, 0)
    files = RemoteFiles(a._remote)
    with files.announced([pack]):
        second = save(a, image)
        manifest = f"states/{second.id}.json"
        wait_for(lambda: proxy.count("PUT", manifest))
        seen = proxy.count("GET", "removing")
        wait_for(lambda: proxy.count("GET", "removing") > seen + 1)
        assert not a.state(second.id).durable
        # It looked before the upload began.
        files.remove_pack(pack)
    wait_durable(a, second.id)
    assert content(node("b"), second.id, tmp_path / "out") == snapshot(image)
    assert a._remote.being_removed() == set()


def test_a_cut_pack_there_is_replaced_by_a_whole_one(
    node: Node, image: Path, tmp_path: Path
) -> None:
    a = node("a", start=False)
    saved = save(a, image)
    a._join()
    pack = a._remote.pack_name(pack_id(saved.id, 0))
    a._remote.objects.put(pack, b"half of it")
    a.start()
    wait_durable(a, saved.id)
    assert content(node("b"), saved.id, tmp_path / "out") == snapshot(image)


def test_a_damaged_pack_here_replaces_none_there(node: Node, image: Path, tmp_path: Path) -> None:
    a = node("a")
    first = save(a, image)
    wait_durable(a, first.id)
    second = save(a, image)
    assert a.stop(20) == []
    (owner,) = [path.parent for path in a.root.glob("*/packs")]
    path = owner / "packs" / pack_key(pack_id(first.id, 0))
    assert path in map(Path, pack_files(a.root))
    whole = path.read_bytes()
    # One that lost its end, and one in which a byte of a block has changed and some came after it.
    for harmed in (whole[:-9], whole[:3] + bytes([whole[3] ^ 1]) + whole[4:] + b"more"):
        path.write_bytes(harmed)
        (owner / "tier" / "durable" / second.id).unlink(missing_ok=True)
        again = node("a")
        wait_for(again.warnings)
        (warning,) = again.warnings()
        assert warning.reason == "state_damaged" and second.id in warning.message
        again.stop(0)
    os.unlink(path)
    assert content(node("b"), first.id, tmp_path / "out") == snapshot(image)
