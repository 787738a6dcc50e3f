"""Stands between pages and their kernels: what is sent to a hibernated kernel is kept for it.

The connection class of the server's kernel websockets is extended, whichever it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

import zmq
from jupyter_server.services.kernels.connection import base as wire
from tornado.web import HTTPError
from tornado.websocket import WebSocketClosedError

from .errors import CkptError

#: The server's setting with the class of its kernel websockets' connections.
_SETTING: Final = "kernel_websocket_connection_class"
#: Untyped.
_wire: Any = wire
_V1: Final = "v1.kernel.websocket.jupyter.org"

#: What reading a message raises that is none.
_MALFORMED: Final = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error,
)  # fmt: skip
#: What a connection class has that passes messages on to sockets of the kernel.
_NEEDED: Final = ("prepare", "handle_incoming_message", "subprotocol", "channels")

#: What a page sends that is merely open: answered when the kernel is awake for another reason.
_CAN_WAIT: Final = frozenset({"kernel_info_request", "comm_info_request"})

#: What a page does to a kernel's widgets.
_COMMS: Final = frozenset({"comm_open", "comm_msg", "comm_close"})
#: Most messages, and bytes of them, that are kept for one kernel; a page that sends more has gone
#: wrong.
_MOST: Final = 10_000
_MOST_BYTES: Final = 64 << 20


class Doorman(Protocol):
    """Who decides what becomes of a message to a kernel; called on the event loop."""

    def opened(self, kernel_id: str) -> None:
        """A page connects to the kernel."""

    def holds(self, kernel_id: str, message: HeldMessage) -> bool:
        """Whether a message is kept; otherwise it goes to the kernel now."""


class HeldMessage:
    """A message from a page, and the connection that it came over."""

    def __init__(self, connection: Any, message: str | bytes) -> None:
        self.connection = connection
        self._message = message
        self._is_v1 = connection.subprotocol == _V1  # asked while its page is there

    @property
    def size(self) -> int:
        """Its bytes, about."""
        return len(self._message)

    def needs_kernel(self) -> bool:
        """Whether somebody wants something of the kernel, beyond having its page open."""
        try:
            header, content = self._read()
            kind = header["msg_type"]
            asks = content().get("command") if kind == "debug_request" else None
        except _MALFORMED:
            return True  # the kernel itself says what is wrong with it
        return kind not in _CAN_WAIT and asks != "debugInfo"  # which is asked with each new tab

    @property
    def execute_id(self) -> str | None:
        """Id of the execute request that it is; ``None`` if it is none."""
        try:
            header, _ = self._read()
            return str(header["msg_id"]) if header["msg_type"] == "execute_request" else None
        except _MALFORMED:
            return None

    @property
    def comm(self) -> tuple[str, str] | None:
        """What it does to a widget (its type), and the id of the comm; ``None`` if nothing."""
        try:
            header, content = self._read()
            kind = str(header["msg_type"])
            return (kind, str(content()["comm_id"])) if kind in _COMMS else None
        except _MALFORMED:
            return None

    def deliver_to(self, km: Any) -> None:
        """Send it to another kernel than its page meant; what that answers the page does not hear.

        Parameters
        ----------
        km
            The manager of that kernel, whose key signs it.
        """
        stream = km.connect_shell()
        try:
            if self._is_v1:
                km.session.send_raw(stream, _wire.deserialize_msg_from_ws_v1(self._message)[1])
            elif isinstance(self._message, bytes):
                km.session.send(stream, _wire.deserialize_binary_message(self._message))
            else:
                km.session.send(stream, json.loads(self._message))
            stream.flush(zmq.POLLOUT)  # what was sent is only queued
        finally:
            stream.close()

    def deliver(self) -> None:
        """Send it on to the kernel, also when its page has gone meanwhile."""
        connection = self.connection
        before = connection.channels
        if before and not any(stream.closed() for stream in before.values()):
            connection.pass_on(self._message)
            return
        # Without its session's identity, which its page may use again by now.
        km = connection.kernel_manager
        connection.channels = {
            "shell": km.connect_shell(), "control": km.connect_control(),
            "stdin": km.connect_stdin(),
        }  # fmt: skip
        try:
            connection.pass_on(self._message)
        finally:
            for stream in connection.channels.values():
                stream.flush(zmq.POLLOUT)  # what was sent is only queued
                stream.close()
            connection.channels = {}

    def refuse(self, error: CkptError, name: str = "KernelNotRestored") -> None:
        """Answer an execute request in the kernel's place: its cell ends with the error."""
        header = self._cell()
        if header is None:
            return
        text = error.message + (f" {error.hint}" if error.hint else "")
        fault = {"ename": name, "evalue": text, "traceback": [text]}
        self._say("iopub", "error", fault, header)
        reply = {"status": "error", "execution_count": None, **fault}
        self._say("shell", "execute_reply", reply, header)
        self._say("iopub", "status", {"execution_state": "idle"}, header)

    def tell(self, text: str | None) -> None:
        """Let an execute request's cell show a line while it waits; ``None`` takes it away."""
        header = self._cell()
        if header is None:
            return
        if text is None:
            self._say("iopub", "clear_output", {"wait": False}, header)
        else:
            self._say("iopub", "stream", {"name": "stderr", "text": f"{text}\n"}, header)

    def _cell(self) -> dict[str, Any] | None:
        """The header, where this is an execute request."""
        try:
            header, _ = self._read()
            return header if header["msg_type"] == "execute_request" else None
        except _MALFORMED:
            return None

    def tell_starting(self) -> None:
        """Let the page show that the kernel is on its way."""
        self._say("iopub", "status", {"execution_state": "starting"}, {})

    def _read(self) -> tuple[dict[str, Any], Any]:
        """Header, and a function giving the content."""
        if self._is_v1:
            _, parts = _wire.deserialize_msg_from_ws_v1(self._message)
            return json.loads(bytes(parts[0])), lambda: json.loads(bytes(parts[3]))
        if isinstance(self._message, bytes):
            message = _wire.deserialize_binary_message(self._message)
        else:
            message = json.loads(self._message)
        return message["header"], lambda: message["content"]

    def _say(
        self, channel: str, kind: str, content: dict[str, Any], parent: dict[str, Any]
    ) -> None:
        connection = self.connection
        message = connection.session.msg(kind, content, parent=parent or None)
        message["parent_header"] = parent
        with contextlib.suppress(WebSocketClosedError):  # the page has gone, or goes just now
            if self._is_v1:
                data = _wire.serialize_msg_to_ws_v1(message, channel, connection.session.pack)
                connection.write_message(data, binary=True)
            else:
                message["channel"] = channel
                connection.write_message(json.dumps(message, default=str))


