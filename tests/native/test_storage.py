"""Device memory that goes straight into files: custom storage, simulated, with real CRIU."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.native.driver import Capture, Event, Kernel, disk, empty, tmpfs, wait_until
from tests.native.gpu_node import HOLDER, PAIR, GpuNode, held, intact, reached
from tests.simgpu.simgpu import gpu

pytestmark = pytest.mark.root

Nodes = Callable[..., GpuNode]
Kernels = Callable[..., Kernel]
Held = tuple[GpuNode, Kernel, list[str]]

MIB = 1 << 20
SINCE = 13040
#: Three blocks of the copy and a piece.
LARGE = HOLDER.replace("1 << 20", "50 << 20")
#: Data on two GPUs, different ones.
TWO = """
gpus = [Gpu(0), Gpu(1)]
data = []
for number, one in enumerate(gpus):
    one.use()
    data.append(one.upload(os.urandom((number + 1) << 20)))
def sums():
    found = []
    for number, one in enumerate(gpus):
        one.use()
        found.append(one.checksum(data[number], (number + 1) << 20))
    return found
print("holds", *sums(), flush=True)
while True:
    print("sum", *sums(), "on", *(one.uuid for one in gpus), flush=True)
    time.sleep(0.02)
"""


def files(kernel: Kernel) -> list[str]:
    return sorted(path.name for path in kernel.images.glob("gpu-memory-*"))


def dump(kernel: Kernel, *extra: str, pid: int | None = None) -> Capture:
    return kernel.dump("--gpu-to-store", *extra, pid=pid)


def saved(kernel: Kernel, *extra: str) -> Event:
    empty(kernel.images)
    event = dump(kernel, *extra).finish()
    assert event["event"] == "done", event
    record: Event = event["gpu"]
    return record


def stored(record: Event) -> list[bool]:
    return [entry["stored"] for entry in record["processes"]]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Programs that are started meanwhile cannot write larger files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """One kernel for all that must leave it running; what `intact` looks for."""
    folder = tmp_path_factory.mktemp("large")
    here = GpuNode(folder / "node", gpu(0, memory=128 * MIB), cuda=SINCE)
    one = here.kernel(folder / "kernel", LARGE)
    yield here, one, held(one)
    one.close()
    here.stop()


def test_device_memory_goes_into_files_and_comes_back(node: Nodes, program: Kernels) -> None:
    here = node(gpu(0, memory=128 * MIB), cuda=SINCE)
    one = program(here, LARGE)
    sums = held(one)
    record = saved(one)
    assert stored(record) == [True] and record["problem"] is None
    assert record["processes"][0]["memory_bytes"] >= 50 * MIB
    assert files(one) == [f"gpu-memory-{one.pid}", f"gpu-memory-{one.pid}.parts"]
    data = one.images / f"gpu-memory-{one.pid}"
    assert data.stat().st_size == record["processes"][0]["memory_bytes"]
    # It came into the process at no time.
    pages = sum(path.stat().st_size for path in one.images.glob("pages-*.img"))
    assert pages < 50 * MIB
    intact(one, sums)
    one.kill()
    wait_until(lambda: here.machine.used() == 0, "device memory is free")
    one.restore().expect("restored")
    intact(one, sums)
    assert here.machine.used() > 0


def test_a_tree_of_processes_in_a_pid_namespace_is_stored_again(
    node: Nodes, program: Kernels
) -> None:
    one = program(node(cuda=SINCE), PAIR)
    sums = held(one, 2)
    assert stored(saved(one)) == [True, True]
    intact(one, sums)
    one.kill()
    pid = one.restore("--pid-namespace", "always").expect("restored")["pid"]
    intact(one, sums)
    empty(one.images)
    record = dump(one, pid=pid).finish()["gpu"]
    assert stored(record) == [True, True] and record["problem"] is None
    intact(one, sums)


def test_each_gpu_gets_what_belongs_there(node: Nodes, program: Kernels) -> None:
    one = program(node(gpu(0), gpu(1), cuda=SINCE), TWO)
    sums = held(one)
    saved(one)
    intact(one, sums)
    there = node(gpu(2), gpu(3), cuda=SINCE)
    there.take(one)
    old, new = [gpu(number)["uuid"] for number in (0, 1)], [gpu(n)["uuid"] for n in (2, 3)]
    one.kill()
    swapped = ["--gpu-map", f"{old[0]}={new[1]}", "--gpu-map", f"{old[1]}={new[0]}"]
    one.restore(*swapped).expect("restored")
    intact(one, sums, f"on {new[1]} {new[0]}")


def test_the_host_needs_no_room_for_it(large: Held) -> None:
    here, one, sums = large
    here.machine.faults("cuCheckpointOperationComplete 1 delay 2000")
    empty(one.images)
    capture = dump(one)
    data = one.images / f"gpu-memory-{one.pid}"
    wait_until(lambda: data.exists() and data.stat().st_size >= 50 * MIB, "all is copied")
    helper = next(
        path.parent
        for path in Path("/proc").glob("[0-9]*/comm")
        if path.read_text() == "kernel-capt-gpu\n" and _is_below(path.parent, capture.process.pid)
    )
    lines = dict(
        line.split(":", 1) for line in (helper / "status").read_text().splitlines() if ":" in line
    )
    assert int(lines["VmHWM"].split()[0]) * 1024 < 45 * MIB, lines["VmHWM"]
    assert capture.finish()["gpu"]["problem"] is None
    here.machine.faults()
    intact(one, sums)


def _is_below(process: Path, ancestor: int) -> bool:
    """Whether a process, named by its folder in /proc, descends from another."""
    pid = int(process.name)
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


@pytest.mark.parametrize(
    "fault",
    [
        "cuMemcpyDtoHAsync 2 error 999",
        "cuMemcpyHtoDAsync 2 error 999",
        "cuMemHostRegister * error 2",
        "cuCheckpointOperationComplete 1 error 999",
        "cuCheckpointOperationComplete 2 error 999",
        "cuCheckpointOperationComplete * after 999",
        "cuCheckpointProcessCheckpoint * after 999",
        # Its third look at the state: what is complete by then must not be completed again.
        "cuCheckpointProcessGetState 3 error 999",
        "cuCheckpointProcessGetState 3 error 999\ncuCheckpointOperationComplete 1 after 999",
        "cuCheckpointProcessGetState 3 error 999\ncuCheckpointProcessCheckpoint 1 after 999",
    ],
)
def test_what_fails_once_is_done_again(large: Held, fault: str) -> None:
    here, one, sums = large
    here.machine.faults(fault)
    record = saved(one)
    assert stored(record) == [True] and record["problem"] is None, record
    here.machine.faults()
    intact(one, sums)


@pytest.mark.parametrize(
    "fault", ["cuCheckpointProcessCheckpoint 1 error 2", "cuDevicePrimaryCtxRetain 1 error 2"]
)
def test_what_the_driver_does_not_show_comes_to_the_host(large: Held, fault: str) -> None:
    here, one, sums = large
    here.machine.faults(fault)
    record = saved(one)
    assert stored(record) == [False] and record["problem"] is None
    assert record["processes"][0]["memory_bytes"] >= 50 * MIB
    assert files(one) == []
    here.machine.faults()
    intact(one, sums)


def test_it_is_left_to_the_host_where_nobody_wants_it_otherwise(large: Held) -> None:
    _, one, sums = large
    empty(one.images)
    record = one.save()["gpu"]
    assert stored(record) == [False] and files(one) == []
    intact(one, sums)


def test_what_has_the_name_of_a_file_is_left_alone(large: Held) -> None:
    _, one, sums = large
    empty(one.images)
    other = one.folder / "other"
    other.write_text("another's")
    other.chmod(0o644)
    data = one.images / f"gpu-memory-{one.pid}"
    data.hardlink_to(other)
    assert stored(dump(one).finish()["gpu"]) == [True]
    assert other.read_text() == "another's"
    assert data.stat().st_size >= 50 * MIB and data.stat().st_mode & 0o777 == 0o600
    intact(one, sums)


@pytest.mark.parametrize("place", ["small", "in memory"])
def test_a_folder_that_is_not_good_for_it_leaves_it_to_the_host(
    node: Nodes, program: Kernels, tmp_path: Path, place: str
) -> None:
    """Without room for all that the GPU has, or room that is taken from the host's memory."""
    mounted = disk(tmp_path / place, 96) if place == "small" else tmpfs(tmp_path / place, "256m")
    with mounted as folder:
        one = program(node(gpu(0, memory=128 * MIB), cuda=SINCE), LARGE)
        one.images = folder / "images"
        one.images.mkdir(mode=0o700)
        sums = held(one)
        record = saved(one)
        assert stored(record) == [False] and record["problem"] is None
        assert files(one) == []
        intact(one, sums)
        one.kill()
        one.restore().expect("restored")
        intact(one, sums)


