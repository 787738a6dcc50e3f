"""Names that the hub's configuration and the service have in common."""

from __future__ import annotations

from typing import Final

#: See all users' states.
READ: Final = "custom:gpu-ckpt:read"
#: Also delete, expire and pin them.
MANAGE: Final = "custom:gpu-ckpt:manage"
#: Have the metrics only.
METRICS: Final = "custom:gpu-ckpt:metrics"
#: JupyterHub's own for its page of users: who has it manages states too.
ADMIN_UI: Final = "admin-ui"

CUSTOM_SCOPES: Final[dict[str, dict[str, object]]] = {
    MANAGE: {
        "description": "See, pin, delete and expire all users' saved kernel states.",
        "subscopes": [READ],
    },
    READ: {"description": "See all users' saved kernel states.", "subscopes": [METRICS]},
    METRICS: {"description": "Read the metrics of saved kernel states."},
}

#: What the service may ask the hub: who its users are, their groups and named servers.
SERVICE_SCOPES: Final = ("list:users", "read:users:name", "read:users:groups", "read:servers")

#: The environment variable of the service with the settings, as JSON.
SETTINGS: Final = "JUPYTER_GPU_CKPT_HUB_SETTINGS"
