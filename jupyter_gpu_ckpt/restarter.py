"""An unexpected death restores the last state instead of starting empty.

The stock restarter stays in charge of kernels: it asks the provisioner every few seconds
whether the process lives. The provisioner says "alive" while a restore is under way, so
the restarter only starts an empty kernel when there is no state, or when restoring failed.
A state that turns out to be damaged is passed over for the one before it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .errors import CkptError
from .models import OperationResult
from .operations import Run, in_thread
from .restoring import Restore
from .saved import passed_over

if TYPE_CHECKING:
    from .keeper import Keeper
    from .observer import RestoreToken
    from .replacing import Replacement
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
        state_ids = kernel.policy.states_to_restore()
        if not state_ids:
            return False
        token = kernel.provisioner.begin_restore()
        replacement = self._keeper.hibernation.replacements.enter(kernel.kernel_id)
        self._keeper.in_background(self._restore(kernel, state_ids, token, replacement))
        return True

    async def _restore(
        self,
        kernel: TrackedKernel,
        state_ids: list[str],
        token: RestoreToken,
        replacement: Replacement,
    ) -> None:
        keeper = self._keeper
        failure: str | None = "The restore was cancelled."
        try:
            before = keeper.running(kernel.kernel_id)
            if before is not None:
                # A save, which its kernel's death ends in a moment, or a roll-back.
                await before.ended(keeper.save_timeout)
            if not kernel.provisioner.is_wanted(token):
                failure = None
                return  # the roll-back brought the kernel back, or its user restarted it
            path = (await keeper.sessions.paths()).get(kernel.kernel_id)
            reason = keeper.ability.faults.reason(kernel.kernel_id)
            # That a GPU is lost is told by the restore, which knows whether another one was used.
            told = [f"{reason.words}."] if reason is not None and reason.lost is None else []

            async def work(run: Run) -> OperationResult:
                return await self._first_whole(run, kernel, state_ids, token, told)

            run = keeper.begin(
                "restore", kernel.kernel_id, work, path=path, state_id=state_ids[0], cause="death"
            )
            await run.ended()
            failure = run.model.error.message if run.model.error is not None else None
            if run.model.error is not None and run.model.status == "failed":
                why = f"{reason.words}. " if reason is not None else ""
                keeper.announce.restore_failed(
                    kernel.kernel_id, state_ids[0], path, "death", why + run.model.error.message
                )
        except CkptError as error:
            failure = error.message
            keeper.log.warning("Kernel %s cannot be restored: %s", kernel.kernel_id, error.message)
        finally:
            kernel.provisioner.end_restore(token)
            keeper.hibernation.replacements.leave(replacement, failure)

    async def _first_whole(
        self,
        run: Run,
        kernel: TrackedKernel,
        state_ids: list[str],
        token: RestoreToken,
        told: list[str],
    ) -> OperationResult:
        """Restore the first of these states that is whole; those known as damaged are tried last.

        ``told`` is what its user is told besides. Raises the error of the first one where none is.
        """
        keeper = self._keeper
        left = deque((state_id, False) for state_id in state_ids)
        found: dict[str, CkptError] = {}
        while left:
            state_id, tried_last = left.popleft()
            try:
                record = await in_thread(keeper.store.state, state_id)
                if record.damage is not None and not tried_last:
                    found[state_id] = CkptError("state_damaged", record.damage)
                    left.append((state_id, True))
                    continue
                run.model.state_id = state_id
                newer = state_ids[: state_ids.index(state_id)]
                notes = told + [passed_over(other, found[other]) for other in newer]
                restore = Restore(keeper, record, "death", notes)
                return await restore.in_place(run, kernel, token)
            except CkptError as error:
                if error.reason not in ("state_damaged", "unknown_state"):
                    raise
                found[state_id] = error
        raise found[state_ids[0]]
