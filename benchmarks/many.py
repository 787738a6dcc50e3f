"""What is asked of a store of many large states, of whose blocks nobody reads a single one."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from msgspec import to_builtins
from msgspec.structs import replace

from benchmarks.report import Row
from jupyter_gpu_ckpt.capture.node import node_info
from jupyter_gpu_ckpt.store.manifest import Body, encode_manifest
from jupyter_gpu_ckpt.store.owner import open_owner
from jupyter_gpu_ckpt.store.packs import pack_key
from jupyter_gpu_ckpt.store.tiers import TieredStore
from tests.harness.s3 import Proxy, S3Server
from tests.harness.server import Home, JupyterServer
from tests.store.conftest import KERNEL
from tests.store.test_scale import BLOBS, STATES, manifest, shared_packs

ROUNDS = 5
OWNER = "bench"
_STATE = manifest(STATES // 2).id
_SIZE = f"{STATES} states of {BLOBS:,} blocks"


def measure(folder: Path) -> list[Row]:
    """Ask a server with a local store, by the command line; then a node with a store on S3."""
    return _local(Home(folder / "home")) + _s3(folder / "tier")


def _local(home: Home) -> list[Row]:
    owner = open_owner(home.store, OWNER, create=True)
    assert owner is not None
    for number in range(STATES):
        body = _body(number)
        _write(owner.manifest(KERNEL, body.id), encode_manifest(body, owner.sealing))
    for pack in _packs():
        _write(owner.packs / pack_key(pack), b"x")
    rows = []
    with JupyterServer(home, config={"GpuCkpt": {"owner": OWNER}}) as server:
        program = [str(Path(sys.executable).with_name("jupyter-gpu-ckpt"))]
        where = ["--url", server.base_url, "--token", server.token]
        for asked in (["states"], ["inspect", _STATE], ["gc", "--dry-run"]):
            command = [*program, *asked, *where]
            taken = [_time(partial(_run, command)) for _ in range(ROUNDS)]
            rows.append(_row(" ".join(a for a in asked if a != _STATE), "a local folder", taken))
    return rows


def _s3(tier: Path) -> list[Row]:
    with ExitStack() as stack:
        server = S3Server()
        stack.callback(server.stop)
        proxy = Proxy(server.port)
        stack.callback(proxy.stop)
        url = f"s3://{server.bucket}/{secrets.token_hex(4)}/states"
        store = TieredStore(url, tier, OWNER, options=proxy.options, timeout=10)
        stack.callback(store.stop, 0)
        _fill(store)
        asked: dict[str, Callable[[], object]] = {
            "states": store.listing,
            "inspect": lambda: store.state(_STATE),
            "gc --dry-run": lambda: store.gc(dry_run=True),
        }
        assert len(store.states()) == STATES  # a node reads each manifest once
        rows = []
        for name, ask in asked.items():
            taken, requests = [], []
            for _ in range(ROUNDS):
                store._mirror._refreshed = 0.0  # as if the last question were long ago
                proxy.requests.clear()
                taken.append(_time(ask))
                requests.append(float(proxy.count()))
            rows.append(_row(name, "S3", taken))
            blocks = [float(BLOBS)] * ROUNDS
            rows.append(Row(f"requests of `{name}`", "blocks", requests, blocks, "<= 0.01", ""))
        return rows


def _fill(store: TieredStore) -> None:
    """Put the states where another node would have put them."""
    store._create()
    owner = open_owner(store.root, OWNER, create=False)
    assert owner is not None
    objects = store._remote.objects
    with ThreadPoolExecutor(8) as pool:

        def put(name: str, data: bytes) -> None:
            pool.submit(objects.put, name, data, check=False)

        for body in map(_body, range(STATES)):
            put(store._remote.manifest_name(KERNEL, body.id), encode_manifest(body, owner.sealing))
        for pack in _packs():
            put(f"packs/{pack_key(pack)}", b"x")


def _body(number: int) -> Body:
    """The manifest of a state that was saved on this node."""
    body = manifest(number)
    ports = {f"{name}_port": 1 for name in ("shell", "iopub", "stdin", "control", "hb")}
    connection = {"ip": "127.0.0.1", **ports}
    meta = replace(body.meta, node=to_builtins(node_info()), connection=connection)
    return replace(body, meta=meta)


def _packs() -> Iterator[str]:
    yield from shared_packs()
    for number in range(STATES):
        yield manifest(number).index.pack


def _row(what: str, where: str, taken: list[float]) -> Row:
    return Row(f"`{what}`, {_SIZE}, {where}", "a second", taken, [1.0] * len(taken), "<= 1")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _run(command: Iterable[str]) -> None:
    subprocess.run(list(command), check=True, stdout=subprocess.DEVNULL)