def test_what_cannot_be_written_is_kept_in_memory_and_the_save_undone(large: Held) -> None:
    here, one, sums = large
    empty(one.images)
    here.machine.faults("nvmlDeviceGetComputeRunningProcesses_v3 * error 999")
    with largest_file(20 * MIB):
        capture = dump(one)
    error = capture.finish()
    assert (error["event"], error["reason"]) == ("error", "no_space"), error
    here.machine.faults()
    intact(one, sums)


def test_a_disk_that_loses_what_was_written_is_found_out_before_the_gpu_is_freed(
    node: Nodes, program: Kernels, tmp_path: Path
) -> None:
    """It takes everything at first, as a thin volume or a network's does, and cannot keep it."""
    with disk(tmp_path / "disk", 300, really=24) as folder:
        here = node(gpu(0, memory=128 * MIB), cuda=SINCE)
        one = program(here, LARGE)
        one.images = folder / "images"
        one.images.mkdir(mode=0o700)
        sums = held(one)
        error = dump(one).finish()
        assert (error["event"], error["reason"]) == ("error", "no_space"), error
        assert "cannot be written" in error["message"]
        intact(one, sums)
        assert here.machine.used() > 0


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "killed"])
def test_a_save_that_is_given_up_in_the_middle_of_the_copy_is_undone(
    large: Held, reason: str
) -> None:
    here, one, sums = large
    here.machine.faults("cuMemcpyDtoHAsync * delay 300")
    empty(one.images)
    capture = dump(one, "--timeout", "0.8" if reason == "timeout" else "60")
    reached(capture, "checkpoint")
    if reason == "cancelled":
        capture.send("cancel")
    if reason == "killed":
        capture.process.kill()
        capture.wait()
        empty(one.images)  # what it was for is not wanted any more
    else:
        assert capture.finish()["reason"] == reason
    here.machine.faults()
    intact(one, sums)


