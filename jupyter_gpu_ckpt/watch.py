"""What a kernel is doing, as its iopub channel tells: busy or idle, which request, which count."""

from __future__ import annotations

import contextlib
import hmac
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import zmq
from jupyter_client.jsonutil import extract_dates
from jupyter_client.session import Session

from .talk import COMM_ID

#: Headers of other messages are not even parsed: output may come fast.
_OF_INTEREST: Final = (b'"status"', b'"execute_input"')

#: What a kernel sends because it did something; not, say, that it welcomes a subscriber.
_DOINGS: Final = (
    b'"stream"', b'"display_data"', b'"update_display_data"', b'"execute_result"', b'"error"',
    b'"comm_',
)  # fmt: skip

#: First part of a message on the comm of :mod:`.talk`.
_COMM_TOPIC: Final = f"comm-{COMM_ID}".encode()
#: In the parent header of what the kernel says about this server's own messages.
_OWN: Final = COMM_ID.encode()

#: What a page does to a kernel without executing a cell: widgets.
_COMMS: Final = frozenset({"comm_open", "comm_msg", "comm_close"})


#: Seconds for which the socket is left alone after a look at it. Each look wakes the server, which
#: costs more than what is read: so a busy kernel is heard in batches, an idle one at once.
_PAUSE: Final = 0.05
#: Most messages taken in at one look: the server has others to serve.
_BATCH: Final = 256
#: The same where somebody waits for what the kernel said.
_ALL: Final = 10_000


class Activity(NamedTuple):
    """What a kernel was doing at one moment."""

    execution_state: str
    execution_count: int | None
    in_flight_msg_id: str | None


class _Change(NamedTuple):
    at: float
    after: Activity


class WatchListener(Protocol):
    """Who hears what a kernel does; called on the event loop."""

    def cell_started(self, at: float) -> None:
        """A cell began to run at that Unix time, by the kernel's own clock."""

    def cell_ended(self, at: float, seconds: float) -> None:
        """A cell ended at that Unix time after so long, by the kernel's own clock."""

    def was_touched(self) -> None:
        """The kernel did something else: it printed, or a widget was used."""

    def asked(self, data: dict[str, Any]) -> None:
        """The kernel sent a message to its server. Anything may be in it."""


