"""A protocol-level user: REST calls, the kernel's websocket and the event stream.

Speaks what a browser speaks, so that what holds here holds for a page; every wait has a
deadline in seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import requests
import websocket

Message = dict[str, Any]
API = "gpu-ckpt/api/"


class ApiError(Exception):
    """The server said no."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class Client:
    """One user of one server."""

    def __init__(self, base_url: str, token: str) -> None:
        self.base_url = base_url
        self.token = token
        self._http = requests.Session()
        self._http.headers["Authorization"] = f"token {token}"
        self._http.trust_env = False
        self._sockets: list[_Socket] = []

    # --- REST ---------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        *,
        timeout: float = 60,
        body: Any = None,
        params: dict[str, str] | None = None,
    ) -> Any:
        """Return the JSON answer; raise :class:`ApiError` for a status of 400 or more."""
        answer = self._http.request(
            method, self.base_url + path, json=body, params=params, timeout=timeout
        )
        is_json = "json" in answer.headers.get("Content-Type", "")
        content = answer.json() if is_json and answer.content else None
        if answer.status_code >= 400:
            raise ApiError(answer.status_code, content or {"message": answer.text[:500]})
        return content

    def get(self, path: str, **kwargs: Any) -> Any:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> Any:
        return self.request("POST", path, body={} if body is None else body, **kwargs)

    def delete(self, path: str, **kwargs: Any) -> Any:
        return self.request("DELETE", path, **kwargs)

    # --- kernels ------------------------------------------------------------------------

    def start(
        self, path: str | None = None, kernel: str = "python3", **kwargs: Any
    ) -> KernelClient:
        """Start a kernel, with a notebook's session when a `path` is given, and connect."""
        if path is None:
            kernel_id = self.post("api/kernels", {"name": kernel})["id"]
        else:
            body = {"path": path, "name": path, "type": "notebook", "kernel": {"name": kernel}}
            kernel_id = self.post("api/sessions", body)["kernel"]["id"]
        return self.connect(kernel_id, **kwargs)

    def connect(
        self,
        kernel_id: str,
        *,
        session: str | None = None,
        channel: str = "shell",
        timeout: float = 60,
    ) -> KernelClient:
        """Open a websocket to a running kernel and wait until the kernel is there.

        A page that comes back gives the `session` it had before. Ask on the "control"
        channel where a cell is running.
        """
        kernel = KernelClient(self, kernel_id, session or uuid.uuid4().hex, timeout)
        self._sockets.append(kernel)
        kernel.request(channel, "kernel_info_request", {}, timeout=timeout)
        return kernel

    def execution_state(self, kernel_id: str) -> str:
        return str(self.get(f"api/kernels/{kernel_id}")["execution_state"])

    # --- this project's own API ---------------------------------------------------------

    def wait_state(self, kernel_id: str, state: str, *, timeout: float = 30) -> None:
        """Wait until the server says so of a kernel; it hears of it a moment after others do."""
        wait_for(f"it is {state}", lambda: self.execution_state(kernel_id) == state, timeout)

    def save(self, kernel: KernelClient | str, *, timeout: float = 60, **body: Any) -> Message:
        """Save a kernel's state and return the finished operation; fail unless it is done."""
        return self.done(self.begin_save(kernel, **body), timeout)

    def begin_save(self, kernel: KernelClient | str, **body: Any) -> Message:
        kernel_id = kernel if isinstance(kernel, str) else kernel.id
        return dict(self.post(f"{API}kernels/{kernel_id}/save", body))

    def restore(self, state_id: str, *, timeout: float = 60, **body: Any) -> Message:
        """Restore a state and return the finished operation; fail unless it is done."""
        return self.done(dict(self.post(f"{API}states/{state_id}/restore", body)), timeout)

    def restore_lost(self, kernel_id: str, *, timeout: float = 60) -> Message:
        """Restore a lost kernel and return the finished operation; fail unless it is done."""
        return self.done(dict(self.post(f"{API}lost/{kernel_id}/restore")), timeout)

    def states(self, **query: str) -> list[Message]:
        return list(self.get(f"{API}states", params=query))

    def lost(self) -> list[Message]:
        return list(self.get(f"{API}lost"))

    def wait_lost(self, count: int, *, timeout: float = 60) -> list[Message]:
        """Return the lost kernels once there are `count` of them."""
        return list(
            wait_for(
                f"{count} lost kernels",
                lambda: (lost := self.lost()) and len(lost) >= count and lost,
                timeout,
            )
        )

    def done(self, operation: Message, timeout: float = 60) -> Message:
        """Wait for an operation and fail unless it succeeded."""
        operation = self.finished(operation, timeout)
        assert operation["status"] == "done", operation
        return operation

    def finished(self, operation: Message, timeout: float = 60) -> Message:
        """Wait until an operation is over, however it ended, and return it."""
        over = ("done", "failed", "cancelled")

        def look() -> Message | None:
            now = dict(self.get(f"{API}operations/{operation['id']}"))
            return now if now["status"] in over else None

        return dict(wait_for(f"{operation['kind']} is over", look, timeout))

    def events(self) -> EventStream:
        """Subscribe to the server's events."""
        stream = EventStream(self)
        self._sockets.append(stream)
        return stream

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        self._http.close()


