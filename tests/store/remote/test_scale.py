"""Lists, collections and looks inside take no request for a state, let alone for a block."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from jupyter_gpu_ckpt.store.manifest import encode_manifest
from jupyter_gpu_ckpt.store.owner import open_owner
from jupyter_gpu_ckpt.store.packs import pack_key
from tests.harness.s3 import Proxy
from tests.store.conftest import KERNEL
from tests.store.test_scale import STATES, manifest

from .test_tiers import Node, node

__all__ = ["node"]


def test_requests_of_hundreds_of_large_states(node: Node, proxy: Proxy) -> None:
    a = node("a", start=False)
    a._create()
    owner = open_owner(a.root, "ada", create=False)
    assert owner is not None
    sealing = owner.sealing

    def put(number: int) -> None:
        body = manifest(number)
        name = a._remote.manifest_name(KERNEL, body.id)
        a._remote.objects.put(name, encode_manifest(body, sealing), check=False)
        a._remote.objects.put(f"packs/{pack_key(body.index.pack)}", b"x", check=False)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(STATES)))
    b = node("b", start=False)
    proxy.requests.clear()
    assert len(b.states()) == STATES
    assert proxy.count() < STATES + 20  # each manifest once, ever

    b._mirror._refreshed = 0.0
    proxy.requests.clear()
    found = b.listing()
    assert len(found.states) == len(found.costs) == STATES
    assert proxy.count() <= 2, "two lists, of manifests and of packs"

    proxy.requests.clear()
    assert b.state(found.states[100].id).meta.contents
    assert proxy.count() == 0

    b._mirror._refreshed = 0.0
    proxy.requests.clear()
    assert b.gc(dry_run=True).packs == 0
    assert proxy.count() <= 20, [request[:2] for request in proxy.requests]
