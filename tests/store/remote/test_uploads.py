"""What an upload sends, and what it leaves as it is, while others are at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.store import announcements, uploads
from jupyter_gpu_ckpt.store.announcements import Announcements
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
    elsewhere = Announcements(a._remote, tmp_path / "another node")
    with elsewhere.made([pack]):
        second = save(a, image)
        manifest = f"states/{second.id}.json"
        wait_for(lambda: proxy.count("PUT", manifest))
        seen = proxy.count("GET", "removing")
        wait_for(lambda: proxy.count("GET", "removing") > seen + 1)
        assert not a.state(second.id).durable
        # It looked before the upload began.
        RemoteFiles(a._remote).remove_pack(pack)
    wait_durable(a, second.id)
    assert content(node("b"), second.id, tmp_path / "out") == snapshot(image)
    assert elsewhere.packs() == set()
    assert a._remote.objects.list("removing") == {}


def test_while_one_waits_for_a_collection_others_are_uploaded(
    node: Node, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_COLLECTION_SECONDS", 0.5)
    monkeypatch.setattr(uploads, "_PUT_OFF_SECONDS", 1.0)
    a = node("a")
    first = save(a, image)
    assert a.stop(20) == []
    a = node("a", start=False)
    other = save(a, image, str(uuid.uuid4()))
    waits = save(a, image)  # the newest, which goes first
    assert waits.parent == first.id
    with Announcements(a._remote, tmp_path / "another node").made([pack_id(first.id, 0)]):
        a.start()
        wait_durable(a, other.id)
        wait_for(a.warnings)
        (warning,) = a.warnings()
        assert waits.id in warning.message and "not uploaded yet" in warning.message
        assert not a.state(waits.id).durable
    wait_durable(a, waits.id)
    wait_for(lambda: a.warnings() == [])
    assert content(node("b"), waits.id, tmp_path / "out") == snapshot(image)


def test_a_collection_that_was_killed_holds_nothing_up(
    node: Node, image: Path, url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_COLLECTION_SECONDS", 0.5)
    monkeypatch.setattr(uploads, "_PUT_OFF_SECONDS", 0.5)
    monkeypatch.setattr(announcements, "_DEAD_SECONDS", 1.0)
    a = node("a", start=False)
    a._join()
    first = save(a, image)
    program = (
        "import json, sys; from pathlib import Path\n"
        "from jupyter_gpu_ckpt.store.announcements import Announcements\n"
        "from jupyter_gpu_ckpt.store.objects import Objects\n"
        "from jupyter_gpu_ckpt.store.remote import RemoteOwner\n"
        "url, options, locks, pack = json.loads(sys.argv[1])\n"
        "with Announcements(RemoteOwner(Objects(url, options)), Path(locks)).made([pack]):\n"
        "    print('announced', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    locks = a.root / "ada" / "tier" / "removing"
    given = json.dumps([f"{url}/ada", proxy.options, str(locks), pack_id(first.id, 0)])
    with subprocess.Popen(
        [sys.executable, "-c", program, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as collection:
        assert collection.stdout is not None and collection.stdout.readline() == b"announced\n"
        a.start()
        wait_for(a.warnings)
        time.sleep(1.5)  # longer than it would take if it were dead
        assert not a.state(first.id).durable
        collection.kill()
        collection.wait()
        wait_durable(a, first.id)
    wait_for(lambda: a._remote.objects.list("removing") == {} and not list(locks.iterdir()))


def test_a_manifest_that_is_another_one_here_lets_nothing_be_removed_there(
    node: Node, image: Path, tmp_path: Path, proxy: Proxy
) -> None:
    a = node("a")
    first = save(a, image)
    (image / "one").write_bytes(b"2")
    second = save(a, image)
    assert second.parent == first.id
    assert a.stop(20) == []
    a = node("a")
    a.delete(first.id)
    proxy.requests.clear()
    a.gc(dry_run=True)
    manifest = f"states/{second.id}.json"
    assert proxy.count("GET", manifest) == 0, "it is known to be the same"
    (path,) = a.root.glob(f"ada/kernels/*/{manifest}")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(first.id.encode(), second.id.encode()))
    assert path.stat().st_size == len(whole)
    a.gc(grace_seconds=-1)
    assert proxy.count("GET", manifest) == 1
    assert content(node("b"), second.id, tmp_path / "out") == snapshot(image)


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
