"""Notices from Slurm: the time limit of the job that this server runs in."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Final

from traitlets import Float, Unicode

from ..operations import in_thread
from .source import Notice, NoticeSource

#: Seconds that Slurm's controller may take to answer.
_ANSWER: Final = 30.0


class SlurmNotice(NoticeSource):
    """A Slurm job ends at its time limit, which anybody can know before.

    Slurm's controller is asked (``squeue``), because an administrator may have changed the limit;
    what the job's environment says (``SLURM_JOB_END_TIME``, Slurm 23 and newer) counts where it
    does not answer.
    """

    lead = Float(
        120.0,
        min=1.0,
        max=24 * 3600.0,
        config=True,
        help="Seconds before the job's time limit at which kernels are saved. Default 120.",
    )
    poll = Float(
        300.0,
        min=1.0,
        max=24 * 3600.0,
        config=True,
        help="Longest time between two questions to Slurm's controller whether the limit is still "
        "the same, in seconds. Default 300.",
    )
    squeue = Unicode(
        "squeue", config=True, help="Slurm's program squeue, where it is not on the PATH."
    )

    def applies(self) -> bool:
        """In a job."""
        return bool(os.environ.get("SLURM_JOB_ID"))

    async def notices(self) -> AsyncIterator[Notice]:
        """One for each time limit that comes near."""
        job = os.environ.get("SLURM_JOB_ID")
        if not job:
            return
        told: float | None = None
        end: float | None = None
        while True:
            # What the controller said last counts while it does not answer.
            end = await in_thread(self._end, job) or end
            wait = self.poll
            if end is not None and end != told:
                left = end - time.time()
                if left <= self.lead:
                    told = end
                    yield Notice(max(0.0, left), f"The Slurm job {job} reaches its time limit.")
                else:
                    wait = min(wait, left - self.lead)
            await asyncio.sleep(wait)

    def _end(self, job: str) -> float | None:
        """When the job ends, in Unix seconds; ``None`` where that is not known."""
        try:
            answer = subprocess.run(
                [self.squeue, "--noheader", f"--jobs={job}", "--format=%e"],
                env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ANSWER,
            ).stdout
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
            self.log.debug("Slurm does not say when job %s ends: %s", job, error)
            answer = ""
        said = [*answer.split(), os.environ.get("SLURM_JOB_END_TIME", "")]
        return next((float(word) for word in said if word.isdecimal()), None)
