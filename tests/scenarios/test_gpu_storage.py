"""GPU memory that goes straight to the store, with real Jupyter and CRIU and a simulated driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.client import API, KernelClient
from tests.harness.gpus import GpuNode, checksum, hold
from tests.harness.server import Home, JupyterServer, shared_folder
from tests.simgpu.simgpu import gpu

pytestmark = pytest.mark.root

MIB = 1 << 20
CONFIG = {"GpuCkpt": {"gpu_timeout": 2.0, "gpu_to_store": True}}
DRIVER = {"driver": "620.10.01", "cuda": 13040}
SIZE = 12


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with shared_folder("gpu-storage") as folder:
        yield folder


@pytest.fixture(scope="module")
def node(place: Path) -> Iterator[GpuNode]:
    with GpuNode("gpu-files", place, gpu(0, memory=128 * MIB), **DRIVER) as one:
        yield one


@pytest.fixture(scope="module")
def server(place: Path, node: GpuNode) -> Iterator[JupyterServer]:
    with JupyterServer(Home(place / "home"), node=node, config=CONFIG) as running:
        yield running


def test_it_is_saved_again_restored_here_and_on_another_gpu(
    server: JupyterServer, place: Path, node: GpuNode
) -> None:
    client = server.client
    kernel: KernelClient = client.start(server.home.add_notebook("stored.ipynb"))
    data = hold(kernel, SIZE)
    first = client.save(kernel)["result"]
    assert not first["warnings"]
    assert checksum(kernel, SIZE) == data
    state = client.get(f"{API}states/{first['state_id']}")
    assert state["restorable"]
    assert state["gpu"]["memory"] >= SIZE * MIB
    contents = client.get(f"{API}states/{first['state_id']}/contents")
    (of_gpu,) = [one for one in contents["kinds"] if one["kind"] == "gpu"]
    assert of_gpu["size"] >= SIZE * MIB

    # Of a second save only what has changed is stored.
    kernel.run(f"gpu_data.use(); gpu_data.write(data + {SIZE // 2} * MIB, os.urandom(MIB))")
    changed = checksum(kernel, SIZE)
    second = client.save(kernel)["result"]
    contents = client.get(f"{API}states/{second['state_id']}/contents")
    (of_gpu,) = [one for one in contents["kinds"] if one["kind"] == "gpu"]
    assert MIB <= of_gpu["new"] < 4 * MIB

    # A driver that does not give the memory back: the kernel is restored from the new state.
    events = client.events()
    node.machine.faults("cuMemcpyHtoDAsync * error 999")
    operation = client.begin_save(kernel)
    events.wait_for("operation", operation_id=operation["id"], phase="storing", timeout=60)
    node.machine.faults()
    saved = client.done(operation)["result"]
    assert "did not give the kernel its GPU back" in saved["warnings"][0]
    events.wait_for("kernel", action="restored", timeout=60)
    assert checksum(kernel, SIZE) == changed

    node.kill()
    server.kill()
    with (
        GpuNode("gpu-there", place, gpu(1, memory=128 * MIB), **{**DRIVER, "cuda": 13000}) as there,
        JupyterServer(server.home, node=there, port=server.port, config=CONFIG) as last,
    ):
        client = last.client
        client.wait_lost(1)
        operation = client.finished(dict(client.post(f"{API}lost/{kernel.id}/restore")))
        assert operation["error"]["reason"] == "not_restorable"
        assert "CUDA 13.4" in operation["error"]["message"]
        there.machine.become(gpu(1, memory=128 * MIB), **DRIVER)
        client.get(f"{API}doctor")
        client.restore_lost(kernel.id)
        back = client.connect(kernel.id)
        assert checksum(back, SIZE) == changed
        assert back.run("print(gpu_data.uuid)").strip() == gpu(1)["uuid"]