class Kept:
    """Messages that are kept for one kernel, in their order and within bounds."""

    def __init__(self) -> None:
        self._messages: list[HeldMessage] = []
        self._bytes = 0
        #: How many messages of widgets found no room: nobody waits for an answer to them.
        self.left_out = 0

    def add(self, message: HeldMessage) -> bool:
        """Keep a message; whether there was room for it."""
        if len(self._messages) >= _MOST or self._bytes + message.size > _MOST_BYTES:
            self.left_out += message.comm is not None
            return False
        self._messages.append(message)
        self._bytes += message.size
        return True

    def take(self, *, only_cells: bool = False) -> list[HeldMessage]:
        """Give what is kept, or the cells of it, and keep it no longer."""
        taken = [m for m in self if not only_cells or m.execute_id is not None]
        gone = set(map(id, taken))
        self._messages = [m for m in self if id(m) not in gone]
        self._bytes = sum(message.size for message in self)
        return taken

    def __iter__(self) -> Iterator[HeldMessage]:
        return iter(self._messages)

    def __len__(self) -> int:
        return len(self._messages)


def each(
    held: Iterable[HeldMessage], do: Callable[[HeldMessage], None], log: logging.Logger | Any
) -> None:
    """Do something with messages; one that is wrong keeps none of the others from it."""
    for message in held:
        try:
            do(message)
        except Exception as error:  # a page may send anything
            log.warning("A message kept for a kernel is lost: %s: %s", type(error).__name__, error)


def left_out(kept: Iterable[Kept], kernel_id: str, log: logging.Logger | Any) -> list[str]:
    """Say in the log, and to who restored a kernel, what of widgets it did not get."""
    count = sum(one.left_out for one in kept)
    if count == 0:
        return []
    said = (
        f"The kernel did not get {count} of the changes that were made to widgets while it was "
        "away: there were too many. Make them again."
    )
    log.warning("Kernel %s: %s", kernel_id, said)
    return [said]


def too_much(until: str) -> CkptError:
    """What answers a cell for which there is no room among those that wait until the kernel can."""
    return CkptError(
        "busy",
        f"Too much waits for the kernel to {until}.",
        hint="Run the cell again when the others have run.",
    )


def execute_ids(held: Iterable[HeldMessage]) -> list[str]:
    """Ids of the execute requests among messages."""
    return [found for message in held if (found := message.execute_id) is not None]


def guard(settings: dict[str, Any], doorman: Doorman) -> bool:
    """Extend the server's connection class; whether that is possible.

    Parameters
    ----------
    settings
        The web application's.
    doorman
        Decides from now on.
    """
    base: Any = settings.get(_SETTING)
    if not all(hasattr(base, name) for name in _NEEDED):
        return False  # kernels that run elsewhere

    class GuardedConnection(base):  # type: ignore[misc]
        """Asks the doorman first."""

        _spoken: str | None = None

        @property
        def subprotocol(self) -> str | None:
            """What its page speaks, or spoke: what was kept of it is understood later."""
            self._spoken = super().subprotocol or self._spoken
            return self._spoken

        async def prepare(self) -> None:
            doorman.opened(self.kernel_id)
            await super().prepare()
            if self.websocket_handler.connection is not self:
                # A page has gone over to the restored kernel while its fresh one still started;
                # the server would go on with nothing in its hands.
                raise HTTPError(410, "The page closed its connection while the kernel started")

        def handle_incoming_message(self, incoming_msg: str | bytes) -> None:
            if not doorman.holds(self.kernel_id, HeldMessage(self, incoming_msg)):
                self.pass_on(incoming_msg)

        def pass_on(self, message: str | bytes) -> None:
            super().handle_incoming_message(message)

    GuardedConnection.__name__ = GuardedConnection.__qualname__ = base.__name__
    settings[_SETTING] = GuardedConnection
    return True
