"""What JupyterLab's pages do that the protocol-level user does not: binary frames, widgets."""

from __future__ import annotations

import uuid
from typing import Any

import websocket
from jupyter_client.session import Session
from jupyter_server.services.kernels.connection import base as wire

from tests.harness.client import KernelClient
from tests.harness.server import JupyterServer

#: Untyped.
_wire: Any = wire

#: A widget whose movements are noted in ``moved``; any number of pages may open it.
WIDGET = """
moved = []
def opened(comm, _):
    comm.on_msg(lambda message: moved.append(message["content"]["data"]["n"]))
get_ipython().kernel.comm_manager.register_target("slider", opened)
"""


def open_widget(kernel: KernelClient) -> str:
    """Open a widget in a kernel that has run `WIDGET`; return its id."""
    widget = uuid.uuid4().hex
    content = {"comm_id": widget, "target_name": "slider", "data": {}}
    kernel.send("shell", "comm_open", content)
    kernel.run("pass")  # it is there when that has run
    return widget


class BinaryPage:
    """A page that speaks Jupyter's newer websocket protocol, as JupyterLab does."""

    PROTOCOL = "v1.kernel.websocket.jupyter.org"

    def __init__(self, server: JupyterServer, kernel: KernelClient) -> None:
        session = uuid.uuid4().hex
        url = server.client.base_url.replace("http", "ws", 1)
        self._session = Session(session=session)
        self._socket = websocket.create_connection(
            f"{url}api/kernels/{kernel.id}/channels?session_id={session}",
            header={"Authorization": f"token {server.token}"},
            subprotocols=[self.PROTOCOL],
            timeout=30,
        )
        assert self._socket.getsubprotocol() == self.PROTOCOL

    def send(self, kind: str, content: dict[str, Any], channel: str = "shell") -> None:
        message = self._session.msg(kind, content)
        data = _wire.serialize_msg_to_ws_v1(message, channel, self._session.pack)
        self._socket.send_binary(data)

    def send_text(self, text: str) -> None:
        self._socket.send(text)

    def close(self) -> None:
        self._socket.close(timeout=5)  # waits until the server has seen it
