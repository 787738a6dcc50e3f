"""A kernel that a command starts in the server and speaks to, as a page does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import uuid
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import (
    WebSocketClientConnection,
    WebSocketClosedError,
    websocket_connect,
)

from .client import Server, UnixResolver
from .errors import CliError

#: Seconds that the server has to start a kernel, and to answer the opening of a channel.
START_TIMEOUT: Final = 120.0
#: Seconds that the server has to close a connection.
_CLOSE_TIMEOUT: Final = 10.0
#: A cell may show pictures; the default of 10 MB would close the connection.
_LARGEST_MESSAGE: Final = 1 << 30

T = TypeVar("T")


class _Started(msgspec.Struct):
    """The answer to ``POST /api/kernels``."""

    id: str


class Cell(msgspec.Struct):
    """What came of a cell: its text output, and the error it ended with."""

    text: str = ""
    error: str | None = None


class OwnKernel:
    """One kernel of the command's own, in a running server.

    A thread keeps the connection alive, whatever the command does meanwhile.

    Parameters
    ----------
    server
        Where it is started.
    name
        Its kernelspec.
    path
        A notebook, in whose folder it runs. It gets no session: the notebook's own kernel, if it
        has one, is another.

    Raises
    ------
    CliError
        When it cannot be started.
    """

    def __init__(self, server: Server, name: str, path: str) -> None:
        self._server = server
        body = {"name": name, "path": path}
        started = server.jupyter("POST", "kernels", body=body, timeout=START_TIMEOUT)
        self.id = server.decode(_Started, started).id
        self._session = uuid.uuid4().hex
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._socket: WebSocketClientConnection | None = None
        self._waiting: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._reader: asyncio.Task[None] | None = None

    def run(self, code: str, *, timeout: float, history: bool = False) -> Cell:
        """Run a cell to its end.

        Parameters
        ----------
        code
            What to run.
        timeout
            How long it may take, seconds.
        history
            Whether it counts as a cell of the notebook.

        Raises
        ------
        CliError
            ``timeout``, or ``unreachable`` when the connection broke.
        """
        return self._do(self._run(code, history), timeout)

    def end(self) -> None:
        """End the kernel; one that has ended already is no error. Raises `CliError`."""
        # First, or the server may look for the kernel of a connection that is just being made.
        with contextlib.suppress(CliError):
            self._do(self._close(), _CLOSE_TIMEOUT)
        try:
            self._server.jupyter("DELETE", f"kernels/{self.id}")
        except CliError as error:
            # Not ours to judge: all that matters is that it is gone.
            if self.is_there():
                raise error
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def is_there(self) -> bool:
        """Whether the server still has it."""
        listed = self._server.decode(list[_Started], self._server.jupyter("GET", "kernels"))
        return any(kernel.id == self.id for kernel in listed)

    def _do(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        if not wait([future], timeout).done:
            future.cancel()
            raise CliError(
                f"The kernel did not answer within {timeout:g} s.",
                "timeout",
                hint="--timeout allows more.",
            )
        try:
            return future.result()
        except (OSError, HTTPClientError, WebSocketClosedError) as error:
            raise CliError(
                f"The connection to the kernel broke: {error}.",
                "unreachable",
                hint="Try again: 'jupyter gpu-ckpt kernels' says whether it still runs.",
            ) from None

    async def _run(self, code: str, history: bool) -> Cell:
        await self._open()
        number, answers = uuid.uuid4().hex, asyncio.Queue[dict[str, Any]]()
        self._waiting[number] = answers
        content = {
            "code": code,
            "silent": False,
            "store_history": history,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        header = {
            "msg_id": number,
            "msg_type": "execute_request",
            "username": "gpu-ckpt",
            "session": self._session,
            "version": "5.3",
            "date": "",
        }
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        assert self._socket is not None
        try:
            await self._socket.write_message(json.dumps({**message, "channel": "shell"}))
            return await _collect(answers)
        finally:
            del self._waiting[number]

    async def _open(self) -> None:
        if self._socket is not None:
            return
        address = urlsplit(self._server.url)
        scheme = "wss" if address.scheme == "https" else "ws"
        request = HTTPRequest(
            f"{scheme}://{address.netloc}{address.path}api/kernels/{self.id}/channels"
            f"?session_id={self._session}",
            headers=self._server.headers(),
            validate_cert=self._server.verify,
            connect_timeout=START_TIMEOUT,
        )
        self._socket = await websocket_connect(
            request,
            max_message_size=_LARGEST_MESSAGE,
            resolver=UnixResolver() if address.scheme == "http+unix" else None,
        )
        self._reader = asyncio.get_running_loop().create_task(self._read(self._socket))

    async def _close(self) -> None:
        if self._socket is not None and self._reader is not None:
            self._socket.close()
            await self._reader

    async def _read(self, socket: WebSocketClientConnection) -> None:
        while (frame := await socket.read_message()) is not None:
            if isinstance(frame, bytes):
                continue  # with buffers: a widget's, of no interest here
            message = json.loads(frame)
            answers = self._waiting.get(message.get("parent_header", {}).get("msg_id"))
            if answers is not None:
                answers.put_nowait(message)
        self._socket = None
        for answers in self._waiting.values():
            answers.put_nowait({"closed": True})


async def _collect(answers: asyncio.Queue[dict[str, Any]]) -> Cell:
    """Read what comes of a cell up to its reply and "idle"."""
    cell, left = Cell(), {"execute_reply", "status"}
    while left:
        message = await answers.get()
        if "closed" in message:
            raise OSError("the server closed it")
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream" and content["name"] == "stdout":
            cell.text += content["text"]
        elif kind in ("execute_result", "display_data"):
            cell.text += content["data"].get("text/plain", "")
        elif kind == "error":
            cell.error = f"{content['ename']}: {content['evalue']}"
        elif kind == "execute_reply":
            left.discard(kind)
            if content["status"] != "ok" and cell.error is None:
                cell.error = content.get("ename") or content["status"]
        elif kind == "status" and content["execution_state"] == "idle":
            left.discard(kind)
    return cell