def wait_for(
    what: str, condition: Callable[[], Any], timeout: float, interval: float = 0.05
) -> Any:
    """Return the first true value of `condition()`, or fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout:g} s")
        time.sleep(interval)
    return value


class _Socket:
    """A websocket whose messages are read by a thread and kept, in order."""

    def __init__(self, client: Client, path: str, timeout: float) -> None:
        self.messages: list[Message] = []
        self.closed = False
        self._changed = threading.Condition()
        url = client.base_url.replace("http", "ws", 1) + path
        header = {"Authorization": f"token {client.token}"}
        self._socket = websocket.create_connection(url, header=header, timeout=timeout)
        self._socket.settimeout(None)
        threading.Thread(target=self._read, daemon=True, name=f"read {path}").start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, websocket.WebSocketException):
            while frame := self._socket.recv():
                message = _decode(frame)
                with self._changed:
                    self._keep(message)
                    self._changed.notify_all()
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _keep(self, message: Message) -> None:
        self.messages.append(message)

    def wait(self, what: str, condition: Callable[[], Any], timeout: float) -> Any:
        """Return the first true value of `condition()`, looked at after every message."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not (value := condition()):
                left = deadline - time.monotonic()
                if left <= 0 or self.closed:
                    why = f"not within {timeout:g} s" if left <= 0 else "the websocket closed"
                    kinds = [m.get("header", m).get("msg_type", m) for m in self.messages[-12:]]
                    raise AssertionError(f"{what}: {why}; last messages: {kinds}")
                self._changed.wait(min(left, 1))
        return value

    def close(self) -> None:
        with contextlib.suppress(OSError, websocket.WebSocketException):
            self._socket.close(timeout=1)


def _decode(frame: str | bytes) -> Message:
    if isinstance(frame, bytes):  # a message with buffers: offsets first, then JSON, then they
        (count,) = struct.unpack("!I", frame[:4])
        offsets = [*struct.unpack(f"!{count}I", frame[4 : 4 * (count + 1)]), len(frame)]
        message = json.loads(frame[offsets[0] : offsets[1]])
        message["buffers"] = [frame[a:b] for a, b in itertools.pairwise(offsets[1:])]
        return dict(message)
    return dict(json.loads(frame))


