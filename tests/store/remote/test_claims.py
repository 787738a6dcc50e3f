"""Who takes a kernel, of nodes that share nothing but a remote tier."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import claims
from jupyter_gpu_ckpt.store.records import KernelRecord, Lease
from jupyter_gpu_ckpt.store.tiers import TieredStore
from tests.harness.s3 import Proxy
from tests.store.conftest import KERNEL

from .conftest import everywhere
from .test_tiers import Node, node

__all__ = ["node"]


def record(kernel_id: str, holder: str) -> KernelRecord:
    lease = Lease(node_id=holder, hostname=holder, boot_id="b", server_pid=1, server_start=0.0,
                  renewed=1.0, ttl=30)  # fmt: skip
    return KernelRecord(kernel_id=kernel_id, kernel_name="p", display_name="P", lease=lease)


def leave(store: TieredStore, token: str) -> str:
    """What a claimant that was killed leaves."""
    name = f"claims/{KERNEL}/{token}.json"
    store._remote.objects.put(name, b'{"hostname":"far"}')
    return name


@everywhere
def test_of_nodes_that_want_a_kernel_at_once_one_gets_it(node: Node) -> None:
    nodes = {name: node(name) for name in ("a", "b", "c")}
    for store in nodes.values():
        store._create()

    def take(kernel_id: str, start: threading.Barrier, name: str) -> bool:
        """Take the kernel if it is the lost one's still."""
        start.wait()
        store = nodes[name]
        with store.claiming(kernel_id) as is_sure:
            assert is_sure
            found = store.kernel(kernel_id)
            assert found is not None and found.lease is not None
            if found.lease.node_id != "lost":
                return False
            store.put_kernel(record(kernel_id, name))
        return True

    for _ in range(2):
        kernel_id, start = str(uuid.uuid4()), threading.Barrier(len(nodes), timeout=60)
        nodes["a"].put_kernel(record(kernel_id, "lost"))
        with ThreadPoolExecutor(len(nodes)) as pool:
            took = list(pool.map(partial(take, kernel_id, start), nodes))
        assert sum(took) == 1
        winner = list(nodes)[took.index(True)]
        for store in nodes.values():
            store._mirror._refreshed = 0.0
            assert store.kernel(kernel_id) == record(kernel_id, winner)
    assert nodes["a"]._remote.objects.list("claims") == {}


@pytest.mark.parametrize("token", ["0" * 16, "f" * 16], ids=["first", "last"])
def test_what_a_killed_claimant_left_is_void_after_a_while(
    node: Node, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr(claims, "_STALE_SECONDS", 2.0)
    a = node()
    a._create()
    leave(a, token)
    with a.claiming(KERNEL) as is_sure:
        assert is_sure
    assert a._remote.objects.list("claims") == {}


def test_a_collection_removes_what_killed_claimants_left(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = node()
    a._create()
    name = leave(a, "0" * 16)
    a.gc()
    assert a._remote.objects.list("claims").keys() == {name}
    monkeypatch.setattr(claims, "_STALE_SECONDS", -1.0)
    a.gc(dry_run=True)
    assert a._remote.objects.list("claims").keys() == {name}
    a.gc()
    assert a._remote.objects.list("claims") == {}


def test_who_cannot_get_a_claim_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    a = node()
    a._create()
    name = leave(a, "0" * 16)
    stop = threading.Event()
    stop.set()
    with pytest.raises(CkptError) as cancelled, a.claiming(KERNEL, stop):
        pass
    assert cancelled.value.reason == "cancelled"
    monkeypatch.setattr(claims, "_PATIENCE_SECONDS", 0.0)
    with (
        pytest.raises(CkptError, match="server on far is about to bring") as told,
        a.claiming(KERNEL),
    ):
        pass
    assert told.value.reason == "not_restorable"
    # Another kernel is another matter.
    with a.claiming(str(uuid.uuid4())) as is_sure:
        assert is_sure
    assert a._remote.objects.list("claims").keys() == {name}


def test_without_the_remote_tier_nobody_can_be_sure(node: Node, proxy: Proxy) -> None:
    a = node(timeout=1.0)
    a._create()
    proxy.down()
    with a.claiming(KERNEL) as is_sure:
        assert not is_sure