def test_a_copy_back_that_fails_never_lets_the_kernel_run_on(node: Nodes, program: Kernels) -> None:
    """It would compute with other data than its own. The state is whole, and so restored."""
    here = node(cuda=SINCE)
    one = program(here)
    sums = held(one)
    here.machine.faults("cuMemcpyHtoDAsync * error 999")
    record = saved(one, "--gpu-timeout", "0.3")
    assert record["problem"]["reason"] == "gpu_failed"
    assert "cannot be written back" in record["problem"]["message"]
    seen = len([line for line in one.lines() if line.startswith("sum")])
    one.kill()
    for fault in (
        "cuMemcpyHtoDAsync * error 999",
        "cuCheckpointOperationComplete * error 999",
        "cuCheckpointOperationComplete 1 kill",
        "cuCheckpointOperationComplete 1 hang",
    ):
        here.machine.faults(fault)
        error = one.restore("--gpu-timeout", "0.3", "--timeout", "2.5").finish()
        assert error["event"] == "error", error
        assert error["reason"] in ("gpu_failed", "timeout"), error
        wait_until(lambda: here.machine.used() == 0, f"device memory is free after {fault}")
    here.machine.faults()
    assert len([line for line in one.lines() if line.startswith("sum")]) == seen
    one.restore().expect("restored")
    intact(one, sums)


@pytest.mark.parametrize(
    "fault", ["cuMemcpyDtoHAsync * error 999", "cuCheckpointOperationComplete * error 999"]
)
def test_memory_that_cannot_be_had_is_said(node: Nodes, program: Kernels, fault: str) -> None:
    """The driver knows no way back from there, so that the kernel is told to be stuck."""
    here = node(cuda=SINCE)
    one = program(here)
    held(one)
    here.machine.faults(fault)
    error = dump(one, "--timeout", "3").finish()
    assert (error["event"], error["reason"]) == ("error", "gpu_stuck"), error


