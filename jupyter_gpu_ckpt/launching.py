"""A process tree below its supervisor comes to run, a fresh or a restored one; or does not end."""

from __future__ import annotations

import asyncio

from .capture.supervisor import Supervisor
from .errors import CkptError
from .operations import in_thread


async def started(supervisor: Supervisor, timeout: float) -> None:
    """Wait until the kernel runs; otherwise, and when cancelled, its tree is ended.

    Raises what :meth:`.Supervisor.wait_started` raises.
    """
    waiting = asyncio.ensure_future(in_thread(supervisor.wait_started, timeout))
    try:
        await asyncio.shield(waiting)
    except BaseException:
        supervisor.kill()  # which also ends the waiting
        await asyncio.wait([waiting])
        raise


def not_ended(reason: str, error: TimeoutError) -> CkptError:
    """What to raise when a tree that was killed is still there."""
    return CkptError(
        reason,
        "The process of the kernel did not end.",
        hint="Something on the node may hold it, as a disk that does not answer: try again later.",
        details=str(error),
    )