class KernelWatch:
    """Follows one kernel's iopub channel from its start on.

    The kernel's own clock (the ``date`` of its messages) orders what it says against a
    save: see :meth:`at`. Belongs to the event loop.

    Parameters
    ----------
    km
        The kernel's manager, whose connection is known.
    begin
        What the kernel does now: idle for a fresh one, the state's for a restored one.
    listener
        Hears of what the kernel does.
    """

    def __init__(self, km: Any, begin: Activity | None, listener: WatchListener) -> None:
        self._listener = listener
        self._log = km.log
        self._session = Session(config=km.session.config, key=km.session.key)
        self._changes: deque[_Change] = deque(maxlen=256)
        self.ports = list(km.ports)
        self._stream = km.connect_iopub()
        # Read here instead: the stream wakes the server for every message.
        self._socket, self._loop = self._stream.socket, self._stream.io_loop
        self._loop.remove_handler(self._socket)
        self._is_awaited = self._is_reading = self._is_closed = False
        self.reset(begin)
        self._timer = self._loop.call_later(0, self._look)

    def reset(self, begin: Activity | None = None) -> None:
        """Another process answers on the same sockets: forget what the old one did."""
        while self._receive() is not None:
            pass
        self._now = begin or Activity("idle", None, None)
        self._changes.clear()
        self._first = self._now
        #: When the cell that runs began, by the kernel's clock; ``None`` where none runs.
        self._cell_began = time.time() if self._now.execution_state == "busy" else None

    @property
    def now(self) -> Activity:
        """What the kernel does, by all that has arrived."""
        self.catch_up()
        return self._now

    def catch_up(self) -> None:
        """Take in what has arrived, before something is decided by it.

        Who reads a kernel's :class:`~jupyter_gpu_ckpt.work.Work` need not call it.
        """
        self._take_in(_ALL)

    def at(self, moment: float) -> Activity:
        """What the kernel was doing at ``moment`` (Unix seconds), by its own messages' dates.

        For a save, ``moment`` lies in the time the kernel stood still: what it published
        before is in the state even if it arrived here later.
        """
        self.catch_up()
        found = self._first
        for change in self._changes:
            if change.at > moment:
                break
            found = change.after
        return found

    def close(self) -> None:
        """Stop listening."""
        if not self._is_closed:
            self._is_closed = True
            self._await(False)
            self._loop.remove_timeout(self._timer)
            self._socket.close()

    def _await(self, wanted: bool) -> None:
        """Have the loop tell, or not, when something arrives."""
        if wanted and not self._is_awaited:
            self._loop.add_handler(self._socket, self._look, self._loop.READ)
        elif self._is_awaited and not wanted:
            self._loop.remove_handler(self._socket)
        self._is_awaited = wanted

    def _look(self, *_: object) -> None:
        """Take in what has arrived, and wait for more, or look again later."""
        count = self._take_in(_BATCH)
        if self._is_closed:
            return
        # The socket's descriptor tells only of what comes after it was found empty.
        self._await(count == 0)
        if count:
            self._timer = self._loop.call_later(0 if count == _BATCH else _PAUSE, self._look)

    def _take_in(self, most: int) -> int:
        """Read so many messages at most; returns how many there were."""
        if self._is_reading:
            return 0  # a listener asks while it is told of an earlier message
        self._is_reading = True
        try:
            for count in range(most):
                parts = self._receive()
                if parts is None:
                    return count
                self._received(parts)
        finally:
            self._is_reading = False
        return most

    def _receive(self) -> list[bytes] | None:
        if self._is_closed:
            return None
        try:
            parts: list[bytes] = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return parts

    def _received(self, parts: list[bytes]) -> None:
        try:
            tell = self._understand(parts)
        except (
            ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError,
        ):  # fmt: skip
            # Not a message signed with this kernel's key: none of ours.
            return
        if tell is not None:
            try:
                tell()
            except Exception:  # nor is what becomes of it a reason to hear no more
                self._log.exception("What a kernel said could not be taken in")

    def _understand(self, parts: list[bytes]) -> Callable[[], None] | None:
        """Take a message in; returns what the listener is to be told."""
        _, message = self._session.feed_identities(parts)
        _, header, parent, *_ = message
        assert isinstance(header, bytes) and isinstance(parent, bytes)  # as streams deliver it
        if parts[0] == _COMM_TOPIC:
            return partial(
                self._listener.asked, self._session.deserialize(message)["content"]["data"]
            )
        if any(word in header for word in _OF_INTEREST):
            return self._note(*self._open(message))
        if _OWN in parent or not any(word in header for word in _DOINGS):
            return None
        return self._listener.was_touched

    def _open(self, message: list[Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Header, parent header and content of a message that the kernel signed.

        As ``Session.deserialize``, but without what nobody here needs: it is much of what
        watching a kernel costs its server.
        """
        session = self._session
        if session.auth is not None and not hmac.compare_digest(
            message[0], session.sign(message[1:5])
        ):
            raise ValueError("invalid signature")
        return session.unpack(message[1]), session.unpack(message[2]), session.unpack(message[4])

    def _note(
        self, header: dict[str, Any], parent: dict[str, Any] | None, content: dict[str, Any]
    ) -> Callable[[], None] | None:
        parent = parent or {}
        date = _seconds(header["date"])
        tell: Callable[[], None] | None = None
        state, count, in_flight = self._now
        if header["msg_type"] == "execute_input":
            count = int(content["execution_count"])
            self._cell_began = date
            tell = partial(self._listener.cell_started, date)
        elif content["execution_state"] == "starting":
            state, count, in_flight = "idle", None, None
        elif parent.get("msg_type") == "execute_request":
            if content["execution_state"] == "busy":
                state, in_flight = "busy", parent["msg_id"]
            elif parent["msg_id"] == in_flight:
                state, in_flight = "idle", None
                tell = self._cell_ended(date)
        elif parent.get("msg_type") in _COMMS and not parent["msg_id"].startswith(COMM_ID):
            tell = self._listener.was_touched
        change = _Change(date, Activity(state, count, in_flight))
        if change.after != self._now:
            if len(self._changes) == self._changes.maxlen:
                self._first = self._changes[0].after
            self._now = change.after
            self._changes.append(change)
        return tell

    def _cell_ended(self, date: float) -> Callable[[], None] | None:
        began, self._cell_began = self._cell_began, None
        if began is None:
            return None
        return partial(self._listener.cell_ended, date, max(0.0, date - began))


def _seconds(date: str) -> float:
    """Unix seconds of a message's date."""
    with contextlib.suppress(ValueError):
        moment = datetime.fromisoformat(date.replace("Z", "+00:00"))
        if moment.tzinfo is not None:
            return moment.timestamp()
    return float(extract_dates(date).timestamp())  # other kernels' ways to write it
