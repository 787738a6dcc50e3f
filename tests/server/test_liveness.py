"""Whether a kernel's server counts as alive, while clocks are an hour off."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from jupyter_gpu_ckpt.capture import procfs
from jupyter_gpu_ckpt.liveness import Liveness, process_lives
from jupyter_gpu_ckpt.store import KernelRecord, Lease, StateStore
from jupyter_gpu_ckpt.store.clocks import file_system, has_one_clock

KERNEL = "0d6c7c8e-93a1-4f0e-8a9e-0123456789ab"
HOUR = 3600.0
#: Seconds; a sign of life comes every quarter of an interval.
TTL, INTERVAL = 1.2, 0.2


class Elsewhere:
    """A server on another node, which renews a kernel's lease by its own clock."""

    def __init__(self, root: Path, lease: Lease, skew: float) -> None:
        self._store = StateStore(root, "ada")
        self._skew = skew
        lease = msgspec.structs.replace(lease, renewed=time.time() + skew)
        self.record = KernelRecord(kernel_id=KERNEL, kernel_name="p", display_name="P", lease=lease)
        self._store.put_kernel(self.record)
        self._path = root / "ada" / "kernels" / KERNEL / "kernel.json"
        self.renew()

    def renew(self) -> None:
        """One sign of life, with the time of this node."""
        self._store.renew_kernel(self.record)
        if self._skew:
            when = time.time() + self._skew
            os.utime(self._path, (when, when))


@pytest.fixture
def here(tmp_path: Path) -> Liveness:
    return Liveness(StateStore(tmp_path, "ada"), ttl=TTL, interval=INTERVAL)


@pytest.fixture
def foreign(here: Liveness) -> Lease:
    """A lease of another node."""
    return msgspec.structs.replace(here.lease(), node_id="far", hostname="far")


@pytest.fixture
def nodes_own_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have the times of who writes them, as on Lustre."""
    monkeypatch.setattr("jupyter_gpu_ckpt.store.clocks._ONE_CLOCK", frozenset())


def seconds_until(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 30, "it does not happen"
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.usefixtures("nodes_own_clocks")
@pytest.mark.parametrize("skew", [HOUR, -HOUR, 0.0], ids=["fast", "slow", "right"])
def test_where_each_node_writes_its_own_time(
    here: Liveness, foreign: Lease, tmp_path: Path, skew: float
) -> None:
    there = Elsewhere(tmp_path, foreign, skew)
    end = time.monotonic() + 1.5 * TTL
    while time.monotonic() < end:
        there.renew()
        assert not here.has_run_out(KERNEL, foreign)
        time.sleep(INTERVAL / 4)
    took = seconds_until(lambda: here.has_run_out(KERNEL, foreign))
    assert took < TTL + 5, "not an hour"
    # Whoever looks for the first time is as patient, and no more.
    again = Liveness(StateStore(tmp_path, "ada"), ttl=TTL, interval=INTERVAL)
    assert skew == 0.0 or not again.has_run_out(KERNEL, foreign)
    assert seconds_until(lambda: again.has_run_out(KERNEL, foreign)) < TTL + 5


@pytest.mark.parametrize("skew", [HOUR, -HOUR], ids=["fast", "slow"])
def test_where_the_store_has_a_clock_what_the_lease_says_does_not_count(
    here: Liveness, foreign: Lease, tmp_path: Path, skew: float
) -> None:
    lease = msgspec.structs.replace(foreign, renewed=time.time() + skew)
    there = Elsewhere(tmp_path, lease, 0.0)
    assert has_one_clock(tmp_path)
    assert not here.has_run_out(KERNEL, lease)
    time.sleep(TTL + 0.1)
    # Who has never seen it before knows it at once.
    assert here.has_run_out(KERNEL, lease)
    there.renew()
    assert not here.has_run_out(KERNEL, lease)


def test_the_stores_clock_was_set_back(here: Liveness, foreign: Lease, tmp_path: Path) -> None:
    Elsewhere(tmp_path, foreign, HOUR)
    assert not here.has_run_out(KERNEL, foreign)
    assert seconds_until(lambda: here.has_run_out(KERNEL, foreign)) < TTL + 5


def test_a_server_that_slept_with_its_machine_may_go_on(
    here: Liveness, foreign: Lease, tmp_path: Path
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        start = procfs.started(process.pid)
        lease = msgspec.structs.replace(
            here.lease(), server_pid=process.pid, server_start=float(start or 0)
        )
        there = Elsewhere(tmp_path, lease, -HOUR)
        assert not here.has_run_out(KERNEL, lease)
        there.renew()
        assert not here.has_run_out(KERNEL, lease)
        # One that does not is frozen, which is as good as gone.
        assert seconds_until(lambda: here.has_run_out(KERNEL, lease)) < TTL + 5
        there.renew()
        assert not here.has_run_out(KERNEL, lease)
        process.kill()
        process.wait()
        assert here.has_run_out(KERNEL, lease)


def test_a_process_is_known_by_its_start_and_not_by_a_clock() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = procfs.started(process.pid)
        assert start is not None and process_lives(process.pid, float(start))
        assert not process_lives(process.pid, start - 1.0)
        assert abs(start / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not process_lives(process.pid, float(start)), "a zombie"
    assert procfs.started(process.pid) is None


def test_the_file_system_of_a_path_is_found(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(tmp_path) != "proc"
    (tmp_path / "link").symlink_to("/proc")
    assert file_system(tmp_path / "link" / "self") == "proc"
