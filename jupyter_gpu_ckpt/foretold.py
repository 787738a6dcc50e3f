"""Ends that are foretold: what a notice that this server is about to end sets off."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import uuid
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Final

from . import metrics
from .errors import CkptError
from .models import Ending, EndingKernel
from .notices import Notice, NoticeWatch
from .operations import in_thread

if TYPE_CHECKING:
    from .endings import Endings
    from .keeper import Keeper
    from .policies import Policies

#: Seconds by which a notice must be earlier than the one before, to change anything.
_EARLIER: Final = 1.0
#: How many ends are remembered, if the server survives them.
_KEPT: Final = 10
#: Source of the notices that come through the REST API.
REQUEST: Final = "request"

_NO_TIME: Final = "There was no time to save the kernel before the server ends."


class Foretold:
    """Saves all kernels when somebody says that the server ends; part of the policies.

    All kernels with something unsaved are saved at once, and states are uploaded, as far as the
    time goes. What kernels did after that is saved once more as late as there is time for it. The
    next server offers them, as it finds their leases: given up in order where this one is stopped
    (:mod:`.endings`), else run out.

    A server has one end at a time: as long as that has not come, another notice changes nothing
    unless it is of an earlier one, or of a sure one where that was not.
    """

    def __init__(self, keeper: Keeper, policies: Policies, endings: Endings) -> None:
        self._keeper = keeper
        self._policies = policies
        self._endings = endings
        self._watch = NoticeWatch(
            policies.settings.notice_sources, policies.settings, self.tell, keeper.log
        )
        self._all: list[Ending] = []
        #: When the server ends, in monotonic seconds.
        self._deadline = -math.inf
        self._task: asyncio.Task[None] | None = None
        self._enough = threading.Event()
        #: Seconds that the last uploads took.
        self._uploads = 0.0

    async def start(self) -> None:
        """Listen to the sources of notices."""
        await self._watch.start()

    async def stop(self) -> float:
        """The server is stopped: what is left is for the shutdown to do.

        Returns
        -------
        float
            When the server ends in any case, in monotonic seconds.
        """
        await self._watch.stop()
        if self._task is not None:
            self._give_up()
            await asyncio.gather(self._task, return_exceptions=True)
        return self._deadline if self._deadline > time.monotonic() else math.inf

    def all(self) -> list[Ending]:
        """The ends that were foretold, newest first."""
        return self._all[::-1]

    def tell(self, notice: Notice, source: str) -> Ending:
        """Somebody says that the server ends; returns what comes of it, kept up to date."""
        metrics.NOTICES.labels(source).inc()
        now = time.monotonic()
        deadline = now + max(0.0, notice.seconds)
        if now < self._deadline and self._all:
            ending = self._all[-1]
            if deadline > self._deadline - _EARLIER and (ending.sure or not notice.sure):
                return ending
            if notice.sure and not ending.sure:
                ending.source, ending.why, ending.sure = source, notice.why, True
            ending.phase = "saving"
            self._give_up()
        else:
            ending = Ending(
                id=uuid.uuid4().hex, source=source, why=notice.why, sure=notice.sure, ends=""
            )
            self._all = [*self._all[-_KEPT + 1 :], ending]
        self._deadline = deadline
        ends = datetime.now(timezone.utc) + timedelta(seconds=deadline - now)
        ending.ends = ends.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._keeper.log.warning(
            "%s This server %s in %.0f s, says %s: kernels are saved",
            notice.why,
            "ends" if ending.sure else "may end",
            deadline - now,
            source,
        )
        self._keeper.announce.server_ends(ending, deadline - now)
        self._enough = threading.Event()
        self._task = asyncio.create_task(self._see_through(ending, self._enough))
        return ending

    def _give_up(self) -> None:
        """Wait for nothing any more; saves that have begun go on."""
        self._enough.set()
        if self._task is not None:
            self._task.cancel()

    async def _see_through(self, ending: Ending, enough: threading.Event) -> None:
        try:
            await self._round(ending, enough)
            # What is done after this is saved as late as possible.
            if (wait := self._deadline - self._needed() - time.monotonic()) > 0:
                await asyncio.sleep(wait)
                if self._endings.unsaved():
                    await self._round(ending, enough)
        except Exception:
            self._keeper.log.exception("Saving before the end of the server failed")
            ending.phase = "done"

    def _needed(self) -> float:
        """Seconds that saving everything once more should take, with much room."""
        times = [work.seconds for work in self._endings.kernels(foretold=True)]
        parallel = self._policies.settings.shutdown_parallel
        saves = sum(times) / parallel + max(times, default=0.0)
        return 2.0 + 2.0 * (saves + self._uploads)

    async def _round(self, ending: Ending, enough: threading.Event) -> None:
        """Save what is unsaved, and have it uploaded."""
        ending.phase = "saving"
        left = self._deadline - time.monotonic()
        await self._policies.notebooks.see(self._policies.works(), left / 4)
        works = self._endings.kernels(foretold=True)
        unsaved = self._endings.unsaved()
        failed: dict[str, str] = {}
        if unsaved:
            failed = await self._endings.save_all(unsaved, self._deadline, "preemption", _NO_TIME)
            metrics.count_foretold(ending.source, len(unsaved) - len(failed), len(failed))
        paths = await self._keeper.sessions.paths()
        ending.kernels = [
            EndingKernel(kernel_id, paths.get(kernel_id), kernel_id not in failed, why)
            for work in works
            if work in unsaved or work.kernel.policy.has_state
            for kernel_id in [work.kernel.kernel_id]
            for why in [failed.get(kernel_id)]
        ]
        ending.phase = "uploading"
        began = time.monotonic()
        left = max(0.0, self._deadline - began)
        try:
            ending.not_uploaded = await in_thread(self._keeper.store.flush, left, enough)
        except CkptError as error:
            self._keeper.log.warning("Uploads are not known to be over: %s", error.message)
        self._uploads = time.monotonic() - began
        ending.phase = "done"
        if ending.not_uploaded:
            self._keeper.log.warning(
                "Not uploaded before the server ends, and on this node only: %s",
                ", ".join(ending.not_uploaded),
            )
        self._keeper.announce.server_saved(ending)
