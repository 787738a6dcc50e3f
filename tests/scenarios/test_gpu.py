"""Kernels with memory on GPUs: saved and restored, here and on other GPUs, whatever fails.

Real Jupyter Server and CRIU, a simulated driver (`tests/simgpu`) on nodes of its own. The last test
lets the first node die, which the others share.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import API, ApiError, KernelClient, wait_for
from tests.harness.gpus import GpuNode, checksum, end_all, hold
from tests.harness.server import Home, JupyterServer, shared_folder
from tests.simgpu.simgpu import gpu

pytestmark = pytest.mark.root

MIB = 1 << 20
CONFIG = {"GpuCkpt": {"gpu_timeout": 2.0}}
UUIDS = [gpu(number)["uuid"] for number in range(4)]

FELL_OFF = "The kernel's GPU (NVIDIA Simulated GPU) fell off the bus (Xid 79)"

#: A child with device memory of its own, which says on request what is in it.
CHILD = """
child = subprocess.Popen([sys.executable, "-u", "-c", '''
import sys; sys.path.insert(0, sys.argv[1])
from tests.simgpu.api import *
import os
gpu = Gpu(0)
data = gpu.upload(os.urandom(1 << 20))
for line in sys.stdin:
    print(gpu.checksum(data, 1 << 20))
''', sys.path[0]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
def of_child():
    print(file=child.stdin, flush=True)
    return child.stdout.readline().strip()
print(of_child())
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with shared_folder("gpus") as folder:
        yield folder


@pytest.fixture(scope="module")
def node(place: Path) -> Iterator[GpuNode]:
    with GpuNode("gpu-one", place, gpu(0), gpu(1)) as one:
        yield one


@pytest.fixture(scope="module")
def server(place: Path, node: GpuNode) -> Iterator[JupyterServer]:
    with JupyterServer(Home(place / "home"), node=node, config=CONFIG) as running:
        yield running


@pytest.fixture
def kernel(server: JupyterServer, node: GpuNode, request: Any) -> Iterator[KernelClient]:
    """A kernel of the test's own; all of its memory is free afterwards."""
    node.machine.faults()
    one = server.client.start(server.home.add_notebook(f"{abs(hash(request.node.name))}.ipynb"))
    yield one
    if not node.alive:
        return
    end_all(server.client, node)


def listeners(node: GpuNode) -> str:
    """Programs that listen to what GPUs report."""
    return str(node.run(["pgrep", "-f", "gpus/xids[.]py"], check=False).stdout)


@contextlib.contextmanager
def reports(node: GpuNode, code: int, number: int) -> Iterator[None]:
    """For the block, let a GPU report an error all the time."""
    over = threading.Event()

    def report() -> None:
        while not over.wait(0.02):
            node.machine.xid(code, gpu=number)

    with ThreadPoolExecutor(1) as pool:
        reporting = pool.submit(report)
        try:
            yield
        finally:
            over.set()
        reporting.result()


def test_two_gpus_and_two_processes_come_back_here(
    server: JupyterServer, kernel: KernelClient
) -> None:
    client = server.client
    sums = [hold(kernel), hold(kernel, ordinal=1, name="other"), kernel.run(CHILD)]

    def now() -> list[str]:
        return [checksum(kernel), checksum(kernel, name="other"), kernel.run("print(of_child())")]

    saved = client.save(kernel)["result"]
    assert not saved["warnings"]
    assert now() == sums

    state = client.get(f"{API}states/{saved['state_id']}")
    assert state["restorable"]
    of_gpus = state["gpu"]
    assert (of_gpus["processes"], of_gpus["driver"]) == (2, "580.95.05")
    assert of_gpus["memory"] >= 3 * MIB
    assert [(one["uuid"], one["used"]) for one in of_gpus["gpus"]] == [
        (UUIDS[0], True),
        (UUIDS[1], True),
    ]
    assert [[here["uuid"] for here in one["choices"]] for one in of_gpus["gpus"]] == [UUIDS[:2]] * 2
    kernel.run("gpu_data.use(); gpu_data.write(data, bytes(MIB))")
    assert now() != sums
    client.restore(saved["state_id"])
    assert now() == sums


def test_a_state_says_what_of_it_is_a_gpus_memory(
    server: JupyterServer, node: GpuNode, kernel: KernelClient
) -> None:
    """Though it went through the host's memory; also of a parked kernel, and of a copy."""
    client, size = server.client, 24 * MIB

    def saved(one: KernelClient, what: str = "size") -> tuple[str, dict[str, int]]:
        state_id = client.save(one)["result"]["state_id"]
        contents = client.get(f"{API}states/{state_id}/contents")
        kinds = {kind["kind"]: kind[what] for kind in contents["kinds"]}
        assert sum(kinds.values()) == contents[what]
        return state_id, kinds

    def is_told_apart(kinds: dict[str, int]) -> bool:
        return size <= kinds["gpu"] < size + MIB and kinds["anon"] < size

    hold(kernel, 24)
    assert is_told_apart(saved(kernel)[1])
    kernel.run(f"gpu_data.use(); gpu_data.write(data + {4 * MIB}, os.urandom(MIB))")
    state_id, new = saved(kernel, "new")
    assert MIB <= new["gpu"] < 3 * MIB
    client.done(dict(client.post(f"{API}kernels/{kernel.id}/park")))
    assert is_told_apart(saved(kernel)[1])
    client.done(dict(client.post(f"{API}kernels/{kernel.id}/unpark")))
    copy = client.connect(client.restore(state_id, mode="new")["result"]["kernel_id"])
    state_id, kinds = saved(copy)
    assert is_told_apart(kinds)
    told = command(server, node, "inspect", state_id).splitlines()
    rows = [line for line in told if line.startswith("GPU memory ")]
    assert "25." in rows[-1], rows


def test_a_hibernated_kernel_frees_its_gpu_and_a_copy_has_memory_of_its_own(
    server: JupyterServer, node: GpuNode, kernel: KernelClient
) -> None:
    client = server.client
    data = hold(kernel)

    def begin() -> Any:
        try:
            return client.post(f"{API}kernels/{kernel.id}/hibernate")
        except ApiError as error:
            assert error.body["reason"] == "busy"  # the server has not heard the cell's end yet
            return None

    operation = client.done(dict(wait_for("the kernel is idle", begin, 30)))
    assert node.machine.used(0) == 0
    wait_for("nothing listens", lambda: not listeners(node), 30)
    result = client.restore(operation["result"]["state_id"], mode="new")["result"]
    copy = client.connect(result["kernel_id"])
    assert checksum(copy) == data
    copy.run("gpu_data.use(); gpu_data.write(data, bytes(MIB))")
    # The cell wakes it.
    assert checksum(kernel) == data
    assert node.machine.used(0) == 2 * MIB
    client.delete(f"api/kernels/{copy.id}")
    assert listeners(node)
    client.post(f"api/kernels/{kernel.id}/restart")
    wait_for("nothing listens", lambda: not listeners(node), 30)


def test_a_gpu_without_room_is_refused_in_words(
    server: JupyterServer, kernel: KernelClient
) -> None:
    client = server.client
    data = hold(kernel, 20)
    hold(kernel, 20, ordinal=1, name="other")
    state_id = client.save(kernel)["result"]["state_id"]
    other = client.start(server.home.add_notebook("other.ipynb"))
    hold(other, 30)
    operation = client.finished(
        dict(client.post(f"{API}states/{state_id}/restore", {"mode": "new"}))
    )
    error = operation["error"]
    assert error["reason"] == "not_restorable"
    assert "of GPU memory, and" in error["message"] and "are free here" in error["message"]
    assert checksum(kernel, 20) == data
    # In its own place there is room: its own.
    client.restore(state_id)
    assert checksum(kernel, 20) == data


def test_work_on_the_gpu_is_waited_for_and_not_for_ever(
    server: JupyterServer, kernel: KernelClient
) -> None:
    client = server.client
    data = hold(kernel)
    kernel.run("gpu_data.launch('spin', ms=500)")
    client.save(kernel)
    kernel.run("gpu_data.launch('spin', ms=4500); gpu_data.launch('add', data, 0)")
    operation = client.finished(client.begin_save(kernel))
    assert operation["error"]["reason"] == "busy"
    assert "did not end in time" in operation["error"]["message"]
    # And that is said while it is so.
    assert operation["phases"]["gpu"] - operation["phases"]["dumping"] >= 1.0
    kernel.run("gpu_data.synchronize()")
    assert checksum(kernel) == data
    client.save(kernel)


@pytest.mark.parametrize("step", ["Lock", "Checkpoint"])
def test_a_driver_that_fails_before_the_save_leaves_the_kernel_as_it_was(
    server: JupyterServer, node: GpuNode, kernel: KernelClient, step: str
) -> None:
    client = server.client
    data = hold(kernel)
    states = client.states(kernel=kernel.id)
    node.machine.faults(f"cuCheckpointProcess{step} * error 999")
    operation = client.finished(client.begin_save(kernel))
    assert operation["error"]["reason"] == "dump_failed"
    assert "the kernel runs on" in operation["error"]["message"]
    assert client.states(kernel=kernel.id) == states
    assert checksum(kernel) == data
    node.machine.faults()
    client.save(kernel)


@pytest.mark.parametrize("step", ["Restore", "Unlock"])
def test_a_gpu_that_is_not_given_back_after_a_save(
    server: JupyterServer, node: GpuNode, kernel: KernelClient, step: str
) -> None:
    """The kernel is restored from that save, or by its user when the driver works again."""
    client = server.client
    data = hold(kernel)
    events = client.events()
    node.machine.faults(f"cuCheckpointProcess{step} * error 999")
    operation = client.begin_save(kernel)
    events.wait_for("operation", operation_id=operation["id"], phase="storing", timeout=60)
    if step == "Restore":
        node.machine.faults()
    saved = client.done(operation)["result"]
    (warning,) = saved["warnings"]
    assert "did not give the kernel its GPU back" in warning
    if step == "Restore":
        told = events.wait_for("kernel", action="restored", timeout=60)
        assert "did not give the kernel its GPU back" in told["message"]
    else:
        events.wait_for("kernel", action="restore_failed", timeout=60)
        node.machine.faults()
        kernel = client.connect(kernel.id)  # an empty one
        client.restore(saved["state_id"])
    assert checksum(kernel) == data
    client.save(kernel)


def test_a_driver_that_fails_at_a_restore_leaves_a_state_that_is_restored_later(
    server: JupyterServer, node: GpuNode, kernel: KernelClient
) -> None:
    client = server.client
    data = hold(kernel)
    state_id = client.save(kernel)["result"]["state_id"]
    for step, mode in (("Restore", "new"), ("Unlock", "rollback")):
        events = client.events()
        node.machine.faults(f"cuCheckpointProcess{step} * error 999")
        node.run(["kill", "-9", str(kernel.pid)])
        told = events.wait_for("kernel", action="restore_failed", timeout=60)
        assert (told["cause"], told["state_id"]) == ("death", state_id)
        assert "could not restore the kernel's GPU memory" in told["message"]
        assert "state is kept" in told["message"]
        node.wait_free(0)  # nothing half restored is left
        # The same where its user asks for it.
        kernel = client.connect(kernel.id)
        kernel.run("x = 1")
        restore = dict(client.post(f"{API}states/{state_id}/restore", {"mode": mode}))
        error = client.finished(restore)["error"]
        assert error["reason"] == "restore_failed" and "nvidia-smi" in error["hint"]
        node.wait_free(0)
        node.machine.faults()
        state = client.get(f"{API}states/{state_id}")
        assert state["restorable"] and state["damage"] is None
        client.restore(state_id)
        assert checksum(kernel) == data


def test_a_gpu_falls_off_the_bus_and_the_kernel_comes_back_on_the_other_one(
    server: JupyterServer, node: GpuNode, kernel: KernelClient
) -> None:
    client = server.client
    data = hold(kernel)
    state_id = client.save(kernel)["result"]["state_id"]

    def listens() -> bool:
        node.machine.xid(31, gpu=1)
        return "Xid 31" in server.log()

    wait_for("the server hears of errors", listens, 30)
    events = client.events()
    node.machine.xid(79, gpu=0, lost=True)
    # It lives on, and its user is told at once what to do.
    told = events.wait_for("kernel", action="gpu_lost", kernel_id=kernel.id, timeout=60)
    words = f"{FELL_OFF}. Restore its last saved state."
    assert (told["message"], told["state_id"]) == (words, state_id)
    assert client.get(f"{API}kernels/{kernel.id}")["gpu_lost"] == words
    said = command(server, node, "kernels")
    assert ", GPU lost" in said and words in said
    assert kernel.execute("gpu_data.use(); gpu_data.read(data, 1)").error is not None
    # The driver says it again and again, also while the kernel comes back elsewhere.
    with reports(node, 79, 0):
        node.run(["kill", "-9", str(kernel.pid)])
        told = events.wait_for("kernel", action="restored", timeout=60)
    node.machine.xid(998, gpu=0)
    wait_for("all of it is heard", lambda: "Xid 998" in server.log(), 30)
    assert (told["cause"], told["state_id"]) == ("death", state_id)
    assert told["message"] == f"{FELL_OFF}: restored on another GPU."
    assert client.get(f"{API}kernels/{kernel.id}")["gpu_lost"] is None
    assert len(events.of("kernel", action="gpu_lost")) == 1
    assert checksum(kernel) == data
    assert kernel.run("print(gpu_data.uuid)") == UUIDS[1]
    assert node.machine.used(1) == MIB
    # It is saved there, and that GPU is the one that is listened to.
    client.save(kernel)
    broken = [check for check in client.get(f"{API}doctor")["checks"] if check["name"] == "GPU"]
    assert len(broken) == 1 and broken[0]["status"] == "warning"
    node.machine.xid(48, gpu=1)
    wait_for("it is heard", lambda: "Xid 48" in server.log(), 30)
    events = client.events()
    node.run(["kill", "-9", str(kernel.pid)])
    told = events.wait_for("kernel", action="restored", timeout=60)
    assert "had reported an error (Xid 48: memory of the GPU" in told["message"]
    assert checksum(kernel) == data
    client.delete(f"api/kernels/{kernel.id}")
    node.wait_free(1)
    node.machine.become(gpu(0), gpu(1))
    client.get(f"{API}doctor")  # which asks the driver anew


def command(server: JupyterServer, node: GpuNode, *argv: str, code: int = 0) -> str:
    """What ``jupyter gpu-ckpt`` prints on the node; fails unless its exit status is `code`."""
    source = "from jupyter_gpu_ckpt.cli.main import main; main()"
    line = [sys.executable, "-c", source, *argv, "--url", server.base_url]
    environment = {**server.home.environment(), "JUPYTER_TOKEN": server.token}
    done = node.run(line, env=environment, check=False)
    assert done.returncode == code, done.stdout
    return str(done.stdout)


#: What another node has and is, why a restore is refused there, and why one by hand onto its first.
OTHER_NODES: list[tuple[list[dict[str, Any]], dict[str, Any], str, str]] = [
    ([gpu(2)], {}, "2 GPUs at the save, and here are 1", "2 GPUs at the save, and here are 1"),
    ([gpu(2, name="Other", chip="X"), gpu(3)], {}, "Too few GPUs", "is of another kind"),
    ([gpu(2, memory=MIB // 2), gpu(3)], {}, "Too few GPUs", "smaller"),
    (
        [gpu(2), gpu(3)],
        {"driver": "575.51.02", "cuda": 12090},
        "older than at the save",
        "older than at the save",
    ),
    ([gpu(2, mig=True), gpu(3, mig=True)], {}, "MIG is on", "has MIG on"),
    ([gpu(2), gpu(4)], {}, "", f"no GPU {UUIDS[3]}, which was chosen"),
]


def test_a_node_dies_and_the_kernel_comes_back_on_other_gpus(
    server: JupyterServer, place: Path, node: GpuNode, kernel: KernelClient
) -> None:
    data, other = hold(kernel), hold(kernel, ordinal=1, name="other")
    state_id = server.client.save(kernel)["result"]["state_id"]
    node.kill()
    server.kill()
    with (
        GpuNode("gpu-two", place, gpu(2), gpu(3)) as second,
        JupyterServer(server.home, node=second, port=server.port, config=CONFIG) as there,
    ):
        client = there.client
        client.wait_lost(1)
        for gpus, settings, words, by_hand in OTHER_NODES:
            second.machine.become(*gpus, **settings)
            client.get(f"{API}doctor")  # which asks the driver anew
            onto = UUIDS[2] if words else UUIDS[3]
            asked: list[tuple[str, dict[str, Any], str]] = [
                (f"lost/{kernel.id}", {}, words),
                (f"states/{state_id}", {"mode": "new", "gpu_map": {UUIDS[0]: onto}}, by_hand),
            ]
            for path, body, why in asked[0 if words else 1 :]:
                operation = client.finished(dict(client.post(f"{API}{path}/restore", body)))
                error = operation["error"]
                assert error["reason"] == "not_restorable" and why in error["message"], error
                assert error["hint"]
            assert client.get("api/kernels") == []
            if "other" not in by_hand and words:
                continue
            # By command it is the same, and nothing else.
            pair = f"--gpu-map={UUIDS[0]}={onto}"
            said = command(there, second, "restore", state_id, pair, code=1)
            assert by_hand in said and "Traceback" not in said
            assert client.get("api/kernels") == []
        second.machine.become(gpu(2), gpu(3))
        client.get(f"{API}doctor")
        # The one is chosen, the other is found.
        chosen = {"gpu_map": {UUIDS[0]: UUIDS[3]}}
        client.done(dict(client.post(f"{API}lost/{kernel.id}/restore", chosen)))
        back = client.connect(kernel.id)
        assert (checksum(back), checksum(back, name="other")) == (data, other)
        assert back.run("print(gpu_data.uuid, gpu_other.uuid)").split() == UUIDS[:1:-1]
        # The other way round, by hand.
        said = command(there, second, "inspect", state_id)
        assert "GPU memory" in said and UUIDS[0] in said and UUIDS[1] in said
        swapped = [f"--gpu-map={UUIDS[0]}={UUIDS[2]}", f"--gpu-map={UUIDS[1]}={UUIDS[3]}"]
        command(there, second, "restore", state_id, *swapped)
        assert (checksum(back), checksum(back, name="other")) == (data, other)
        assert back.run("print(gpu_data.uuid, gpu_other.uuid)").split() == UUIDS[2:]
