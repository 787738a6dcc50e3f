"""Images that CRIU gets through a socket: what comes back, what goes wrong, what stays bounded."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capture import images
from jupyter_gpu_ckpt.capture.stream import SOCKET, ImageServer, is_streamed
from jupyter_gpu_ckpt.capture.supervisor import Supervisor
from jupyter_gpu_ckpt.errors import CkptError

from .conftest import RunningKernel

PIECE = 1 << 20


class Elsewhere:
    """The streamed files of an image directory, moved out of it, as the store would give them.

    Pieces lie in two buffers, which is all that is promised of them.
    """

    def __init__(self, images_dir: Path) -> None:
        self.images_dir = images_dir
        self.folder = images_dir.with_name(images_dir.name + "-elsewhere")
        self.folder.mkdir(mode=0o700)
        for path in images_dir.iterdir():
            if is_streamed(os.fsencode(path.name)):
                path.rename(self.folder / path.name)
        self.sizes = {os.fsencode(p.name): p.stat().st_size for p in self.folder.iterdir()}
        #: Called before each piece with the file's name and the offset.
        self.before: Callable[[bytes, int, threading.Event], None] = lambda *_: None

    @contextmanager
    def open(self, name: bytes, over: threading.Event) -> Iterator[Iterator[memoryview]]:
        with open(self.folder / os.fsdecode(name), "rb", buffering=0) as file:
            yield self._pieces(name, file.fileno(), over)

    def _pieces(self, name: bytes, fd: int, over: threading.Event) -> Iterator[memoryview]:
        buffers = [memoryview(bytearray(PIECE)) for _ in range(2)]
        for number, offset in enumerate(range(0, self.sizes[name], PIECE)):
            self.before(name, offset, over)
            buffer = buffers[number % 2]
            buffer[:] = bytes(PIECE)  # who still reads it would notice
            yield buffer[: os.preadv(fd, [buffer], offset)]

    def serve(self) -> closing[ImageServer]:
        return closing(ImageServer(self.images_dir, self.sizes, self.open))


def restore(kernel: RunningKernel, images_dir: Path) -> Supervisor:
    images.prepare_for_restore(images_dir)
    kernel.supervisor = Supervisor.restore(
        kernel.kernel_capture,
        images_dir,
        pids=images.all_pids(images_dir),
        hold=True,
        hold_timeout=20,
        timeout=30,
        stream=True,
        log=kernel.log,
    )
    kernel.supervisors.append(kernel.supervisor)
    return kernel.supervisor


def goes_on(kernel: RunningKernel, supervisor: Supervisor) -> None:
    kernel.pid = supervisor.wait_started(40)
    kernel.wait_for_reconnection()
    supervisor.release()


#: Contents in all the places from which CRIU reads files other than plain memory.
CONTENTS = """
import mmap, os, random, socket, tempfile
noise = random.Random(1).randbytes
file = tempfile.TemporaryFile(); file.write(noise(3_000_000)); file.flush(); file.seek(0)
sparse = tempfile.TemporaryFile(); sparse.write(b"a" * 5000); sparse.seek(40 << 20)
sparse.write(b"b" * 300_000); sparse.flush(); sparse.seek(0)
memory = os.fdopen(os.memfd_create("m"), "w+b"); memory.write(noise(2_000_000)); memory.flush()
shared = mmap.mmap(-1, 5 << 20); shared.write(noise(5 << 20))
r, w = os.pipe(); os.write(w, noise(50_000))
a, b = socket.socketpair(); a.sendall(noise(30_000))
c, d = socket.socketpair(type=socket.SOCK_DGRAM); [c.send(noise(1000 + n)) for n in range(5)]
fifo = os.getcwd() + "/fifo"; os.mkfifo(fifo); f = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
os.write(f, noise(9_000))
data = bytearray(noise(7_654_321))
"""
LOOK = """
import hashlib
def look():
    memory.seek(0); shared.seek(0)
    yield from (file.read(), sparse.read(), memory.read(), shared.read(), os.read(r, 99_999))
    yield b.recv(99_999, socket.MSG_WAITALL | socket.MSG_DONTWAIT)
    yield b"".join(d.recv(9999) for n in range(5))
    yield os.read(f, 99_999)
    yield data
