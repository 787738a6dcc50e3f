"""What a restored kernel and its pages are told: environment, history session, kernel info."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final

from .refresh import SHELL, python_code
from .talk import COMM_ID

#: IPython counts lines within a session of its history database. After a roll-back the old
#: count comes again, and the database would refuse the lines ("was not unique").
_NEW_SESSION: Final = (
    "(lambda shell: shell and shell.history_manager and shell.history_manager.new_session())"
    f"({SHELL})"
)

#: Seconds for which a socket is kept, so that a request is surely delivered.
_DELIVERY: Final = 5.0


def is_history(path: str) -> bool:
    """Whether this is IPython's history database, which all kernels of a user share."""
    return os.path.basename(path) == "history.sqlite"


def first_request(km: Any, language: str, environment: Mapping[str, str]) -> None:
    """Give a restored kernel something to do, so that its pages learn that it is idle.

    An IPython kernel is given new values of some variables, which are nowhere logged, has its
    callbacks called, and is asked to log its history into a new session from the next cell on;
    others are asked for their kernel info. Only asks, on a socket of its own: a kernel in the
    middle of a cell, or waiting for input, does it when it comes to it. Called after every restore.
    """
    channel = km.connect_shell()
    if language.lower() == "python":
        content = {
            "code": f"{python_code(environment)}\n{_NEW_SESSION}",
            "silent": True,
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        }
        header = km.session.msg_header("execute_request")
        header["msg_id"] = f"{COMM_ID}-{header['msg_id']}"  # the kernel's side knows it by that
        km.session.send(channel, "execute_request", content=content, header=header)
    else:
        km.session.send(channel, "kernel_info_request")
    asyncio.get_running_loop().call_later(_DELIVERY, channel.close)


async def ask_kernel_info(km: Any, channel: Any, timeout: float) -> dict[str, Any] | None:
    """Ask a kernel for its info, which it gives when it has done all it was asked there before.

    Parameters
    ----------
    km
        The kernel's manager.
    channel
        A fresh socket to its shell or control channel; it is closed.
    timeout
        Seconds after which the answer is ``None``.
    """
    answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def received(parts: list[bytes]) -> None:
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            _, message = km.session.feed_identities(parts)
            reply = km.session.deserialize(message)
            if reply["msg_type"] == "kernel_info_reply" and not answer.done():
                answer.set_result(reply["content"])

    channel.on_recv(received)
    km.session.send(channel, "kernel_info_request")
    try:
        return await asyncio.wait_for(answer, timeout)
    except asyncio.TimeoutError:
        return None
    finally:
        channel.close()


async def learn_kernel_info(km: Any, *, timeout: float) -> None:
    """Ask for the kernel info on the control channel, and let the server know it.

    A new page's websocket waits until the server has it, and the server asks on the shell
    channel, where a kernel that is in the middle of a cell does not answer. Called after a
    kernel was restored into a server that has not spoken with it yet.

    Parameters
    ----------
    km
        The kernel's manager.
    timeout
        Seconds after which the server is left to ask itself.
    """
    if hasattr(km, "_kernel_info_future"):
        return
    info = await ask_kernel_info(km, km.connect_control(), timeout)
    if info is not None and not hasattr(km, "_kernel_info_future"):
        known: Future[dict[str, Any]] = Future()
        known.set_result(info)
        km._kernel_info_future = known
