"""What a kernel is doing, as its iopub channel tells: busy or idle, which request, which count."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

from jupyter_client.session import Session

#: Headers of other messages are not even parsed: output may come fast.
_OF_INTEREST: Final = (b'"status"', b'"execute_input"')


class Activity(NamedTuple):
    """What a kernel was doing at one moment."""

    execution_state: str
    execution_count: int | None
    in_flight_msg_id: str | None


class _Change(NamedTuple):
    at: float
    after: Activity


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
    """

    def __init__(self, km: Any, begin: Activity | None = None) -> None:
        self._session = Session(config=km.session.config, key=km.session.key)
        self._changes: deque[_Change] = deque(maxlen=256)
        self.ports = list(km.ports)
        self.reset(begin)
        self._stream = km.connect_iopub()
        self._stream.on_recv(self._received)

    def reset(self, begin: Activity | None = None) -> None:
        """Another process answers on the same sockets: forget what the old one did."""
        self.now = begin or Activity("idle", None, None)
        self._changes.clear()
        self._first = self.now

    def at(self, moment: float) -> Activity:
        """What the kernel was doing at ``moment`` (Unix seconds), by its own messages' dates.

        For a save, ``moment`` lies in the time the kernel stood still: what it published
        before is in the state even if it arrived here later.
        """
        found = self._first
        for change in self._changes:
            if change.at > moment:
                break
            found = change.after
        return found

    def close(self) -> None:
        """Stop listening."""
        if not self._stream.closed():
            self._stream.on_recv(None)
            self._stream.close()

    def _received(self, parts: list[bytes]) -> None:
        try:
            _, message = self._session.feed_identities(parts)
            header = message[1]
            assert isinstance(header, bytes)  # as streams deliver it
            if not any(word in header for word in _OF_INTEREST):
                return
            self._note(self._session.deserialize(message))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            # Not a message signed with this kernel's key: none of ours.
            return

    def _note(self, msg: dict[str, Any]) -> None:
        parent = msg["parent_header"] or {}
        content = msg["content"]
        state, count, in_flight = self.now
        if msg["msg_type"] == "execute_input":
            count = int(content["execution_count"])
        elif content["execution_state"] == "starting":
            state, count, in_flight = "idle", None, None
        elif parent.get("msg_type") == "execute_request":
            if content["execution_state"] == "busy":
                state, in_flight = "busy", parent["msg_id"]
            elif parent["msg_id"] == in_flight:
                state, in_flight = "idle", None
        change = _Change(msg["header"]["date"].timestamp(), Activity(state, count, in_flight))
        if change.after != self.now:
            if len(self._changes) == self._changes.maxlen:
                self._first = self._changes[0].after
            self.now = change.after
            self._changes.append(change)
