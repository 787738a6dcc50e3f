"""A server extension with which no more than three messages are kept for one kernel.

Otherwise they are ten thousand, and that cannot be configured.
"""

from __future__ import annotations

from jupyter_server import serverapp

from jupyter_gpu_ckpt import doorman


def _load_jupyter_server_extension(_: serverapp.ServerApp) -> None:
    doorman._MOST = 3  # type: ignore[misc]
