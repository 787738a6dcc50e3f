"""A kernel that is parked, or about to be: what was sent to it since, and what it needs."""

from __future__ import annotations

import msgspec

from .doorman import Kept
from .gpus.fit import used_gpus
from .gpus.inventory import GpuUse
from .operations import Run
from .room import Room
from .tracking import TrackedKernel


class ParkedKernel:
    """One of them; belongs to :mod:`.parking`, and to the event loop."""

    def __init__(self, kernel: TrackedKernel) -> None:
        self.kernel = kernel
        self.supervisor = kernel.provisioner.supervisor
        self.held = Kept()
        #: Of its present wait, or the last one.
        self.room = Room()
        self.is_needed = False
        #: The unpark that is cancelled because all cells that wanted it were interrupted.
        self.given_up: Run | None = None
        #: Bytes that it needs on each GPU, by UUID.
        self.needs: dict[str, int] = {}
        self.gpus: set[str] = set()
        self.memory = 0

    @property
    def is_current(self) -> bool:
        """Whether the kernel is still this process."""
        return self.kernel.provisioner.supervisor is self.supervisor

    @property
    def is_parked(self) -> bool:
        return self.kernel.parked is not None

    def released(self, use: GpuUse) -> None:
        """Note what the park has freed, and where it is now: a save does not see that any more."""
        self.kernel.last_park = use.processes
        self.memory = use.memory
        self.gpus = used_gpus(use.processes, use.gpus)
        told = {gpu.uuid: gpu.released_bytes for gpu in use.gpus if gpu.released_bytes}
        self.needs = told or ({uuid: use.memory for uuid in self.gpus} if use.memory else {})

    def wait(self, why: str | None, position: int | None = None) -> bool:
        """Note what is waited for; whether that is news."""
        parked = self.kernel.parked
        if parked is None or (parked.waiting, parked.position) == (why, position):
            return False
        self.kernel.parked = msgspec.structs.replace(parked, waiting=why, position=position)
        return True