sums = [hashlib.sha256(x).hexdigest() for x in look()]
print(*sums)
"""


def test_whatever_has_contents_comes_back(kernel: RunningKernel) -> None:
    kernel.run(CONTENTS)
    images_dir, _ = kernel.dump()
    expected = kernel.run(LOOK)
    assert len(set(expected.split())) == 9
    kernel.kill()
    elsewhere = Elsewhere(images_dir)
    assert {name.split(b"-")[0] for name in elsewhere.sizes} == {b"pages", b"ghost"}
    with elsewhere.serve() as server:
        goes_on(kernel, restore(kernel, images_dir))
        server.check()
    assert not (images_dir / SOCKET).exists()
    assert kernel.run(LOOK) == expected


def test_many_processes_read_at_once(kernel: RunningKernel) -> None:
    kernel.run(
        "import hashlib, os, random\n"
        "def child(n):\n"
        "    if os.fork() == 0:\n"
        "        data = bytearray(random.Random(n).randbytes(4_000_000 + n))\n"
        "        os.write(ready[1], b'.')\n"
        "        os.read(go[0], 1)\n"
        "        os.write(ready[1], hashlib.sha256(data).digest())\n"
        "        os._exit(0)\n"
        "ready, go = os.pipe(), os.pipe()\n"
        "for n in range(8): child(n)\n"
        "got = b''\n"
        "while len(got) < 8: got += os.read(ready[0], 8)"
    )
    images_dir, _ = kernel.dump()
    kernel.kill()
    elsewhere = Elsewhere(images_dir)
    assert len(elsewhere.sizes) > 8
    with elsewhere.serve() as server:
        goes_on(kernel, restore(kernel, images_dir))
        server.check()
    kernel.run(
        "os.write(go[1], b'.' * 8)\n"
        "got = b''\n"
        "while len(got) < 8 * 32: got += os.read(ready[0], 32)\n"
        "found = {got[n:n + 32] for n in range(0, len(got), 32)}\n"
        "for n in range(8):\n"
        "    data = random.Random(n).randbytes(4_000_000 + n)\n"
        "    assert hashlib.sha256(data).digest() in found"
    )


def nobody_is_left(kernel: RunningKernel, images_dir: Path) -> None:
    kernel.supervisor.wait(10)
    assert not any(Path(f"/proc/{pid}").exists() for pid in images.all_pids(images_dir))


@pytest.fixture
def saved(kernel: RunningKernel) -> Elsewhere:
    kernel.run(
        "x = 41; data = bytearray(40_000_000)\nfor n in range(0, len(data), 99): data[n] = 7"
    )
    images_dir, _ = kernel.dump()
    kernel.kill()
    return Elsewhere(images_dir)


def comes_back(kernel: RunningKernel, saved: Elsewhere) -> None:
    """The same images, once more and whole."""
    saved.before = lambda *_: None
    with saved.serve():
        goes_on(kernel, restore(kernel, saved.images_dir))
    assert kernel.run("print(x + 1, data.count(7))") == "42 404041\n"


def test_a_file_that_ends_in_the_middle_ends_the_restore(
    kernel: RunningKernel, saved: Elsewhere
) -> None:
    def fail(name: bytes, offset: int, over: threading.Event) -> None:
        if offset >= 20 * PIECE:
            raise CkptError("state_damaged", "The block is not as it was.")

    saved.before = fail
    with saved.serve() as server:
        supervisor = restore(kernel, saved.images_dir)
        server.when_failed(supervisor.kill)
        with pytest.raises(CkptError):
            supervisor.wait_started(40)
        with pytest.raises(CkptError, match="not as it was"):
            server.check()
    nobody_is_left(kernel, saved.images_dir)
    comes_back(kernel, saved)


def test_criu_notices_by_itself_too(kernel: RunningKernel, saved: Elsewhere) -> None:
    def fail(name: bytes, offset: int, over: threading.Event) -> None:
        if offset >= 20 * PIECE:
            raise ZeroDivisionError

    saved.before = fail
    with saved.serve() as server:
        with pytest.raises(CkptError) as caught:
            restore(kernel, saved.images_dir).wait_started(40)
        assert caught.value.reason == "restore_failed"
        with pytest.raises(CkptError) as caught:
            server.check()
        assert caught.value.reason == "internal"
    nobody_is_left(kernel, saved.images_dir)


def test_a_restore_is_given_up_in_the_middle(kernel: RunningKernel, saved: Elsewhere) -> None:
    reached = threading.Event()

    def hang(name: bytes, offset: int, over: threading.Event) -> None:
        if offset >= 20 * PIECE:
            reached.set()
            over.wait(30)

    saved.before = hang
    with saved.serve() as server:
        supervisor = restore(kernel, saved.images_dir)
        assert reached.wait(30)
        supervisor.kill()
        with pytest.raises(CkptError) as caught:
            supervisor.wait_started(20)
        assert caught.value.reason == "cancelled"
        nobody_is_left(kernel, saved.images_dir)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    server.check()
    comes_back(kernel, saved)


# --- without CRIU -----------------------------------------------------------------------------


class Client:
    """What CRIU does, one step at a time."""

    def __init__(self, images_dir: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        fd = os.open(images_dir, os.O_PATH)
        self.socket.connect(f"/proc/self/fd/{fd}/{SOCKET}")
        os.close(fd)

    def ask(self, name: bytes) -> bool:
        message = b"\x0a" + bytes([len(name)]) + name
        self.socket.sendall(struct.pack("<I", len(message)) + message)
        answer = self.socket.recv(6)
        assert answer[:5] == b"\x02\0\0\0\x08"
        return bool(answer[5])

    def read(self, name: bytes) -> int:
        assert self.ask(name)
        read, write = os.pipe()
        socket.send_fds(self.socket, [b"\0"], [write])
        os.close(write)
        return read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Longer than the address of a socket may be.
    folder = tmp_path / ("deep" * 40)
    folder.mkdir(mode=0o700)
    (folder / "core-1.img").write_bytes(b"small")
    (folder / "mm-1.img").write_bytes(os.urandom(300_000))
    (folder / "empty.img").touch()
    (folder / "link.img").symlink_to("core-1.img")
    (folder / "sub").mkdir()
    (folder / "pages-1.img").write_bytes(os.urandom(5 * PIECE + 4096))
    (folder / "pages-2.img").write_bytes(os.urandom(PIECE + 1))
    return folder


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def whole(fd: int, step: int = 1 << 16) -> bytes:
    found = bytearray()
    while data := os.read(fd, step):
        found += data
    os.close(fd)
    return bytes(found)


@pytest.mark.parametrize("step", [1 << 20, 77_777, 4096])
def test_a_slow_reader_gets_what_was_there(folder: Path, step: int) -> None:
    """Memory that a pipe refers to is not used again before it was read."""
    expected = {path.name: path.read_bytes() for path in folder.glob("*-?.img")}
    elsewhere = Elsewhere(folder)
    with elsewhere.serve():
        client = Client(folder)
        opened = {name: client.read(os.fsencode(name)) for name in expected}
        for name, fd in opened.items():
            assert whole(fd, step) == expected[name]
        assert whole(client.read(b"empty.img")) == b""
        assert not client.ask(b"fdinfo-1.img")


@pytest.mark.parametrize("name", [b"../secret", b"sub", b"link.img", b".", b"/etc/passwd", b"a\0b"])
def test_only_files_of_the_folder_are_served(folder: Path, name: bytes) -> None:
    (folder.parent / "secret").write_text("secret")
    with Elsewhere(folder).serve():
        assert not Client(folder).ask(name)


@pytest.mark.parametrize(
    "message", [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x03\0\0\0abc", b"\x05\0\0\0\x0a\x7fabc"]
)
def test_nonsense_is_one_clear_error(folder: Path, message: bytes) -> None:
    failed = threading.Event()
    with Elsewhere(folder).serve() as server:
        server.when_failed(failed.set)
        client = Client(folder)
        client.socket.sendall(message)
        assert failed.wait(10)
        with pytest.raises(CkptError) as caught:
            server.check()
        assert caught.value.reason == "restore_failed"
        assert client.socket.recv(1) == b""


def test_something_else_than_a_pipe(folder: Path) -> None:
    failed = threading.Event()
    with Elsewhere(folder).serve() as server:
        server.when_failed(failed.set)
        client = Client(folder)
        assert client.ask(b"pages-1.img")
        with open(folder / "core-1.img", "r+b") as file:
            socket.send_fds(client.socket, [b"\0"], [file.fileno()])
        assert failed.wait(10)
    assert (folder / "core-1.img").read_bytes() == b"small"


def test_it_ends_whatever_the_other_side_does(folder: Path) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    elsewhere = Elsewhere(folder)
    with elsewhere.serve():
        pass  # nobody came
    with elsewhere.serve():
        client = Client(folder)
        pipes = [client.read(b"pages-1.img"), client.read(b"pages-2.img")]
        assert os.read(pipes[0], 1)  # and no more
        client.socket.sendall(b"\x03\0")
    os.close(pipes[0])
    os.close(pipes[1])
    client.socket.close()
    assert threading.active_count() == before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1]


@pytest.mark.parametrize("answers", [0, 1])
def test_criu_may_go_away_in_the_middle_of_a_request(folder: Path, answers: int) -> None:
    """It was killed, and what it was killed for is what the user is told."""
    with Elsewhere(folder).serve() as server:
        client = Client(folder)
        if answers:
            assert client.ask(b"pages-1.img")
        else:
            client.socket.sendall(struct.pack("<I", 13) + b"\x0a\x0bpages-1.img")
        client.socket.close()
        wait_until(lambda: not any(t.name == "gpu-ckpt-images" for t in threading.enumerate()))
    server.check()


def test_a_folder_that_cannot_hold_a_socket(folder: Path) -> None:
    with Elsewhere(folder).serve(), pytest.raises(CkptError) as caught:
        ImageServer(folder, {}, lambda *_: pytest.fail("nothing was asked for"))
    assert caught.value.reason == "store_unavailable"
    assert "spool_dir" in str(caught.value.hint)
