"""Keeps jupyterhub-idle-culler from stopping a server in the middle of a save."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final

from tornado.httpclient import AsyncHTTPClient, HTTPClientError

#: Seconds that a server may take to say what it is doing.
_ANSWER: Final = 10.0

Arbiter = Callable[..., Awaitable[bool]]


def spare_saving(url: str = "http://127.0.0.1:8000") -> Arbiter:
    """A ``cull_arbiter_hook``: a server that saves or restores a kernel is left alone meanwhile.

    In the culler's configuration file (jupyterhub-idle-culler 2.0 or newer)::

        from jupyter_gpu_ckpt.hub.culling import spare_saving
        c.IdleCuller.cull_arbiter_hook = spare_saving("http://127.0.0.1:8000")

    The culler's role needs the scope ``access:servers`` besides those that it has. A server that
    does not say what it is doing is culled as ever, and so is one past the culler's ``max_age``;
    both save their kernels when they are stopped.

    Parameters
    ----------
    url
        How the culler reaches the hub's proxy, without the hub's base URL.
    """
    log = logging.getLogger("IdleCuller")  # the culler's own

    async def arbiter(
        *, inactive: timedelta | None, inactive_limit: float, server: dict[str, Any], **_: Any
    ) -> bool:
        if inactive is None or inactive.total_seconds() < inactive_limit:
            return False
        api = f"{url.rstrip('/')}{server['url']}gpu-ckpt/api/operations"
        headers = {"Authorization": f"token {os.environ['JUPYTERHUB_API_TOKEN']}"}
        try:
            answer = await AsyncHTTPClient().fetch(api, headers=headers, request_timeout=_ANSWER)
            running = [op for op in json.loads(answer.body) if op["status"] == "running"]
        except HTTPClientError as error:
            if error.code in (401, 403):
                log.warning(
                    "gpu-ckpt: %s does not let the culler ask: its role needs the scope "
                    "access:servers",
                    server["url"],
                )
            return True  # 404: a server without this extension
        except (OSError, ValueError, KeyError, TypeError):
            return True
        for operation in running:
            kind = operation["kind"]
            log.info("gpu-ckpt: %s is not culled now: a %s is under way", server["url"], kind)
        return not running

    return arbiter
