"""Stands between pages and their kernels: what is sent to a hibernated kernel is kept for it.

The connection class of the server's kernel websockets is extended, whichever it is.
"""

from __future__ import annotations

import json
from typing import Any, Final, Protocol

from jupyter_server.services.kernels.connection import base as wire

from .errors import CkptError

#: The server's setting with the class of its kernel websockets' connections.
_SETTING: Final = "kernel_websocket_connection_class"
#: Untyped.
_wire: Any = wire
_V1: Final = "v1.kernel.websocket.jupyter.org"

#: What a page sends that is merely open: answered when the kernel is awake for another reason.
_CAN_WAIT: Final = frozenset({"kernel_info_request", "comm_info_request"})


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

    def needs_kernel(self) -> bool:
        """Whether somebody wants something of the kernel, beyond having its page open."""
        try:
            header, content = self._read()
            kind = header["msg_type"]
            asks = content().get("command") if kind == "debug_request" else None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return True  # the kernel itself says what is wrong with it
        return kind not in _CAN_WAIT and asks != "debugInfo"  # which is asked with each new tab

    def deliver(self) -> None:
        """Send it on to the kernel, also when its page has gone meanwhile."""
        connection = self.connection
        if connection.channels:
            connection.pass_on(self._message)
            return
        connection.create_stream()
        try:
            connection.pass_on(self._message)
        finally:
            for stream in connection.channels.values():
                stream.close()
            connection.channels = {}

    def refuse(self, error: CkptError) -> None:
        """Answer an execute request in the kernel's place: its cell ends with the error."""
        try:
            header, _ = self._read()
            if header["msg_type"] != "execute_request":
                return
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return
        text = error.message + (f" {error.hint}" if error.hint else "")
        fault = {"ename": "KernelNotRestored", "evalue": text, "traceback": [text]}
        self._say("iopub", "error", fault, header)
        reply = {"status": "error", "execution_count": None, **fault}
        self._say("shell", "execute_reply", reply, header)
        self._say("iopub", "status", {"execution_state": "idle"}, header)

    def tell_starting(self) -> None:
        """Let the page show that the kernel is on its way."""
        self._say("iopub", "status", {"execution_state": "starting"}, {})

    def _read(self) -> tuple[dict[str, Any], Any]:
        """Header, and a function giving the content."""
        if self.connection.subprotocol == _V1:
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
        if getattr(connection.websocket_handler, "ws_connection", None) is None:
            return  # the page has gone
        message = connection.session.msg(kind, content, parent=parent or None)
        message["parent_header"] = parent
        if connection.subprotocol == _V1:
            data = _wire.serialize_msg_to_ws_v1(message, channel, connection.session.pack)
            connection.write_message(data, binary=True)
        else:
            message["channel"] = channel
            connection.write_message(json.dumps(message, default=str))


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
    if not all(hasattr(base, name) for name in ("handle_incoming_message", "create_stream")):
        return False  # kernels that run elsewhere

    class GuardedConnection(base):  # type: ignore[misc]
        """Asks the doorman first."""

        async def prepare(self) -> None:
            doorman.opened(self.kernel_id)
            await super().prepare()

        def handle_incoming_message(self, incoming_msg: str | bytes) -> None:
            if not doorman.holds(self.kernel_id, HeldMessage(self, incoming_msg)):
                self.pass_on(incoming_msg)

        def pass_on(self, message: str | bytes) -> None:
            super().handle_incoming_message(message)

    GuardedConnection.__name__ = GuardedConnection.__qualname__ = base.__name__
    settings[_SETTING] = GuardedConnection
    return True
