"""A restored process becomes a kernel of the server, which then is connected to it again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .capture.peers import wait_for_peers
from .connection import is_own_address
from .errors import CkptError
from .history import first_request
from .refresh import values_of_server
from .store import StateMeta
from .tracking import TrackedKernel, WaitingProcess

if TYPE_CHECKING:
    from .keeper import Keeper


async def take_in(
    keeper: Keeper, kernel_id: str, path: str | None, meta: StateMeta, waiting: WaitingProcess
) -> TrackedKernel:
    """Have the server make a kernel manager that adopts a restored process.

    Parameters
    ----------
    keeper
        Of the server.
    kernel_id
        What the kernel is called from now on.
    path
        The notebook that it belongs to, if any.
    meta
        The state that it was restored from.
    waiting
        The process; when this fails, its end is the caller's business.

    Raises
    ------
    CkptError
        ``not_restorable``.
    """
    keeper.tracker.offer(kernel_id, waiting)
    try:
        await keeper.kernel_manager.start_kernel(
            kernel_id=kernel_id,
            kernel_name=meta.kernel_name,
            **await keeper.sessions.launch_arguments(path),
        )
        ready = keeper.kernel_manager.get_kernel(kernel_id).ready
        # Not done yet where the server starts kernels in the background.
        await asyncio.wait_for(
            ready if isinstance(ready, asyncio.Future) else asyncio.wrap_future(ready),
            keeper.restore_timeout,
        )
        # Then the server's socket is there, by which the kernel is heard.
        pending = getattr(keeper.kernel_manager, "_pending_kernel_tasks", {}).get(kernel_id)
        if isinstance(pending, asyncio.Future):
            await asyncio.wait([pending], timeout=keeper.restore_timeout)
    except CkptError:
        raise
    except Exception as error:
        raise CkptError(
            "not_restorable",
            "The server could not take the restored kernel in.",
            hint=f"Install its kernel '{meta.display_name}' here if it is missing, "
            "then restore the state.",
            details=f"{type(error).__name__}: {error}",
        ) from error
    kernel = keeper.tracker.get(kernel_id)
    if kernel is None or kernel.provisioner.supervisor is not waiting.supervisor:
        raise CkptError(
            "not_restorable",
            f"This server starts '{meta.display_name}' in a way that takes no restored kernel in.",
            hint="Its kernelspec, or the server's configuration, names another kernel provisioner: "
            "take that out, then restore the state.",
        )
    return kernel


async def reconnect(keeper: Keeper, kernel: TrackedKernel, meta: StateMeta) -> bool:
    """Wait until the server's sockets are back with a kernel whose main thread is held.

    Returns false when not all came within ``hold_timeout`` seconds.
    """
    km = kernel.km
    km.execution_state = meta.execution_state
    first_request(km, meta.language, values_of_server(keeper, km))
    expected = keeper.roster.sockets(kernel.kernel_id)
    ip = km.ip if is_own_address(km.ip) else "127.0.0.1"
    there = await wait_for_peers(ip, expected, timeout=keeper.hold_timeout)
    km.execution_state = meta.execution_state
    return there
