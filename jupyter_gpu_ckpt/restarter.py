"""An unexpected death restores the last state instead of starting empty.

The stock restarter stays in charge of kernels: it asks the provisioner every few seconds
whether the process lives. The provisioner says "alive" while a restore is under way, so
the restarter only starts an empty kernel when there is no state, or when restoring failed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .errors import CkptError
from .models import OperationResult
from .operations import Run, in_thread
from .restoring import Restore

if TYPE_CHECKING:
    from .keeper import Keeper
    from .observer import RestoreToken
    from .tracking import TrackedKernel


class DeathRestorer:
    """Carries out what the policy decides; part of the keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def kernel_died(self, kernel: TrackedKernel) -> bool:
        """A kernel ended though nobody asked: true when it is brought back.

        Called through the tracker by the kernel's provisioner, before anybody can see the
        kernel dead.
        """
        state_id = kernel.policy.state_to_restore()
        if state_id is None:
            return False
        token = kernel.provisioner.begin_restore()
        self._keeper.in_background(self._restore(kernel, state_id, token))
        return True

    async def _restore(self, kernel: TrackedKernel, state_id: str, token: RestoreToken) -> None:
        keeper = self._keeper
        try:
            before = keeper.running(kernel.kernel_id)
            if before is not None and before.task is not None:
                # A save, which its kernel's death ends in a moment, or a roll-back.
                await asyncio.wait([before.task], timeout=keeper.save_timeout)
            if not kernel.provisioner.is_wanted(token):
                return  # the roll-back brought the kernel back, or its user restarted it
            record = await in_thread(keeper.store.state, state_id)
            path = (await keeper.sessions.paths()).get(kernel.kernel_id)

            async def work(run: Run) -> OperationResult:
                return await Restore(keeper, record, "death").in_place(run, kernel, token)

            run = keeper.begin(
                "restore", kernel.kernel_id, work, path=path, state_id=state_id, cause="death"
            )
            assert run.task is not None
            await asyncio.wait([run.task])
            if run.model.error is not None and run.model.status == "failed":
                keeper.announce.restore_failed(record, path, "death", run.model.error.message)
        except CkptError as error:
            keeper.log.warning("Kernel %s cannot be restored: %s", kernel.kernel_id, error.message)
        finally:
            kernel.provisioner.end_restore(token)
