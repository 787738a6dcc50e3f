"""Uploads keep to a rate, and those of all servers of a node share one."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.store.bandwidth import SHARED, Bandwidth, NodeShare
from tests.harness.client import wait_for
from tests.harness.user import User

MIB = 1 << 20


class Clock(threading.Event):
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None and timeout > 0
        self.now += timeout
        return self.is_set()


class Share(NodeShare):
    """A share of a rate that is what the test says."""

    def __init__(self, total: float) -> None:
        super().__init__(Path(), 0.0)
        self.total = self.part = total

    def rate(self) -> float:
        return self.part

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        yield


def test_so_many_bytes_pass_in_a_time_the_first_at_once() -> None:
    clock = Clock()
    rate = Bandwidth(10.0, clock=clock)
    with rate.sending():
        for number in range(5):
            rate.wait(100, clock)
            assert clock.now == pytest.approx(100 + 10 * number)
        clock.now += 5  # the network is slow: that time counts
        rate.wait(100, clock)
        assert clock.now == pytest.approx(150)
    # A next try, or state, has no bytes more than the rest of the last one.
    with rate.sending():
        rate.wait(100, clock)
        assert clock.now == pytest.approx(160)
    clock.now += 1000  # and nobody makes up for more than a second
    with rate.sending():
        rate.wait(100, clock)
        assert clock.now == pytest.approx(1160)
        rate.wait(100, clock)
    assert clock.now == pytest.approx(1160 + 9)


def test_of_a_rate_of_many_none_pass_before_their_time() -> None:
    clock = Clock()
    rate = Bandwidth(0.0, Share(10.0), clock=clock)
    with rate.sending():
        for number in range(1, 6):
            rate.wait(100, clock)
            assert clock.now == pytest.approx(100 + 10 * number)
        clock.now += 1000  # nobody makes up for more than a second
        rate.wait(100, clock)
        rate.wait(100, clock)
        assert clock.now == pytest.approx(1150 + 9)


def test_the_rate_is_what_it_is_at_each_moment() -> None:
    clock, share = Clock(), Share(100.0)
    rate = Bandwidth(50.0, share, clock=clock)
    with rate.sending():
        rate.wait(100, clock)
        assert clock.now == 102  # its own is less
        share.part = 10.0
        rate.wait(100, clock)
        assert clock.now == 112
        share.part = 25.0
        rate.wait(25, clock)
        assert clock.now == 113
        clock.now += 1
        share.part = 50.0  # the others have gone, just now
        rate.wait(100, clock)
        assert clock.now == 114 + 75 / 50
    share.part = 50.0
    began = clock.now
    with rate.sending():
        rate.wait(50, clock)
    assert clock.now == began + 2, "for one second the others did not know"


def test_one_who_is_to_stop_waits_no_longer() -> None:
    clock = Clock()
    rate = Bandwidth(1.0, clock=clock)
    clock.set()
    with rate.sending():
        rate.wait(1000, clock)
    assert clock.now == 100


def test_without_a_limit_nothing_is_made(tmp_path: Path) -> None:
    rate = Bandwidth(0.0, NodeShare(tmp_path / "turns", 0.0))
    with rate.sending():
        rate.wait(1 << 40, threading.Event())
    assert not (tmp_path / "turns").exists()


def test_each_who_sends_has_an_equal_part(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    shares = [NodeShare(folder, 120.0) for _ in range(5)]
    assert shares[0].rate() == 120
    with shares[0].held():
        assert shares[0].rate() == 120
        assert shares[1].rate() == 60, "who comes next counts herself"
        with ExitStack() as stack:
            for count, share in enumerate(shares[1:], 2):
                stack.enter_context(share.held())
                assert {one.rate() for one in shares[:count]} == {120 / count}
        assert shares[0].rate() == 120
        # Open to everybody, and nobody can remove another's, or write it.
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert not list(folder.iterdir()), "nothing is left"


HOLDS = """
import sys, time
from pathlib import Path
from jupyter_gpu_ckpt.store.bandwidth import NodeShare
shares = [NodeShare(Path(sys.argv[1]), 120.0) for _ in range(int(sys.argv[2]))]
held = [share.held() for share in shares]
for one in held:
    one.__enter__()
