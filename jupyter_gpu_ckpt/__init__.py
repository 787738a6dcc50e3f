"""Save a running Jupyter kernel whole, and restore it after the kernel, server or node has died."""

from __future__ import annotations

from typing import Any

try:
    from ._version import __version__
except ImportError:  # a checkout that was never built: the build writes _version.py
    __version__ = "0+unbuilt"

__all__ = ["__version__"]


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Tell the server which extension app this package holds; the server calls it at start."""
    from .app import GpuCkptApp

    return [{"module": "jupyter_gpu_ckpt", "app": GpuCkptApp}]


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Tell ``jupyter labextension`` where the built front end is."""
    return [{"src": "labextension", "dest": "jupyter-gpu-ckpt"}]


def load_ipython_extension(shell: Any) -> None:
    """Load the magics into a kernel; IPython calls it for ``%load_ext jupyter_gpu_ckpt``."""
    from .magics import load

    load(shell)
