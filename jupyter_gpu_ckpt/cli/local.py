"""``doctor`` where no server runs: asks kernel-capture itself."""

from __future__ import annotations

import asyncio

from .. import describe
from ..capture.native import KernelCapture, find_kernel_capture
from ..capture.protocol import Probe
from ..errors import CkptError
from ..gpus.asking import inventory
from ..gpus.checks import checks
from ..models import Doctor


def examine() -> Doctor:
    """Examine this machine; what stands in the way is in the checks, nothing is raised."""
    try:
        found: Probe | CkptError = asyncio.run(_probe())
    except CkptError as error:
        found = error
    return describe.doctor(found, None, checks(inventory()))


async def _probe() -> Probe:
    path = find_kernel_capture()
    if path is None:
        raise CkptError(
            "cannot_capture",
            "The kernel-capture program is not installed.",
            hint="Install jupyter-gpu-ckpt from its Linux wheel.",
        )
    return await KernelCapture(path).probe()
