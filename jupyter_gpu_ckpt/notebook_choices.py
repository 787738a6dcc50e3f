"""What notebooks say in their own metadata of how their kernels are saved: read in time, or not."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .autosave import from_metadata
from .work import Work

if TYPE_CHECKING:
    from .keeper import Keeper

#: Least seconds between two looks at the notebook of a kernel that works.
_LOOK: Final = 5.0
#: How many times as long as a look took it is until the next one: large notebooks take long.
_LOOK_REST: Final = 100.0
#: The most seconds of that.
_LONGEST_REST: Final = 600.0
#: Seconds after which a look that nobody waits for is given up: contents may never answer.
_LONGEST_LOOK: Final = 30.0
#: Most seconds that anybody waits for notebooks to be looked at; contents may be far away.
_LAST_LOOK: Final = 2.0


class NotebookChoices:
    """Reads notebooks' choices; part of :class:`~jupyter_gpu_ckpt.policies.Policies`.

    Parameters
    ----------
    keeper
        Has the sessions and the log.
    changed
        Called where a notebook says something else than before: the work has it by then.
    """

    def __init__(self, keeper: Keeper, changed: Callable[[Work], None]) -> None:
        self._keeper = keeper
        self._changed = changed
        self._stopped = False

    def stop(self) -> None:
        """Look by itself no more: all are looked at before the end."""
        self._stopped = True

    async def see(self, works: Sequence[Work], within: float = math.inf) -> None:
        """Learn what notebooks say by now of their kernels, in so many seconds and at most 2."""
        if not works:
            return
        sessions = self._keeper.sessions
        within = max(0.0, min(within, _LAST_LOOK))
        end = time.monotonic() + within

        async def see() -> None:
            paths = await sessions.paths()
            if not sessions.is_blocking:
                await asyncio.gather(*(self._read(work, paths) for work in works))
                return
            for work in works:
                if time.monotonic() < end:  # while one is read, no other clock is looked at
                    await self._read(work, paths)

        await self._for(within, see())

    def see_soon(self, work: Work) -> None:
        """See whether the notebook wants the kernel to be saved earlier, or not at all."""
        # Of a kernel that has run nothing there is nothing to save.
        if self._stopped or work.is_pristine:
            return
        work.wants_look = True
        if not work.is_looking:
            work.is_looking = True
            self._keeper.in_background(self._look(work))

    async def _look(self, work: Work) -> None:
        """One at a time for each kernel, however often it works and whatever contents do."""
        try:
            while work.wants_look:
                await asyncio.sleep(max(0.0, work.look_after - time.monotonic()))
                if self._stopped:
                    return
                work.wants_look = False
                began = time.monotonic()
                await self._for(_LONGEST_LOOK, self._read(work))
                took = time.monotonic() - began
                work.look_after = began + max(_LOOK, min(took * _LOOK_REST, _LONGEST_REST))
        finally:
            work.is_looking = False

    async def _for(self, seconds: float, reading: Coroutine[Any, Any, None]) -> None:
        """Wait so long for something to be read, then give it up, whether it heeds that or not."""
        task = asyncio.create_task(reading)
        try:
            await asyncio.wait([task], timeout=seconds)
        finally:
            late = task.cancel()
        if late:
            return
        # Contents may have cancelled what they themselves waited for.
        error = "the reading was cancelled" if task.cancelled() else task.exception()
        if error is not None:
            self._keeper.log.warning("What notebooks say of saves is not known: %s", error)

    async def _read(self, work: Work, paths: Mapping[str, str] | None = None) -> None:
        """Learn what the notebook's own metadata choose, where it changed.

        ``paths``: of all kernels that have one, where they are known.
        """
        sessions, kernel_id = self._keeper.sessions, work.kernel.kernel_id
        try:
            path = (await sessions.paths() if paths is None else paths).get(kernel_id)
            found = await sessions.metadata(path, unless=work.notebook[1])
        except (Exception, asyncio.CancelledError) as error:
            # A contents manager may raise anything; the choice stays as it was. What it cancelled
            # itself must not end the reading of others, and who cancels this waits for no more.
            self._keeper.log.debug("The notebook of %s cannot be read: %r", kernel_id, error)
            return
        if found is not None:
            metadata, changed = found
            work.notebook = (from_metadata(metadata), changed)
            self._changed(work)
