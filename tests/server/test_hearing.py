"""What a kernel does is heard by the server's own socket, and by one of ours where it has none."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import zmq
from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager
from jupyter_client.session import Session

from jupyter_gpu_ckpt.doorman import HeldMessage
from jupyter_gpu_ckpt.unheard import Unheard
from jupyter_gpu_ckpt.watch import Activity, KernelWatch
from tests.harness.client import KernelClient, wait_for
from tests.harness.server import JupyterServer
from tests.server.rest import Api

Start = Callable[..., KernelClient]


def subscribers(server: JupyterServer, kernel_id: str) -> int:
    """How many sockets of the server listen to what the kernel says."""
    (file,) = server.home.data.rglob(f"kernel-{kernel_id}.json")
    connection = json.loads(file.read_text())
    there = (connection["ip"], connection["iopub_port"])
    return sum(
        tuple(one.raddr) == there and one.status == psutil.CONN_ESTABLISHED
        for one in server.process.net_connections("tcp")
    )


def test_no_socket_but_the_servers_own(server: JupyterServer, api: Api, start: Start) -> None:
    kernel = start()

    def listens_once(count: int) -> None:
        """One for the page, and one for the server; and by that one the work is known."""
        kernel.run("1")
        wait_for("two sockets", lambda: subscribers(server, kernel.id) == 2, 30)
        assert server.client.save(kernel)["result"]["state_id"]
        state = server.client.states(kernel=kernel.id)[0]
        assert (state["execution_count"], state["execution_state"]) == (count, "idle")

    listens_once(1)
    server.client.post(f"api/kernels/{kernel.id}/restart")
    kernel.close()
    kernel = server.client.connect(kernel.id)
    listens_once(1)
    events = server.client.events()
    psutil.Process(kernel.pid).kill()
    events.wait_for("kernel", action="restored", kernel_id=kernel.id, cause="death")
    listens_once(2)
    api.done(f"/kernels/{kernel.id}/hibernate")
    listens_once(3)
    state = server.client.states(kernel=kernel.id)[0]["id"]
    kernel.close()
    server.client.delete(f"api/kernels/{kernel.id}")
    server.client.restore(state)
    kernel = server.client.connect(kernel.id)
    listens_once(4)
    server.client.delete(f"api/kernels/{kernel.id}")


class Heard:
    """Implements :class:`jupyter_gpu_ckpt.watch.WatchListener`."""

    def __init__(self) -> None:
        self.cells: list[tuple[float, float]] = []
        self.touches = 0
        self.requests: list[dict[str, Any]] = []

    def cell_started(self, at: float) -> None:
        self.cells.append((at, -1.0))

    def cell_ended(self, at: float, seconds: float) -> None:
        self.cells[-1] = (self.cells[-1][0], seconds)

    def was_touched(self) -> None:
        self.touches += 1

    def asked(self, data: dict[str, Any]) -> None:
        self.requests.append(data)

    def all_told(self) -> None:
        pass


class Speaker:
    """What a kernel says, without the kernel."""

    def __init__(self, folder: Path) -> None:
        self.session = Session(key=b"secret")
        self.km: Any = AsyncIOLoopKernelManager(
            connection_file=str(folder / "kernel.json"), iopub_port=0, session=self.session
        )
        self.begins()

    def begins(self) -> None:
        """Another process; the first takes any port."""
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        if self.km.iopub_port:
            # ZeroMQ closes what was closed before in a thread of its own.
            wait_for("the port is free again", self._binds, 30)
        else:
            self.km.iopub_port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.counted = 0

    def _binds(self) -> bool:
        try:
            self.socket.bind(f"tcp://127.0.0.1:{self.km.iopub_port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            return False
        return True

    def ends(self) -> None:
        """The process is gone."""
        self.socket.close(linger=0)

    async def is_heard(self) -> None:
        """Wait for a subscriber."""
        said = b""
        while said != b"\x01":
            while not self.socket.poll(0):
                await asyncio.sleep(0.01)
            said = self.socket.recv()

    def say(
        self, kind: str, parent: dict[str, Any], content: dict[str, Any], **how: Any
    ) -> list[bytes]:
        session = how.get("session", self.session)
        topic = how.get("topic", f"kernel.{kind}".encode())
        message = session.msg(kind, content, parent={"header": parent})
        parts: list[bytes] = [topic, *session.serialize(message)]
        self.socket.send_multipart(parts)
        return parts

    def cell(self) -> None:
        request = self.session.msg_header("execute_request")
        self.counted += 1
        self.say("status", request, {"execution_state": "busy"})
        self.say("execute_input", request, {"code": "", "execution_count": self.counted})
        for _ in range(400):
            self.say("stream", request, {"name": "stdout", "text": "x"})
        self.say("status", request, {"execution_state": "idle"})


def test_the_socket_changes_when_the_server_has_one(tmp_path: Path) -> None:
    async def live() -> None:
        speaker, heard = Speaker(tmp_path), Heard()
        watch = KernelWatch(speaker.km, None, heard)
        await speaker.is_heard()
        own = [watch.has_own_socket]
        speaker.cell()
        while watch.now != Activity("idle", 1, None):
            await asyncio.sleep(0.01)
        assert len(heard.cells) == 1 and heard.cells[0][1] >= 0
        assert heard.touches >= 1

        refused: list[list[bytes]] = []
        recorded: list[str] = []
        checking = Session(key=b"secret")

        def record(parts: list[bytes]) -> None:
            _, message = checking.feed_identities(parts)
            try:
                recorded.append(checking.deserialize(message)["msg_type"])
            except ValueError:
                refused.append(parts)
                raise

        stream = speaker.km.connect_iopub()
        stream.on_recv(record)
        speaker.km._activity_stream = stream
        watch.share()
        assert [*own, watch.has_own_socket] == [True, False]
        await speaker.is_heard()
        other = Session(key=b"another")
        speaker.say("status", {}, {"execution_state": "starting"}, session=other)
        speaker.socket.send_multipart([b"kernel.status", b"nonsense"])
        speaker.say("comm_msg", {}, {"data": {"ask": "hello"}}, topic=b"comm-jupyter-gpu-ckpt")
        speaker.cell()
        while watch.now != Activity("idle", 2, None):
            await asyncio.sleep(0.01)
        # What the server refuses is not taken for the kernel's; all else is for both.
        assert len(refused) == 1
        assert recorded.count("status") == 2 and recorded.count("stream") == 400
        assert heard.requests == [{"ask": "hello"}]
        assert len(heard.cells) == 2

        # What was said before a reset is the old process's, heard or not.
        speaker.cell()
        while recorded.count("stream") < 800:
            await asyncio.sleep(0.01)
        watch.reset(Activity("busy", 7, "a"))
        assert watch.now.execution_count == 7
        stream.close()
        assert not watch.is_open
        assert watch.now.execution_count == 7
        watch.close()

        # Left alone, the server's socket is what it was.
        again = speaker.km.connect_iopub()
        again.on_recv(record)
        speaker.km._activity_stream = again
        watch = KernelWatch(speaker.km, None, heard)
        watch.share()
        watch.close()
        assert not again.closed()
        again.close()
        speaker.socket.close()

    asyncio.run(asyncio.wait_for(live(), 60))


def test_cells_wait_until_a_new_process_is_heard(tmp_path: Path) -> None:
    class Page:
        """A websocket's connection, of which the kernel runs what it is sent."""

        subprotocol = None

        def __init__(self, speaker: Speaker) -> None:
            self._speaker = speaker
            self.channels = {"shell": SimpleNamespace(closed=lambda: False)}
            self.sent = 0

        def pass_on(self, _: str | bytes) -> None:
            self.sent += 1
            if not self._speaker.socket.closed:
                self._speaker.cell()

    class Door:
        """Implements :class:`jupyter_gpu_ckpt.doorman.Doorman`."""

        def opened(self, kernel_id: str) -> None: ...

        def holds(self, kernel_id: str, message: HeldMessage) -> bool:
            return unheard.holds(kernel_id, message)

    unheard = Unheard(Door(), logging.getLogger())

    async def live() -> None:
        speaker = Speaker(tmp_path)
        watch = KernelWatch(speaker.km, None, Heard())
        kernel: Any = SimpleNamespace(kernel_id="a", watch=watch)
        page = Page(speaker)

        def sends(kind: str) -> bool:
            content = {"header": {"msg_type": kind, "msg_id": "1"}, "content": {}}
            message = HeldMessage(page, json.dumps(content))
            kept = Door().holds("a", message)
            if not kept:
                message.deliver()
            return kept

        unheard.started(kernel)
        await speaker.is_heard()
        assert not sends("execute_request"), "nothing new was started"
        while watch.now != Activity("idle", 1, None):
            await asyncio.sleep(0.01)

        speaker.ends()
        watch.reset()
        watch.expect(is_new=False)
        unheard.started(kernel)
        assert sends("execute_request") and not sends("kernel_info_request")
        assert sends("execute_request")
        assert len(unheard.taken("a")) == 2, "who interrupts takes them back"
        assert sends("execute_request")
        speaker.begins()
        while watch.now != Activity("idle", 1, None):
            await asyncio.sleep(0.01)
        assert not sends("execute_request"), "it is heard now"

        # Restarted or shut down meanwhile, or restored in its place.
        speaker.ends()
        watch.expect(is_new=False)
        unheard.started(kernel)
        assert sends("execute_request") and len(unheard.ended("a")) == 1
        unheard.started(kernel)
        sent = page.sent
        assert sends("execute_request") and page.sent == sent
        watch.reset()
        assert page.sent == sent + 1
        assert not sends("execute_request")

        # The first process of a kernel, which both sockets of the server wait for in turn.
        watch.close()
        watch = kernel.watch = KernelWatch(speaker.km, None, Heard())
        watch.expect(is_new=True)
        unheard.started(kernel)
        stream = speaker.km.connect_iopub()
        stream.on_recv(lambda _: None)
        speaker.km._activity_stream = stream
        watch.share()
        assert sends("execute_request")
        speaker.begins()
        while watch.now.execution_count is None:
            await asyncio.sleep(0.01)
        watch.close()
        stream.close()
        speaker.socket.close()

    asyncio.run(asyncio.wait_for(live(), 60))