print(shares[0].rate(), flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holders(folder: Path, count: int, user: User | None = None) -> Iterator[str]:
    """A process that holds so many parts, and what rate it has."""
    argv = [sys.executable, "-c", HOLDS, str(folder), str(count)]
    with subprocess.Popen(
        user.command(argv) if user else argv, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def test_the_part_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    mine = NodeShare(tmp_path, 120.0)
    with mine.held():
        with holders(tmp_path, 2) as rate:
            assert float(rate) == mine.rate() == 40
        assert mine.rate() == 120


@pytest.mark.root
def test_another_user_takes_no_more_than_a_users_part(shared: Path) -> None:
    folder, mine = shared / "turns", NodeShare(shared / "turns", 120.0)
    folder.mkdir()
    folder.chmod(0o1777)
    with mine.held(), holders(folder, 50, User()) as rate:
        assert mine.rate() == 60
        assert float(rate) == pytest.approx(60 / 50)
        with holders(folder, 1, User("jupyter-tester-b")) as other:
            assert mine.rate() == float(other) == 40


@pytest.mark.root
def test_who_can_make_no_file_shares_roots(shared: Path) -> None:
    folder = shared / "turns"  # as in pods, whose users have one id
    folder.mkdir(mode=0o755)
    (folder / SHARED).touch(0o644)
    watcher = NodeShare(folder, 120.0)  # who looks is one more
    with holders(folder, 1, User()) as rate:
        assert float(rate) == 120
        with holders(folder, 2, User()) as rate:
            assert float(rate) == 40 and watcher.rate() == 30
        with holders(folder, 400, User()) as rate:
            assert float(rate) == 120 / 256
            assert watcher.rate() == 120 / 257, "not less, whoever holds more"
    assert len(list(folder.iterdir())) == 1


#: Locks that hide others: from the first byte on to the end, and around a place of two bytes.
LOCKS = """
import fcntl, os, struct, sys, time
file = os.open(sys.argv[1], int(sys.argv[2]))
kind, start, length = map(int, sys.argv[3:])
fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, 0, start, length, 0))
print("locked", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def locked(path: Path, kind: int, start: int, length: int, user: User) -> Iterator[None]:
    """Another user's process that has a lock on a file."""
    flags = os.O_RDWR if kind == fcntl.F_WRLCK else os.O_RDONLY
    argv = [sys.executable, "-c", LOCKS, path, flags, kind, start, length]
    with subprocess.Popen(
        user.command(list(map(str, argv))), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "locked\n"
            yield
        finally:
            process.kill()


@pytest.mark.root
@pytest.mark.parametrize(("start", "length"), [(0, 0), (5, 0), (0, 1 << 62), (1 << 20, 2)])
def test_a_lock_of_many_bytes_hides_nobody(shared: Path, start: int, length: int) -> None:
    folder = shared / "turns"
    folder.mkdir(mode=0o755)
    (folder / SHARED).touch(0o644)
    hides = locked(folder / SHARED, fcntl.F_RDLCK, start, length, User())
    with hides, holders(folder, 2, User("jupyter-tester-b")) as rate:
        assert float(rate) == 120 / 256, "as if there were very many"
    with holders(folder, 2, User("jupyter-tester-b")) as rate:
        assert float(rate) == 60


@pytest.mark.root
def test_who_locks_the_file_of_another_keeps_her_from_nothing(shared: Path) -> None:
    folder, her = shared / "turns", NodeShare(shared / "turns", 120.0)
    with her.held():
        (file,) = folder.iterdir()
        # All that is left of it, so that she could not have a second place in it.
        with locked(file, fcntl.F_RDLCK, 1, 0, User()), NodeShare(folder, 120.0).held():
            assert her.rate() == 60
            with holders(folder, 1, User()) as his:
                assert her.rate() == 30 and float(his) == 60
    # Of one user id, as in containers, any may lock all that there is, before others come.
    folder.chmod(0o1777)
    file = folder / "upload-1000.lock"
    file.touch(0o644)
    os.chown(file, User().uid, User().gid)
    with locked(file, fcntl.F_WRLCK, 0, 0, User()), holders(folder, 1, User()) as rate:
        assert float(rate) == 60, "the two of them"


@pytest.mark.root
def test_files_that_somebody_makes_up_hide_nobody_and_cost_little(shared: Path) -> None:
    folder = shared / "turns"
    folder.mkdir()
    folder.chmod(0o1777)
    user = User()
    for number in range(6000):
        path = folder / f"upload-{number}.lock"
        path.touch(0o644)
        os.chown(path, user.uid, user.gid)
    (folder / SHARED).unlink()  # not root's
    with holders(folder, 1, User("jupyter-tester-b")) as rate:
        mine = NodeShare(folder, 120.0)
        assert float(rate) == 120 and mine.rate() == 60
        began = time.process_time()
        mine.rate()
        assert time.process_time() - began < 0.5
        for number in range(6000, 16400):
            (folder / f"any-{number}").touch()
        assert mine.rate() == 120 / 257, "slower, and never faster, where not all can be seen"


def test_a_file_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    one, other = NodeShare(tmp_path, 120.0), NodeShare(tmp_path, 120.0)
    with one.held():
        (file,) = tmp_path.iterdir()
        file.unlink()  # as what lies in /tmp for days is
        assert one.rate() == 120
        with other.held():
            assert other.rate() == one.rate() == 60
            assert len({*tmp_path.iterdir()} - {file}) == 2


def test_what_killed_servers_leave_is_removed(tmp_path: Path) -> None:
    with holders(tmp_path, 3):
        left = list(tmp_path.iterdir())
    assert len(left) == 3
    mine = NodeShare(tmp_path, 120.0)
    assert mine.rate() == 120
    assert sorted(tmp_path.iterdir()) == sorted(left), "it may be one who is about to lock it"
    for file in left:
        os.utime(file, (1, 1))
    assert mine.rate() == 120 and not list(tmp_path.iterdir())


def test_who_cannot_be_counted_is_told_once_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    share = NodeShare(tmp_path / "file", 120.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with share.held():
                assert share.rate() == 120
    (said,) = caplog.messages
    assert str(tmp_path / "file") in said and "Not a directory" in said and "mode 1777" in said


def test_whatever_somebody_puts_there_keeps_nobody_from_sending(tmp_path: Path) -> None:
    (tmp_path / SHARED).mkdir()
    (tmp_path / "upload-1.lock").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "upload-2.lock")
    mine = NodeShare(tmp_path, 120.0)
    with mine.held():
        assert mine.rate() == 120
    nowhere = NodeShare(tmp_path / "upload-2.lock", 120.0)
    with nowhere.held():
        assert nowhere.rate() == 120


UPLOADS = """
import sys, threading, time
from pathlib import Path
from jupyter_gpu_ckpt.store.bandwidth import Bandwidth, NodeShare
folder, rate, size, log = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
bandwidth, stop = Bandwidth(0.0, NodeShare(folder, rate)), threading.Event()
with bandwidth.sending():
    while True:
        bandwidth.wait(size, stop)
        with open(log, "a") as file:
            print(time.monotonic(), file=file, flush=True)
"""


def test_two_servers_together_keep_to_the_rate(tmp_path: Path) -> None:
    rate, size = 40_000.0, 1000
    logs = [tmp_path / "one", tmp_path / "other"]

    def times(log: Path) -> list[float]:
        return [float(line) for line in log.read_text().splitlines()] if log.exists() else []

    argv = [sys.executable, "-c", UPLOADS, str(tmp_path / "turns"), str(rate), str(size)]
    processes = [subprocess.Popen([*argv, str(log)]) for log in logs]
    try:
        wait_for("both send", lambda: all(len(times(log)) > 60 for log in logs), 60)
        processes[1].send_signal(signal.SIGKILL)
        processes[1].wait(20)
        died = time.monotonic()

        def sends_all() -> bool:
            """Whether the whole rate is the other's by now."""
            last = times(logs[0])
            return sum(max(died, last[-1] - 1) < at for at in last) * size > 0.8 * rate

        wait_for("the other has it all", sends_all, 60)
    finally:
        for process in processes:
            process.kill()
            process.wait(20)
    one, other = map(times, logs)
    # While both send, however slow the machine is, no more passes than may, and each has a part.
    begin, end = max(one[0], other[0]), other[-1]
    both = [sum(begin < at <= end for at in some) for some in (one, other)]
    assert sum(both) * size <= rate * (end - begin) + 2 * size + rate
    assert max(both) <= 2 * min(both) + rate / size
    assert len(one) * size <= rate * (one[-1] - one[0]) + 2 * rate
