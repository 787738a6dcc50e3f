"""Brings one TCP port of a node's network namespace out to this one, or one of here into it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.harness.connections import Connections

CLONE_NEWNET = 0x40000000


class Relay:
    """Listens on 127.0.0.1:`port` here and connects to the same address in the namespace.

    A socket belongs to the network namespace of the thread that made it, so one thread that
    has moved over is all it takes: the listening socket was made before.

    With `inwards` it listens there and connects here.
    """

    def __init__(self, port: int, namespace: Path, *, inwards: bool = False) -> None:
        self._port = port
        self._namespace: int | None = os.open(namespace, os.O_RDONLY)
        if inwards:
            with ThreadPoolExecutor(1, initializer=self._move) as there:
                self._listener = there.submit(socket.create_server, ("127.0.0.1", port)).result(10)
        else:
            self._listener = socket.create_server(("127.0.0.1", port))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: asyncio.Event | None = None
        self._connections = Connections(self._accept)
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"relay-{port}", daemon=True)
        self._thread.start()
        if not self._up.wait(10):
            raise RuntimeError("the relay into the node did not start")

    def stop(self) -> None:
        """Close the port and every connection through it."""
        if self._loop is not None and self._done is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10)

    def _move(self) -> None:
        """Move the thread over into the namespace, once."""
        assert self._namespace is not None
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(self._namespace, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(self._namespace)
        self._namespace = None

    def _run(self) -> None:
        if self._namespace is not None:
            self._move()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        server = await asyncio.start_server(self._connections.accepted, sock=self._listener)
        self._up.set()
        await self._done.wait()
        await self._connections.end(server)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node_reader, node_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(_copy(reader, node_writer), _copy(node_reader, writer))
        finally:
            node_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