class EventStream(_Socket):
    """The server's events since the subscription."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, "api/events/subscribe", 30)

    def of(self, kind: str, **fields: Any) -> list[Message]:
        """Return the ``operation`` or ``kernel`` events with the given values."""
        return [
            event
            for event in list(self.messages)
            if event["schema_id"].endswith(f"jupyter_gpu_ckpt/{kind}/v1")
            and all(event.get(name) == value for name, value in fields.items())
        ]

    def wait_for(self, kind: str, *, timeout: float = 30, **fields: Any) -> Message:
        """Return the first such event."""
        return dict(
            self.wait(f"event {kind} {fields}", lambda: self.of(kind, **fields), timeout)[0]
        )


class KernelClient(_Socket):
    """A connection to one kernel, as a notebook page has it."""

    def __init__(self, client: Client, kernel_id: str, session: str, timeout: float) -> None:
        self.id = kernel_id
        self.session = session
        self._by_parent: dict[str | None, list[Message]] = {}
        super().__init__(
            client, f"api/kernels/{kernel_id}/channels?session_id={self.session}", timeout
        )

    def send(self, channel: str, kind: str, content: Message, parent: Message | None = None) -> str:
        """Send a message and return its id."""
        msg_id = uuid.uuid4().hex
        header = {
            "msg_id": msg_id, "msg_type": kind, "username": "tester", "session": self.session,
            "date": datetime.now(timezone.utc).isoformat(), "version": "5.3",
        }  # fmt: skip
        message = {
            "header": header, "parent_header": (parent or {}).get("header", {}), "metadata": {},
            "content": content, "channel": channel, "buffers": [],
        }  # fmt: skip
        self._socket.send(json.dumps(message))
        return msg_id

    def answers(self, msg_id: str, kind: str | None = None) -> list[Message]:
        """Return what came in answer to a message, in order."""
        return [
            m
            for m in list(self._by_parent.get(msg_id, ()))
            if kind in (None, m["header"]["msg_type"])
        ]

    def _keep(self, message: Message) -> None:
        super()._keep(message)
        parent = message.get("parent_header", {}).get("msg_id")
        self._by_parent.setdefault(parent, []).append(message)

    def request(self, channel: str, kind: str, content: Message, *, timeout: float = 30) -> Message:
        """Send a request and return its reply."""
        msg_id = self.send(channel, kind, content)
        reply = kind.replace("_request", "_reply")
        return dict(self.wait(reply, lambda: self.answers(msg_id, reply), timeout)[0])

    def begin(self, code: str, **content: Any) -> Execution:
        """Start executing a cell and return at once."""
        full = {
            "code": code, "silent": False, "store_history": True, "user_expressions": {},
            "allow_stdin": True, "stop_on_error": True, **content,
        }  # fmt: skip
        return Execution(self, self.send("shell", "execute_request", full))

    def execute(self, code: str, *, timeout: float = 60) -> Execution:
        """Execute a cell to its end."""
        return self.begin(code).finish(timeout)

    def run(self, code: str, *, timeout: float = 60) -> str:
        """Execute a cell, fail if it fails, and return what it printed, stripped."""
        execution = self.execute(code, timeout=timeout)
        assert execution.error is None, execution.error
        return execution.text.strip()

    @property
    def pid(self) -> int:
        """The kernel's PID, as it sees itself."""
        return int(self.run("import os; print(os.getpid())"))


class Execution:
    """One execute request and what came of it."""

    def __init__(self, kernel: KernelClient, msg_id: str) -> None:
        self.kernel = kernel
        self.msg_id = msg_id

    def on_iopub(self, kind: str) -> list[Message]:
        return [m for m in self.kernel.answers(self.msg_id, kind) if m["channel"] == "iopub"]

    @property
    def text(self) -> str:
        """What went to stdout, and the text of results, in order."""
        text = ""
        for message in self.kernel.answers(self.msg_id):
            content = message["content"]
            if message["header"]["msg_type"] == "stream" and content["name"] == "stdout":
                text += content["text"]
            elif message["header"]["msg_type"] in ("execute_result", "display_data"):
                text += content["data"].get("text/plain", "")
        return text

    @property
    def stderr(self) -> str:
        streams = [m["content"] for m in self.on_iopub("stream")]
        return "".join(c["text"] for c in streams if c["name"] == "stderr")

    @property
    def error(self) -> str | None:
        for message in self.on_iopub("error"):
            return "\n".join([message["content"]["ename"], *message["content"]["traceback"]])
        return None

    @property
    def reply(self) -> Message | None:
        return next((m["content"] for m in self.kernel.answers(self.msg_id, "execute_reply")), None)

    @property
    def idle(self) -> bool:
        return any(m["content"]["execution_state"] == "idle" for m in self.on_iopub("status"))

    def finish(self, timeout: float = 60) -> Execution:
        """Wait for the reply and for idle, as a page does before it takes a cell for done."""
        self.kernel.wait("the cell ends", lambda: self.idle and self.reply, timeout)
        return self

    def wait_text(self, part: str, timeout: float = 30) -> Execution:
        """Wait until `part` was printed."""
        self.kernel.wait(f"{part!r} is printed", lambda: part in self.text, timeout)
        return self

    def wait_input(self, timeout: float = 30) -> Message:
        """Wait until the cell asks for input and return the request."""
        found = self.kernel.wait(
            "the cell asks for input",
            lambda: self.kernel.answers(self.msg_id, "input_request"),
            timeout,
        )
        return dict(found[-1])

    def answer(self, value: str) -> None:
        """Answer the cell's input()."""
        self.kernel.send("stdin", "input_reply", {"value": value}, self.wait_input())