def test_a_failure_that_can_be_undone_is_not_told_as_one_that_cannot(large: Held) -> None:
    """The driver does not tell that it has completed, and all is brought back from the file."""
    here, one, sums = large
    empty(one.images)
    here.machine.faults(*(f"cuCheckpointProcessGetState {i} error 999" for i in (3, 4, 5)))
    error = dump(one).finish()
    assert (error["event"], error["reason"]) == ("error", "gpu_failed"), error
    here.machine.faults()
    intact(one, sums)


def test_without_contexts_a_restore_is_refused_by_the_driver(node: Nodes, program: Kernels) -> None:
    here = node(cuda=SINCE)
    one = program(here)
    sums = held(one)
    saved(one)
    one.kill()
    here.machine.faults("cuDevicePrimaryCtxRetain * error 2")
    error = one.restore("--gpu-timeout", "0.3").finish()
    assert (error["event"], error["reason"]) == ("error", "gpu_failed"), error
    assert "CUDA_ERROR_INVALID_CONTEXT" in error["message"]
    here.machine.faults()
    one.restore().expect("restored")
    intact(one, sums)


def test_without_a_map_gpus_in_another_order_are_refused(node: Nodes, program: Kernels) -> None:
    """The driver goes by their order, so each would get the other's memory."""
    one = program(node(gpu(0), gpu(1), cuda=SINCE), TWO.replace("(number + 1) << 20", "1 << 20"))
    sums = held(one)
    saved(one)
    one.kill()
    there = node(gpu(1), gpu(0), cuda=SINCE)
    there.take(one)
    error = one.restore("--timeout", "5").finish()
    assert (error["event"], error["reason"]) == ("error", "gpu_failed"), error
    straight = [f"--gpu-map={gpu(n)['uuid']}={gpu(n)['uuid']}" for n in (0, 1)]
    one.restore(*straight).expect("restored")
    intact(one, sums)


def test_a_driver_without_it_refuses_such_a_state_in_words(node: Nodes, program: Kernels) -> None:
    here = node(cuda=SINCE)
    one = program(here)
    sums = held(one)
    saved(one)
    one.kill()
    there = node(cuda=13000)
    there.take(one)
    error = one.restore().finish()
    assert error["reason"] == "gpu_unsupported", error
    assert "13.4" in error["message"]
    here.take(one)
    one.restore().expect("restored")
    intact(one, sums)


@pytest.mark.parametrize("text", ["", "GPU-1 2\n", "x" * 9000, "{uuid} -4\n", "{uuid} 99999\n"])
def test_files_that_do_not_fit_are_refused(node: Nodes, program: Kernels, text: str) -> None:
    here = node(cuda=SINCE)
    one = program(here)
    held(one)
    saved(one)
    one.kill()
    parts = one.images / f"gpu-memory-{one.pid}.parts"
    parts.write_text(text.format(uuid=here.machine.gpus[0]["uuid"]))
    error = one.restore("--timeout", "5").finish()
    assert (error["event"], error["reason"]) == ("error", "gpu_failed"), error
    wait_until(lambda: here.machine.used() == 0, "device memory is free")


def test_a_park_takes_the_hosts_memory(node: Nodes, program: Kernels) -> None:
    here = node(cuda=SINCE)
    one = program(here)
    sums = held(one)
    for what in ("park", "unpark"):
        capture = here.capture(what, "--pid", str(one.pid))
        assert capture.finish()["event"] == "done"
        capture.close()
        assert (here.machine.used() == 0) == (what == "park")
    intact(one, sums)


def test_a_driver_that_hangs_when_memory_comes_back_is_asked_by_another(
    node: Nodes, program: Kernels
) -> None:
    """It has nothing but the files to bring it back from."""
    here = node(cuda=SINCE)
    one = program(here, PAIR)
    sums = held(one, 2)
    here.machine.faults("cuCheckpointProcessRestore 2 hang")
    record = saved(one, "--timeout", "4")
    assert stored(record) == [True, True]
    here.machine.faults()
    intact(one, sums)
