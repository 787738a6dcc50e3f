"""``add_admin_page(c)``: what a hub's configuration needs for the page of all users' states."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from traitlets.config import Config

from .service_scopes import ADMIN_UI, CUSTOM_SCOPES, MANAGE, METRICS, READ, SERVICE_SCOPES, SETTINGS
from .settings import GpuCkptHub

NAME: Final = "gpu-ckpt"
URL: Final = "http://127.0.0.1:10140"


def add_admin_page(
    c: Config,
    *,
    name: str = NAME,
    url: str = URL,
    folder: str | Path = "gpu-ckpt-service",
    interval: float = 60.0,
) -> None:
    """Add the page of saved states to a hub, as a service that the hub starts.

    Call it at the end of ``jupyterhub_config.py``, after what it reads: ``c.GpuCkptHub``,
    ``c.JupyterHub.services`` and ``c.JupyterHub.load_roles``. Every user may open the page and
    sees her own states; who has the scope ``admin-ui`` (the hub's administrators) or
    ``custom:gpu-ckpt:manage`` sees and manages all, ``custom:gpu-ckpt:read`` sees all.

    Parameters
    ----------
    c
        The hub's configuration.
    name
        Name of the service, and so of the page: ``/services/gpu-ckpt/``.
    url
        Where the service listens, and the hub's proxy reaches it.
    folder
        The service's own: the audit log, usage over time, what was read of remote stores.
        Relative to where the hub runs.
    interval
        Seconds between two readings of all stores.
    """
    settings = GpuCkptHub(config=c).trait_values(config=True)
    service = {
        "folder": str(folder),
        "interval": interval,
        "trusted_downstream_ips": [*(c.JupyterHub.get("trusted_downstream_ips") or ())],
    }
    text = msgspec.json.encode({"hub": settings, "service": service}).decode()
    c.JupyterHub.services.append(
        {
            "name": name,
            "url": url,
            "command": [sys.executable, "-m", "jupyter_gpu_ckpt.hub"],
            "environment": {SETTINGS: text},
            "display": True,
            "oauth_no_confirm": True,
            "oauth_client_allowed_scopes": [ADMIN_UI, MANAGE, READ, METRICS],
        }
    )
    c.JupyterHub.custom_scopes.update(CUSTOM_SCOPES)
    roles = c.JupyterHub.load_roles
    roles.append({"name": name, "scopes": list(SERVICE_SCOPES), "services": [name]})
    _let_users_in(roles, f"access:services!service={name}")


def _let_users_in(roles: Any, scope: str) -> None:
    """Add a scope to the role that all users have, wherever that is set."""
    if isinstance(roles, list):
        for role in roles:
            if role.get("name") == "user":
                role["scopes"] = [*role.get("scopes", []), scope]
                return
    roles.append({"name": "user", "scopes": ["self", scope]})
