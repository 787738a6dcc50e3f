"""A server extension with which Jupyter Server looks every second whether it is still used.

Otherwise it does once a minute, and that cannot be configured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jupyter_server import serverapp
from tornado import ioloop

_MINUTE = 60_000


class _Hurried(ioloop.PeriodicCallback):
    def __init__(self, callback: Callable[[], Any], callback_time: float, jitter: float = 0):
        super().__init__(callback, 1000 if callback_time == _MINUTE else callback_time, jitter)


def _load_jupyter_server_extension(_: serverapp.ServerApp) -> None:
    serverapp.ioloop.PeriodicCallback = _Hurried  # type: ignore[misc]
