"""Kernels are parked and get their GPU back when a cell is run: several share one GPU.

Real Jupyter Server and CRIU, a simulated driver (`tests/simgpu`) with one GPU of 40 MiB.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import API, ApiError, Client, KernelClient, wait_for
from tests.harness.gpus import GpuNode, checksum, end_all, hold
from tests.harness.server import Home, JupyterServer, shared_folder
from tests.simgpu.simgpu import gpu

pytestmark = pytest.mark.root

MIB = 1 << 20
#: What each kernel has: one fits, two do not.
SIZE = 24
CONFIG = {"GpuCkpt": {"gpu_timeout": 10.0, "park_others": False}, "AutoSave": {"shortest": 0.2}}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with shared_folder("park") as folder:
        yield folder


@pytest.fixture(scope="module")
def node(place: Path) -> Iterator[GpuNode]:
    with GpuNode("gpu-park", place, gpu(0, memory=40 * MIB)) as one:
        yield one


@pytest.fixture(scope="module")
def running(place: Path, node: GpuNode) -> Iterator[JupyterServer]:
    with JupyterServer(Home(place / "home"), node=node, config=CONFIG) as one:
        yield one


@pytest.fixture
def server(running: JupyterServer, node: GpuNode) -> Iterator[JupyterServer]:
    yield running
    end_all(running.client, node)


def begin(client: Client, kernel: KernelClient, what: str) -> dict[str, Any]:
    """Start to park a kernel or the opposite, once the server has heard that it is idle."""

    def ask() -> Any:
        try:
            return client.post(f"{API}kernels/{kernel.id}/{what}")
        except ApiError as error:
            assert error.body["reason"] == "busy"
            return None

    return dict(wait_for(f"{what} begins", ask, 30))


def park(client: Client, kernel: KernelClient) -> dict[str, Any]:
    return dict(client.done(begin(client, kernel, "park"))["result"])


def parked(client: Client, kernel: KernelClient) -> Any:
    return client.get(f"{API}kernels/{kernel.id}")["parked"]


def phase(client: Client, operation: dict[str, Any]) -> Any:
    return client.get(f"{API}operations/{operation['id']}")["phase"]


def used(client: Client, kernel: KernelClient) -> str:
    """When the server last heard of what the kernel does."""
    return str(client.get(f"api/kernels/{kernel.id}")["last_activity"])


def refused(client: Client, kernel: KernelClient, what: str) -> str:
    with pytest.raises(ApiError) as told:
        client.post(f"{API}kernels/{kernel.id}/{what}")
    return str(told.value.body["reason"])


def test_a_parked_kernel_frees_its_gpu_and_the_next_cell_brings_it_back(
    server: JupyterServer, node: GpuNode
) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("one.ipynb"))
    kernel.run("1 + 1")
    wait_for("the cell's end is heard", lambda: refused(client, kernel, "park") != "busy", 30)
    assert refused(client, kernel, "park") == "not_savable"
    assert refused(client, kernel, "unpark") == "bad_request"
    data = hold(kernel, SIZE)
    node.machine.faults("cuCheckpointProcessCheckpoint * error 999")
    assert client.finished(begin(client, kernel, "park"))["error"]["reason"] == "dump_failed"
    node.machine.faults()
    assert checksum(kernel, SIZE) == data

    # What runs on the GPU is waited for, and that is said.
    with node.machine.busy():
        kernel.run("gpu_data.launch('spin')")
        operation = begin(client, kernel, "park")
        wait_for("it is said", lambda: phase(client, operation) == "gpu", 30)
    operation = client.done(operation)
    assert operation["result"]["size"] >= SIZE * MIB
    assert operation["phases"]["gpu"] - operation["phases"]["moving"] >= 1.0
    assert node.machine.used() == 0
    assert parked(client, kernel)["host_bytes"] >= SIZE * MIB
    assert refused(client, kernel, "park") == "bad_request"
    # Saved as it is; it stays parked.
    state = client.save(kernel)["result"]["state_id"]
    assert parked(client, kernel) is not None and node.machine.used() == 0
    assert checksum(kernel, SIZE) == data
    assert parked(client, kernel) is None and node.machine.used() >= SIZE * MIB

    park(client, kernel)
    client.restore(state)  # what comes out of a state is never parked
    assert parked(client, kernel) is None
    assert checksum(kernel, SIZE) == data

    # The same by command.
    code = "from jupyter_gpu_ckpt.cli.main import main; main()"
    env = {**server.home.environment(), "JUPYTER_TOKEN": server.token}
    for word in ("park", "unpark"):
        wait_for("idle", lambda: client.execution_state(kernel.id) == "idle", 30)
        line = [sys.executable, "-c", code, word, kernel.id, "--url", server.base_url]
        said = str(node.run(line, env=env).stdout)
        assert "of GPU memory" in said, said
        assert (parked(client, kernel) is not None) == (word == "park")
    assert checksum(kernel, SIZE) == data
    park(client, kernel)
    client.post(f"api/kernels/{kernel.id}/restart")
    assert parked(client, kernel) is None
    assert client.connect(kernel.id).run("print(1)") == "1"


def test_what_has_no_room_in_host_memory_stays_on_the_gpu(
    server: JupyterServer, node: GpuNode, place: Path
) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("host.ipynb"))
    data = hold(kernel, SIZE)
    short = place / "meminfo"
    said = re.sub(
        r"MemAvailable:.*", f"MemAvailable: {16 << 10} kB", Path("/proc/meminfo").read_text()
    )
    short.write_text(said)
    node.run(["mount", "--bind", str(short), "/proc/meminfo"])
    try:
        for what in ("park", "save"):
            error = client.finished(begin(client, kernel, what))["error"]
            assert error["reason"] == "no_space" and "The kernel runs on." in error["message"]
            assert f"({SIZE} MiB)" in error["message"] and "16 MiB are free" in error["message"]
            assert "memory limit" in error["hint"]
            assert node.machine.used() >= SIZE * MIB
            assert checksum(kernel, SIZE) == data
            wait_for("idle", lambda: client.execution_state(kernel.id) == "idle", 30)
    finally:
        node.run(["umount", "/proc/meminfo"])
    assert parked(client, kernel) is None
    assert client.states(kernel=kernel.id) == []
    park(client, kernel)
    assert node.machine.used() == 0
    assert checksum(kernel, SIZE) == data


def test_cells_wait_for_the_gpu_in_turn_and_can_be_given_up(
    server: JupyterServer, node: GpuNode
) -> None:
    client = server.client
    kernels, sums = [], []
    for number in range(3):
        kernels.append(client.start(server.home.add_notebook(f"turn{number}.ipynb")))
        sums.append(hold(kernels[-1], SIZE))
        if number < 2:
            park(client, kernels[-1])
    first, second, third = kernels
    code = f"gpu_data.use(); print(gpu_data.checksum(data, {SIZE} * MIB))"
    begun = [kernel.begin(code) for kernel in (first, second)]

    def waits(kernel: KernelClient, position: int) -> None:
        def look() -> bool:
            now = parked(client, kernel)
            return now is not None and now["position"] == position

        wait_for(f"position {position}", look, 30)

    waits(first, 1)
    waits(second, 2)
    assert "room" in parked(client, first)["waiting"]
    # An interrupt ends the cell of the second, which stays parked and whole.
    client.post(f"api/kernels/{second.id}/interrupt")
    assert "KeyboardInterrupt" in str(begun[1].finish().error)
    # Nobody wants it now: it does not wait on, to take room from others for nothing.
    wait_for("it waits no more", lambda: parked(client, second)["position"] is None, 30)
    park(client, third)
    assert begun[0].finish().error is None
    assert begun[0].text.strip() == sums[0]
    assert "Waiting for room on the GPU." in begun[0].stderr
    assert parked(client, first) is None
    client.done(begin(client, first, "park"))
    assert checksum(second, SIZE) == sums[1]
    park(client, second)
    assert checksum(third, SIZE) == sums[2]


def test_a_kernel_that_is_idle_for_long_is_saved_and_parked(
    server: JupyterServer, node: GpuNode
) -> None:
    client = server.client
    kernel = client.start(server.home.add_notebook("idle.ipynb"))
    plain = client.start(server.home.add_notebook("plain.ipynb"))
    data = hold(kernel, SIZE)
    plain.run("x = 1")
    wait_for("idle", lambda: client.execution_state(kernel.id) == "idle", 30)
    activity = client.get(f"api/kernels/{kernel.id}")["last_activity"]
    for one in (plain, kernel):
        body = {"idle": 0, "park": 0.5}
        client.request("PUT", f"{API}kernels/{one.id}/autosave", body=body)
    wait_for("it is parked", lambda: parked(client, kernel), 30)
    assert [state["reason"] for state in client.states(kernel=kernel.id)] == ["idle"]
    assert client.get(f"api/kernels/{kernel.id}")["last_activity"] == activity
    # Unparked by hand it has its time again; nothing changed that were to be saved.
    client.done(client.post(f"{API}kernels/{kernel.id}/unpark"))
    assert parked(client, kernel) is None
    wait_for("it is parked again", lambda: parked(client, kernel), 30)
    assert len(client.states(kernel=kernel.id)) == 1
    assert checksum(kernel, SIZE) == data
    # One without a GPU is none of this policy's.
    assert client.states(kernel=plain.id) == []


def test_a_wait_for_the_gpu_is_cancelled_and_a_park_is_undone_by_a_cell(
    server: JupyterServer, node: GpuNode
) -> None:
    client = server.client
    first = client.start(server.home.add_notebook("waits.ipynb"))
    data = hold(first, SIZE)
    park(client, first)
    second = client.start(server.home.add_notebook("has.ipynb"))
    held = hold(second, SIZE)
    unpark = client.post(f"{API}kernels/{first.id}/unpark")
    wait_for("it waits", lambda: parked(client, first)["waiting"], 30)
    client.delete(f"{API}operations/{unpark['id']}")
    assert client.finished(unpark)["status"] == "cancelled"
    now = parked(client, first)
    assert now is not None and now["waiting"] is None
    # The cell comes while the memory is on its way.
    node.machine.faults("cuCheckpointProcessCheckpoint * delay 1000")
    operation = begin(client, second, "park")
    wait_for("it moves", lambda: phase(client, operation) in ("moving", "finished"), 30)
    assert checksum(second, SIZE) == held
    client.finished(operation)
    assert parked(client, second) is None
    node.machine.faults()
    # A cell that is run at once after an interrupt is not given up with the interrupted one.
    given_up = first.begin("1")
    wait_for("it waits", lambda: parked(client, first)["waiting"], 30)
    client.post(f"api/kernels/{first.id}/interrupt")
    again = first.begin(f"gpu_data.use(); print(gpu_data.checksum(data, {SIZE} * MIB))")
    assert "KeyboardInterrupt" in str(given_up.finish().error)
    park(client, second)
    assert again.finish().error is None
    assert again.text.strip() == data


def test_idle_kernels_make_room_where_that_is_allowed(place: Path, node: GpuNode) -> None:
    """Three kernels share a GPU that fits one; the busy one is left alone."""
    config = {"GpuCkpt": {**CONFIG["GpuCkpt"], "park_others": True}}
    with JupyterServer(Home(place / "others"), node=node, config=config) as server:
        client = server.client
        kernels, sums = [], []
        for number in range(3):
            kernels.append(client.start(server.home.add_notebook(f"share{number}.ipynb")))
            sums.append(hold(kernels[-1], SIZE))
            if number < 2:
                park(client, kernels[-1])
        for kernel, data in zip(kernels, sums, strict=True):
            assert checksum(kernel, SIZE) == data
        assert [parked(client, kernel) is None for kernel in kernels] == [False, False, True]
        first, _, third = kernels
        busy = third.begin("print('busy', flush=True)\ninput()", allow_stdin=True)
        busy.wait_text("busy")
        waits = first.begin("gpu_data.use()")
        wait_for("the first waits", lambda: parked(client, first)["waiting"], 30)
        wait_for("it was tried again", lambda: waits.stderr, 30)
        assert parked(client, third) is None
        busy.wait_input()
        busy.answer("")
        busy.finish()
        assert waits.finish().error is None
        assert parked(client, third) is not None
        end_all(client, node)

        # Of two that could make room, the one that was used last stays.
        wants = client.start(server.home.add_notebook("wants.ipynb"))
        data = hold(wants, SIZE)
        park(client, wants)
        stays, other = (client.start(server.home.add_notebook(f"{i}.ipynb")) for i in "ab")
        for one in (stays, other):
            hold(one, SIZE // 2)
        stays.run("1")
        wait_for("both are heard of", lambda: used(client, other) < used(client, stays), 30)
        wait_for("idle", lambda: client.execution_state(stays.id) == "idle", 30)
        assert checksum(wants, SIZE) == data
        assert parked(client, other) is not None
        assert parked(client, stays) is None
        end_all(client, node)


def test_a_cell_that_gets_no_gpu_in_time_ends_with_an_error(place: Path, node: GpuNode) -> None:
    config = {"GpuCkpt": {**CONFIG["GpuCkpt"], "unpark_timeout": 1.0}}
    with JupyterServer(Home(place / "late"), node=node, config=config) as server:
        client = server.client
        first = client.start(server.home.add_notebook("late.ipynb"))
        data = hold(first, SIZE)
        park(client, first)
        second = client.start(server.home.add_notebook("full.ipynb"))
        hold(second, SIZE)
        told = first.execute("gpu_data.use()").error
        assert told is not None and "no room" in told and "stays parked" in told
        now = parked(client, first)
        assert now is not None and now["waiting"] is None
        client.delete(f"api/kernels/{second.id}")
        assert checksum(first, SIZE) == data
        end_all(client, node)
