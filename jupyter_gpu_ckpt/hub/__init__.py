"""JupyterHub: its administrator turns saving and restoring on for all users' servers.

At the end of ``jupyterhub_config.py``::

    from jupyter_gpu_ckpt.hub import configure
    configure(c)

See docs/jupyterhub.md.
"""

from __future__ import annotations

from .configuring import configure
from .service_setup import add_admin_page
from .settings import GpuCkptHub

__all__ = ["GpuCkptHub", "add_admin_page", "configure"]
