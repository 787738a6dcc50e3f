"""What a kernel is doing, as its iopub channel tells: busy or idle, which request, which count."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from jupyter_client.jsonutil import extract_dates

from .hearing import Hearing
from .moments import read_moment
from .talk import COMM_ID

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

#: Seconds for which, after a look at what was heard, more is only kept: a busy kernel is
#: understood in batches, an idle one at once.
_PAUSE: Final = 0.05
#: Most messages kept.
_BATCH: Final = 256


class _Header(msgspec.Struct):
    """What is read of a message's header."""

    msg_type: str = ""
    msg_id: str = ""
    date: str = ""


class _Content(msgspec.Struct):
    """What is read of the content of messages of interest."""

    execution_state: str = ""
    execution_count: Any = None


class _Asking(msgspec.Struct):
    """What is read of the content of a message to the server."""

    data: dict[str, Any]


# Of a header, a parent header (a kernel may have none), and contents.
_read_header: Final = msgspec.json.Decoder(_Header | None).decode
_read_content: Final = msgspec.json.Decoder(_Content).decode
_read_asking: Final = msgspec.json.Decoder(_Asking).decode


class _Said(NamedTuple):
    """A message that is kept for the next look, without what nobody here needs."""

    header: bytes
    parent: bytes
    content: bytes
    is_asking: bool = False


