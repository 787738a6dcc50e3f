"""Whether a kernel is idle, and all that it did is in a state: what hibernation rests on."""

from __future__ import annotations

from typing import Final

from .errors import CkptError
from .history import ask_kernel_info
from .store import StateRecord
from .tracking import TrackedKernel

#: Seconds that an idle kernel has to answer before it is saved.
_ANSWER: Final = 5.0


def used() -> CkptError:
    """What to raise where a kernel was used while it was saved, to be ended then."""
    return CkptError("busy", "The kernel was used meanwhile, so it runs on.", hint="Try again.")


def check_idle(kernel: TrackedKernel) -> None:
    """Raise CkptError ``busy`` for a kernel that runs a cell."""
    if kernel.watch is None or kernel.watch.now.execution_state != "idle":
        raise CkptError(
            "busy", "The kernel is running a cell.", hint="Hibernate it when it is idle."
        )


def holds_all(record: StateRecord, kernel: TrackedKernel) -> bool:
    """Whether all cells that the kernel ran are in its state, whoever sent them."""
    meta = record.meta
    return (
        kernel.watch is not None
        and meta.execution_state == "idle"
        and meta.execution_count == kernel.watch.now.execution_count
    )


async def answer(kernel: TrackedKernel) -> None:
    """Wait until the kernel has done all that it was asked before; CkptError ``busy``."""
    if await ask_kernel_info(kernel.km, kernel.km.connect_shell(), _ANSWER) is None:
        raise CkptError(
            "busy", "The kernel does not answer, so it runs on.", hint="Try again later."
        )
