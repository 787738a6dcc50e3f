"""What a source of notices is: the interface that other packages implement too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from traitlets.config import LoggingConfigurable


@dataclass(frozen=True)
class Notice:
    """Somebody says that this server is about to end.

    Parameters
    ----------
    seconds
        Until it ends, from now; 0 or less: at any moment.
    why
        What happens, as a sentence that a user is shown.
    sure
        False where it may not come to that: kernels are saved all the same.
    """

    seconds: float
    why: str
    sure: bool = True


class NoticeSource(LoggingConfigurable):
    """Base class of the sources; what a source can be told is traits of its own.

    A source is an entry point of the group ``jupyter_gpu_ckpt.notice_sources``: a name, which
    ``AutoSave.notice_sources`` takes, and a class. The server makes one object of the class,
    without arguments but ``parent``, when it starts.
    """

    def applies(self) -> bool:
        """Whether there can be notices here, for ``AutoSave.notice_sources = ["auto"]``.

        Called once, in a worker thread. It must be quick, and use no network: nothing may leave
        a machine that has nothing to do with this source.
        """
        return False

    def notices(self) -> AsyncIterator[Notice]:
        """Give each notice once, as soon as it is known; an asynchronous generator.

        Run on the server's event loop from its start, and cancelled at its end, so it must not
        block. Where it ends there are no more notices; where it raises that is logged, and it is
        run anew a minute later. That a service does not answer is no reason to raise.
        """
        raise NotImplementedError
