"""By which socket a kernel's iopub channel is heard: the server's own, or one of ours."""

from __future__ import annotations

import contextlib
import hmac
import uuid
from collections.abc import Callable
from typing import Any, Final

import zmq
from jupyter_client.session import DELIM, Session
from zmq.eventloop.zmqstream import ZMQStream

#: Most messages passed on at once where somebody waits for what the kernel said.
_ALL: Final = 10_000
#: What follows a message's signature at least: header, parent, metadata, content.
_PARTS: Final = 4
#: Seconds after the handshake in which the kernel learns that it has a subscriber.
_SUBSCRIBING: Final = 0.02


class Hearing:
    """Passes on what one kernel says, signed with its key. Belongs to the event loop.

    Each subscriber costs the kernel and the server as much again as the server's own, which
    watches every kernel for its activity. So that one is used as soon as it is there
    (:meth:`share`); until then, and in servers that have none, there is one of our own.

    Parameters
    ----------
    km
        The kernel's manager, whose connection is known.
    heard
        Called with each message: its topic, its parts, and where among these its header,
        parent, metadata and content begin.
    """

    def __init__(self, km: Any, heard: Callable[[bytes, list[bytes], int], None]) -> None:
        self._km = km
        self._heard = heard
        self._session = Session(config=km.session.config, key=km.session.key)
        self._stream = km.connect_iopub()
        self._stream.on_recv(self._from_own)
        self.loop = self._stream.io_loop
        #: What the server does with what its subscriber receives; ``None`` while there is our own.
        self._record: Callable[[list[bytes]], Any] | None = None
        #: Tells when the socket is connected to a process that was just started.
        self._monitor: ZMQStream | None = None
        self._is_connected: Callable[[], None] | None = None
        self._ends_by_message = False

    @property
    def is_open(self) -> bool:
        """Whether the socket is open; the server closes its own when it likes."""
        return not self._stream.closed()

    @property
    def is_own(self) -> bool:
        """Whether there is a socket of our own."""
        return self._record is None and self.is_open

    def share(self) -> None:
        """Hear by the server's subscriber from now on, if it has one.

        Called when the server has made it, where the kernel has not spoken yet.
        """
        stream = getattr(self._km, "_activity_stream", None)
        record = getattr(stream, "_recv_callback", None)
        if stream is None or record is None or stream is self._stream:
            return
        self.drain()
        is_connecting, then = self.is_connecting, self._is_connected
        self._close()
        self._stream, self._record = stream, record
        stream.on_recv(self._from_servers)
        if is_connecting:
            self.expect(is_new=True)
            self._is_connected = then

    def drain(self) -> None:
        """Pass on what has arrived."""
        for _ in range(_ALL):
            if not self.is_open:
                return
            # What the server refuses the stream has logged: on with the next message.
            with contextlib.suppress(Exception):
                self._stream.flush(zmq.POLLIN, _ALL)
                return

    # -- a process that was just started -------------------------------------------------

    @property
    def is_connecting(self) -> bool:
        """Whether what a process says that was just started would not be heard yet."""
        return self._monitor is not None

    def expect(self, *, is_new: bool) -> None:
        """A process was started, to which the socket will connect; it tries now and then.

        Parameters
        ----------
        is_new
            Whether the socket never had another process: its first message ends this too.
        """
        self._stop_expecting()
        self._ends_by_message = is_new
        socket, address = self._stream.socket, f"inproc://hearing-{uuid.uuid4().hex}"
        socket.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        told = socket.context.socket(zmq.PAIR, socket_class=zmq.Socket)
        told.connect(address)
        monitor = self._monitor = ZMQStream(told, self.loop)
        monitor.on_recv(lambda _: self.loop.call_later(_SUBSCRIBING, self._connected, monitor))

    def when_connected(self, then: Callable[[], None]) -> None:
        """Call this once the process is heard, or another takes its place; at once if it is."""
        if self.is_connecting:
            self._is_connected = then
        else:
            then()

    def connected(self) -> None:
        """Nothing is to be expected any more."""
        then, self._is_connected = self._is_connected, None
        self._stop_expecting()
        if then is not None:
            then()

    def _connected(self, monitor: ZMQStream) -> None:
        if monitor is self._monitor:
            self.connected()

    def _stop_expecting(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is None:
            return
        monitor.close()
        if self.is_open:
            self._stream.socket.disable_monitor()

    # ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Hear no more; the server's subscriber is left as it was."""
        self._close()
        self.connected()

    def _close(self) -> None:
        self._stop_expecting()
        record, self._record = self._record, None
        if not self.is_open:
            return
        if record is None:
            self._stream.close()
        else:
            self._stream.on_recv(record)

    def _from_servers(self, parts: list[bytes]) -> None:
        record = self._record
        assert record is not None
        record(parts)  # raises where the kernel did not sign it
        self._pass_on(parts)

    def _from_own(self, parts: list[bytes]) -> None:
        session = self._session
        with contextlib.suppress(ValueError, IndexError):
            at = parts.index(DELIM)
            signed = session.sign(parts[at + 2 : at + 6])
            if session.auth is None or hmac.compare_digest(parts[at + 1], signed):
                self._pass_on(parts)

    def _pass_on(self, parts: list[bytes]) -> None:
        at = parts.index(DELIM) + 2
        if self._monitor is not None and self._ends_by_message:
            self.connected()
        if len(parts) - at >= _PARTS:
            self._heard(parts[0], parts, at)