#: Any number of messages that tell only that the kernel did something.
_DID_SOMETHING: Final = _Said(b"", b"", b"")


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

    def all_told(self) -> None:
        """That was all that was heard by now; of a busy kernel many messages are told at once."""


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
        self._changes: deque[_Change] = deque(maxlen=256)
        self._said: deque[_Said] = deque()
        self._timer: object | None = None
        self._looked_at = 0.0
        self._is_reading = False
        self.ports = list(km.ports)
        self._hearing = Hearing(km, self._heard)
        self.reset(begin)

    def reset(self, begin: Activity | None = None) -> None:
        """Another process answers on the same sockets: forget what the old one did."""
        self._is_reading = True  # what is heard now is not taken in
        self._hearing.drain()
        self._is_reading = False
        self._hearing.connected()
        self._said.clear()
        self._now = begin or Activity("idle", None, None)
        self._changes.clear()
        self._first = self._now
        #: When the cell that runs began, by the kernel's clock; ``None`` where none runs.
        self._cell_began = time.time() if self._now.execution_state == "busy" else None

    @property
    def is_connecting(self) -> bool:
        """Whether what a process says that was just started would not be heard yet."""
        return self._hearing.is_connecting

    def expect(self, *, is_new: bool) -> None:
        """A process was started; ``is_new``: the first that is watched here."""
        self._hearing.expect(is_new=is_new)

    def when_connected(self, then: Callable[[], None]) -> None:
        """Call this once the process is heard, or another takes its place; at once if it is."""
        self._hearing.when_connected(then)

    @property
    def has_own_socket(self) -> bool:
        """Whether the kernel is heard by a socket beside the server's own."""
        return self._hearing.is_own

    @property
    def is_open(self) -> bool:
        """Whether the kernel is heard: a socket of the server's may have been closed by it."""
        return self._hearing.is_open

    def share(self) -> None:
        """The server listens to the kernel now: hear by its socket."""
        self._hearing.share()

    @property
    def now(self) -> Activity:
        """What the kernel does, by all that has arrived."""
        self.catch_up()
        return self._now

    def catch_up(self) -> None:
        """Take in what has arrived, before something is decided by it.

        Who reads a kernel's :class:`~jupyter_gpu_ckpt.work.Work` need not call it.
        """
        self._hearing.drain()
        self._take_in()

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
        self._hearing.close()
        self._said.clear()
        if self._timer is not None:
            self._hearing.loop.remove_timeout(self._timer)
            self._timer = None

    def _heard(self, topic: bytes, parts: list[bytes], at: int) -> None:
        """Keep a message for the next look, if it is of interest; output may come fast."""
        header, parent, content = parts[at], parts[at + 1], parts[at + 3]
        if topic == _COMM_TOPIC:
            self._said.append(_Said(b"", b"", content, is_asking=True))
        elif b'"status"' in header or b'"execute_input"' in header:
            self._said.append(_Said(header, parent, content))
        elif _OWN in parent or not any(word in header for word in _DOINGS):
            return
        elif not self._said or self._said[-1] is not _DID_SOMETHING:
            self._said.append(_DID_SOMETHING)
        if self._timer is None:
            wait = self._looked_at + _PAUSE - time.monotonic()
            if wait <= 0:
                self._look()
            else:
                self._timer = self._hearing.loop.call_later(wait, self._look)
        elif len(self._said) >= _BATCH:
            self._take_in()

    def _look(self) -> None:
        self._timer = None
        self._looked_at = time.monotonic()
        self._take_in()

    def _take_in(self) -> None:
        """Understand what was kept."""
        if self._is_reading:
            return  # a listener asks while it is told of an earlier message
        if not self._said:
            return
        self._is_reading = True
        try:
            while self._said:
                self._received(self._said.popleft())
            self._tell(self._listener.all_told)
        finally:
            self._is_reading = False

    def _received(self, said: _Said) -> None:
        try:
            tell = self._understand(said)
        except (
            msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError, OverflowError,
        ):  # fmt: skip
            # A kernel may say anything: nothing that is known here.
            return
        if tell is not None:
            self._tell(tell)

    def _tell(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception:  # what becomes of a message is no reason to hear no more
            self._log.exception("What a kernel said could not be taken in")

    def _understand(self, said: _Said) -> Callable[[], None] | None:
        """Take a message in; returns what the listener is to be told."""
        if said is _DID_SOMETHING:
            return self._listener.was_touched
        if said.is_asking:
            return partial(self._listener.asked, _read_asking(said.content).data)
        header = _read_header(said.header) or _Header()
        content = _read_content(said.content)
        if header.msg_type == "execute_input":
            return self._cell_started(_seconds(header.date), int(content.execution_count))
        if header.msg_type != "status" or not content.execution_state:
            return None
        parent = _read_header(said.parent) or _Header()
        return self._note(_seconds(header.date), parent, content.execution_state)

    def _cell_started(self, date: float, count: int) -> Callable[[], None]:
        self._cell_began = date
        self._change(date, self._now._replace(execution_count=count))
        return partial(self._listener.cell_started, date)

    def _note(self, date: float, parent: _Header, now: str) -> Callable[[], None] | None:
        tell: Callable[[], None] | None = None
        state, count, in_flight = self._now
        if now == "starting":
            state, count, in_flight = "idle", None, None
        elif parent.msg_type == "execute_request":
            if now == "busy":
                state, in_flight = "busy", parent.msg_id
            elif parent.msg_id == in_flight:
                state, in_flight = "idle", None
                tell = self._cell_ended(date)
        elif parent.msg_type in _COMMS and not parent.msg_id.startswith(COMM_ID):
            tell = self._listener.was_touched
        self._change(date, Activity(state, count, in_flight))
        return tell

    def _change(self, date: float, after: Activity) -> None:
        if after == self._now:
            return
        if len(self._changes) == self._changes.maxlen:
            self._first = self._changes[0].after
        self._now = after
        self._changes.append(_Change(date, after))

    def _cell_ended(self, date: float) -> Callable[[], None] | None:
        began, self._cell_began = self._cell_began, None
        if began is None:
            return None
        return partial(self._listener.cell_ended, date, max(0.0, date - began))


def _seconds(date: str) -> float:
    """Unix seconds of a message's date."""
    with contextlib.suppress(ValueError):
        moment = read_moment(date)
        if moment.tzinfo is not None:
            return moment.timestamp()
    return float(extract_dates(date).timestamp())  # other kernels' ways to write it
