"""A real S3 server (Ceph), and a proxy that counts requests and breaks things."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import unquote

from tests.harness.connections import Connections
from tests.harness.node import REPOSITORY
from tests.harness.ports import free_port

KEY, SECRET = "TESTKEY", "TESTSECRET"
_ENVIRONMENT = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}

_CLUSTER = "11111111-2222-3333-4444-555555555555"
_CONFIG = """
[global]
fsid = {cluster}
mon initial members = a
mon host = [v2:127.0.0.1:{mon_port}]
public network = 127.0.0.0/8
ms bind ipv6 = false
ms mon client mode = crc
auth cluster required = none
auth service required = none
auth client required = none
mon data = {folder}/mon
mon allow pool size one = true
mon max pg per osd = 1000
mon cluster log to file = false
# A cluster of one need not wait for others.
paxos propose interval = 0.02
paxos min wait = 0.01
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd class dir = {programs}/lib/rados-classes
osd class load list = *
osd class default list = *
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
plugin dir = {programs}/lib/ceph
erasure code dir = {programs}/lib/ceph/erasure-code
keyring = {folder}/keyring
run dir = {folder}
crash dir = {folder}
admin socket =
pid file =
log file = {folder}/$name.log
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw thread pool size = 32
"""


def fetched_by(script: str, program: str) -> Path:
    """Return a program of a server that a script in ``.ci/`` has fetched."""
    where = subprocess.run(
        [REPOSITORY / ".ci" / script, "--print"], capture_output=True, text=True, check=True
    )
    path = Path(where.stdout.strip()) / program
    assert path.exists(), f"no {path.name} here: run .ci/{script}"
    return path


def wait_for_port(port: int, process: subprocess.Popen[bytes], said: Path) -> None:
    """Wait until a server takes connections; if it ends, what it said is the error."""
    end = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < end and process.poll() is None, said.read_text()[-2000:]
        time.sleep(0.02)


class Like(NamedTuple):
    """What a request looks like: its method, and a part of its path."""

    method: str
    path: str


class ObjectServer(Protocol):
    """A server for objects, of one protocol or another."""

    bucket: str
    protocol: str
    port: int

    def options(self, port: int) -> dict[str, Any]:
        """Storage options for fsspec to reach the server, or the proxy, on a port."""

    def wrong_options(self, port: int) -> dict[str, Any]:
        """The same with credentials that are wrong, and contain ``wrong``, perhaps in base64."""

    def upload(self, name: str) -> Like:
        """What the request that writes an object looks like."""

    def download(self, name: str) -> Like:
        """What the requests that read what is in an object look like."""


class S3Server:
    """A Ceph cluster in three processes, with an S3 user and a bucket; its data is in memory.

    It takes about four seconds to start.
    """

    bucket = "states-of-tests"
    protocol = "s3"

    def __init__(self) -> None:
        self._programs = fetched_by("get-s3-server", "radosgw").parent
        self._folder = Path(tempfile.mkdtemp(prefix="s3-server-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port, mon_port = free_port(), free_port()
        config = _CONFIG.format(
            cluster=_CLUSTER, folder=self._folder, programs=self._programs,
            port=self.port, mon_port=mon_port,
        )  # fmt: skip
        for name, content in (("ceph.conf", config), ("keyring", "")):
            (self._folder / name).write_text(content)
        for name in ("mon", "osd"):
            (self._folder / name).mkdir()
        try:
            self._begin(mon_port)
        except BaseException:
            self.stop()
            raise

    def _begin(self, mon_port: int) -> None:
        monmap, osdmap = self._folder / "monmap", self._folder / "osdmap"
        self._run("monmaptool", "--create", "--fsid", _CLUSTER, "--addv", "a",
                  f"[v2:127.0.0.1:{mon_port}]", monmap)  # fmt: skip
        self._run("osdmaptool", "--createsimple", "1", "--clobber", osdmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--osdmap", osdmap)
        self._start("ceph-mon", "-i", "a")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", _CLUSTER)
        self._start("ceph-osd", "-i", "0")
        user = (
            "--uid=test",
            "--display-name=test",
            f"--access-key={KEY}",
            f"--secret-key={SECRET}",
        )
        self._run("radosgw-admin", "-n", "client.rgw", "user", "create", *user)
        self._start("radosgw", "-n", "client.rgw", "--no-mon-config")
        wait_for_port(self.port, self._processes[-1], self._folder / "radosgw.out")

        import s3fs

        s3fs.S3FileSystem(**options(self.port), skip_instance_cache=True).mkdir(self.bucket)

    def _command(self, program: str, *arguments: Any) -> list[str]:
        config = ("-c", self._folder / "ceph.conf") if program != "monmaptool" else ()
        return [str(part) for part in (self._programs / program, *config, *arguments)]

    def _run(self, program: str, *arguments: Any) -> None:
        done = subprocess.run(
            self._command(program, *arguments),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env=_ENVIRONMENT,
        )  # fmt: skip
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}{self._said()}"

    def _start(self, program: str, *arguments: Any) -> None:
        with (self._folder / f"{program}.out").open("wb") as out:
            command = self._command(program, *arguments, "-f")
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_ENVIRONMENT
                )
            )

    def _said(self) -> str:
        """What the programs wrote, for the message of a test that fails."""
        return "".join(path.read_text()[-2000:] for path in self._folder.glob("*.out"))

    def options(self, port: int) -> dict[str, Any]:
        """See :class:`ObjectServer`."""
        return options(port)

    def wrong_options(self, port: int) -> dict[str, Any]:
        """See :class:`ObjectServer`."""
        return {**options(port), "secret": "wrong"}

    def upload(self, name: str) -> Like:
        """See :class:`ObjectServer`."""
        return Like("PUT", name)

    def download(self, name: str) -> Like:
        """See :class:`ObjectServer`."""
        return Like("GET", name)

    def stop(self) -> None:
        """End the processes and forget what they stored."""
        for process in reversed(self._processes):
            process.kill()
            process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)


def options(port: int) -> dict[str, Any]:
    """Storage options for fsspec to reach the server, or the proxy, on a port."""
    return {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}


Kind = Literal[
    "401", "403", "503", "cut request", "cut response", "short response", "lost put", "hang"
]
#: What a server says that takes no request: S3's words for too many, Google's for the others.
_REFUSALS: dict[str, tuple[bytes, bytes]] = {
    "401": (
        b"Unauthorized",
        b'{"error": {"code": 401, "message": "Invalid Credentials",'
        b' "errors": [{"reason": "authError", "location": "Authorization"}]}}',
    ),
    "403": (
        b"Forbidden",
        b'{"error": {"code": 403, "message": "ada@example.org does not have'
        b' storage.objects.create access to the Google Cloud Storage object."}}',
    ),
    "503": (
        b"Slow Down",
        b"<Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>",
    ),
}


class Request(NamedTuple):
    """One request that came through: ``GET``, the path with the query, and when (monotonic)."""

    method: str
    path: str
    body: int
    at: float


class _Fault(NamedTuple):
    kind: Kind
    matches: Callable[[Request], bool]


class Proxy:
    """An HTTP proxy before the server, in a thread of its own.

    Attributes
    ----------
    requests
        What came through, in order.
    options
        Storage options for fsspec to go through here.
    rate
        Bytes a second that bodies go through with, each; ``None`` for no limit.
    """

    def __init__(
        self, server_port: int, options: Callable[[int], dict[str, Any]] = options
    ) -> None:
        self.requests: list[Request] = []
        self.rate: float | None = None
        self.port = free_port()
        self.options = options(self.port)
        self._server_port = server_port
        self._faults: list[list[Any]] = []
        self._listener: asyncio.Server | None = None
        self._connections = Connections(self._accept)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.up()

    def count(self, method: str = "", path: str = "") -> int:
        """How many requests had this method and this in their path."""
        return sum(r.method.startswith(method) and path in r.path for r in self.requests)

    def fault(self, kind: Kind, method: str = "", path: str = "", times: int = 1) -> None:
        """Let the next `times` requests with this method and this in their path fail."""

        def matches(request: Request) -> bool:
            return request.method.startswith(method) and path in request.path

        self._faults.append([_Fault(kind, matches), times])

    def heal(self) -> None:
        """From here on all is well again, for new connections at least."""
        self._faults.clear()
        self.rate = None
        self.up()

    def up(self) -> None:
        """Take connections."""
        self._do(self._listen())

    def down(self) -> None:
        """Refuse connections, and end those that there are."""
        self._do(self._close())

    def stop(self) -> None:
        """End it for good."""
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await asyncio.start_server(
                self._connections.accepted, "127.0.0.1", self.port, limit=1 << 20
            )

    async def _close(self) -> None:
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await self._connections.end(listener)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, server = await asyncio.open_connection(
            "127.0.0.1", self._server_port, limit=1 << 20
        )
        try:
            while await self._exchange(reader, writer, from_server, server):
                pass
        finally:
            server.transport.abort()

    def _fault_of(self, request: Request) -> Kind | None:
        for entry in self._faults:
            if entry[1] > 0 and entry[0].matches(request):
                entry[1] -= 1
                kind: Kind = entry[0].kind
                return kind
        return None

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> bool:
        """One request and its answer; False when the connection has done its duty."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        size = _length(head) or 0
        request = Request(method, unquote(path), size, time.monotonic())
        self.requests.append(request)
        fault = self._fault_of(request)
        if b"100-continue" in head.lower():
            head = re.sub(rb"(?i)\r\nexpect: 100-continue", b"", head)
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault == "hang":
            await asyncio.sleep(600)
        if fault in _REFUSALS or fault == "lost put":
            await reader.readexactly(size)
            answer = b'HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: 0\r\n\r\n'
            if fault != "lost put":
                why, text = _REFUSALS[fault]
                first = b"HTTP/1.1 %s %s" % (fault.encode(), why)
                answer = first + b"\r\nContent-Length: %d\r\n\r\n" % len(text) + text
            writer.write(answer)
            await writer.drain()
            return True
        server.write(head)
        if fault == "cut request":
            await self._copy(reader, server, size // 2)
            return False
        await self._copy(reader, server, size)
        answer = await from_server.readuntil(b"\r\n\r\n")
        while answer.startswith(b"HTTP/1.1 100"):
            answer = await from_server.readuntil(b"\r\n\r\n")
        if b"chunked" in answer.lower():
            body = await _chunks(from_server)
            answer = re.sub(
                rb"(?i)transfer-encoding: chunked", b"Content-Length: %d" % len(body), answer
            )
            writer.write(answer + body)
            await writer.drain()
            return True
        length = 0 if method == "HEAD" or b" 204 " in answer[:16] else _length(answer) or 0
        if fault == "short response":
            shorter = b"Content-Length: %d" % (length // 2)
            writer.write(re.sub(rb"(?i)content-length: \d+", shorter, answer))
        else:
            writer.write(answer)
        if fault in ("short response", "cut response"):
            await self._copy(from_server, writer, length // 2)
            writer.close()
            return False
        await self._copy(from_server, writer, length)
        return True

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int
    ) -> None:
        while size:
            data = await reader.read(min(size, 1 << 16))
            if not data:
                raise asyncio.IncompleteReadError(b"", size)
            writer.write(data)
            await writer.drain()
            size -= len(data)
            if self.rate is not None:
                await asyncio.sleep(len(data) / self.rate)
        await writer.drain()


def _length(head: bytes) -> int | None:
    match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(match[1]) if match else None


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A body that came in chunks, whole."""
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readuntil(b"\r\n")
    await reader.readuntil(b"\r\n")
    return body
