"""What pages want executed while a restored kernel takes the place of the one that they have.

The old kernel would run it and be gone a moment later, with all that came of it. So it is kept:
where the same kernel comes back it runs there, and is answered as ever. Where a fresh kernel is
replaced by another (a notebook whose lost kernel is restored), the page is told that it was not
run, and runs it in the kernel that it gets. A restore that fails changes nothing: it runs where it
was sent to. What a page does to a widget meanwhile is kept in the same order; in a kernel that
takes the place of another it reaches the widget there, which has the same id. The widgets that a
page opens in a fresh kernel are that kernel's and end with it: the page asks the kernel that it
gets for the others. That it closes widgets as it leaves a kernel closes none in the one it gets.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from .doorman import HeldMessage, Kept, each, left_out
from .errors import CkptError
from .operations import Run

if TYPE_CHECKING:
    from .keeper import Keeper

#: Seconds for which a page may still have the kernel that was replaced.
_LEAVING: Final = 30.0

_REPLACED: Final = "The restored kernel has taken the place of this one."
_TOO_MUCH: Final = "Too much waits for the kernel to be restored."


class Replacement:
    """A restore, and what is kept until its end."""

    def __init__(self, kernel_id: str, *, in_place: bool) -> None:
        #: Id of the kernel that comes back.
        self.kernel_id = kernel_id
        #: Whether the kernel that comes back is one that the server has.
        self.in_place = in_place
        #: The notebook whose kernel it becomes; meaningful once it ``is_known``.
        self.path: str | None = None
        self.is_known = in_place
        #: Fresh kernels of that notebook.
        self.replaced: set[str] = set()
        #: Comms that pages have opened to a fresh kernel meanwhile, which are of no other.
        self.opened: set[str] = set()
        self.held = Kept()
        self.uses = 0


class _Gone(NamedTuple):
    """Until when pages may still have a kernel that was replaced, and by which it was replaced."""

    until: float
    by: str
    #: Comms that pages had opened to it, which the other one does not have.
    opened: set[str]


class Replacements:
    """The restores that replace a kernel which pages may have; part of the keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        #: By the id of the kernel that comes back.
        self._going: dict[str, Replacement] = {}
        #: Kernels of other notebooks, as far as was asked.
        self._others: set[str] = set()
        #: What came for kernels of which that is being asked.
        self._unsure: defaultdict[str, Kept] = defaultdict(Kept)
        self._changed = asyncio.Event()
        #: Kernels that were replaced and ended, of which their pages are told.
        self._gone: dict[str, _Gone] = {}

    # -- restores ------------------------------------------------------------------------

    def during(self, run: Run) -> Run:
        """Keep requests until this restore, which begins just now, has ended; gives it back."""
        assert run.task is not None
        going = self.enter(run.model.kernel_id)
        going.path, going.is_known = run.model.path, True
        self._changed.set()
        if not going.in_place and going.path is not None:
            self._keeper.in_background(self._look(going, going.path))

        def ended(_: asyncio.Task[None]) -> None:
            error = run.model.error
            stopped = None if run.model.status == "done" else "The restore was cancelled."
            self.leave(going, error.message if error is not None else stopped)

        run.task.add_done_callback(ended)
        return run

    def enter(self, kernel_id: str) -> Replacement:
        """A restore of this kernel is about to begin; :meth:`leave` is called as often."""
        going = self._going.get(kernel_id)
        if going is None:
            in_place = kernel_id in self._keeper.kernel_manager
            going = self._going[kernel_id] = Replacement(kernel_id, in_place=in_place)
            self._others.clear()
        going.uses += 1
        return going

    def replaced(self, kernel_id: str, other: str | None) -> None:
        """A kernel has got the session of another one."""
        going = self._going.get(kernel_id)
        if going is not None and other is not None:
            going.replaced.add(other)

    def leave(self, going: Replacement, error: str | None = None) -> None:
        """It is over, or was not begun; ``error`` says why the kernel is not back."""
        going.uses -= 1
        if going.uses > 0 or self._going.get(going.kernel_id) is not going:
            return  # or its user restarted the kernel meanwhile
        del self._going[going.kernel_id]
        self._changed.set()
        kernel = self._keeper.tracker.get(going.kernel_id)
        if error is not None:
            left_out([going.held], going.kernel_id, self._keeper.log)
        if going.in_place and error is not None and (kernel is None or kernel.pid is None):
            self._refuse(going.held, f"The kernel could not be restored: {error}")
        elif going.in_place or error is not None:
            each(going.held, HeldMessage.deliver, self._keeper.log)
        else:
            # One that had run something stays, for whoever asks it by name.
            ended = (other for other in going.replaced if other not in self._keeper.kernel_manager)
            gone = _Gone(time.monotonic() + _LEAVING, going.kernel_id, going.opened)
            self._gone.update(dict.fromkeys(ended, gone))
            self._pass_over(going.held, gone)

    def kept(self, kernel_id: str) -> list[Kept]:
        """What waits until this kernel is back."""
        going = self._going.get(kernel_id)
        return [going.held] if going is not None else []

    def taken(self, kernel_id: str) -> list[HeldMessage]:
        """The cells among what is kept of what was sent to this kernel; they are kept no longer."""
        going = self._replacement_of(kernel_id)
        return going.held.take(only_cells=True) if going is not None else []

    def stopping(self, kernel_id: str) -> None:
        """Somebody restarts the kernel or shuts it down: what waits for it is void."""
        going = self._going.get(kernel_id)
        if going is not None and going.in_place:
            del self._going[kernel_id]
            self._refuse(going.held, "The kernel was restarted or shut down meanwhile.")

    # -- what pages send -----------------------------------------------------------------

    def opened(self, kernel_id: str) -> None:
        """A page connects to the kernel, maybe on purpose to one that was replaced."""
        self._gone.pop(kernel_id, None)

    def holds(self, kernel_id: str, message: HeldMessage) -> bool:
        """Whether a message is kept; otherwise it goes to the kernel now."""
        if not self._going and not self._gone:
            return False
        if self._gone and (gone := self._gone_by(kernel_id)) is not None:
            if (comm := message.comm) is not None and comm[0] == "comm_open":
                gone.opened.add(comm[1])
            return self._pass_over([message], gone)
        going = self._replacement_of(kernel_id)
        is_other = kernel_id in self._others or all(one.in_place for one in self._going.values())
        if (going is None and is_other) or not self._matters(message, going):
            return False
        kept = self._unsure[kernel_id] if going is None else going.held
        if going is None and len(kept) == 0:
            self._keeper.in_background(self._find(kernel_id))
        if not kept.add(message):
            self._refuse([message], _TOO_MUCH)
        return True

    def _matters(self, message: HeldMessage, going: Replacement | None) -> bool:
        """Whether a message changes something in the kernel: a cell, or a widget."""
        if message.execute_id is not None:
            return True
        comm = message.comm
        if comm is None or (going is not None and going.in_place):
            return comm is not None
        # With a fresh kernel pages and it come to know of each other's widgets.
        kind, comm_id = comm
        opened = [one.opened for one in self._going.values() if not one.in_place]
        if kind == "comm_open":
            for ids in opened:
                ids.add(comm_id)
        return kind == "comm_msg" and not any(comm_id in ids for ids in opened)

    def _replacement_of(self, kernel_id: str) -> Replacement | None:
        going = self._going.get(kernel_id)
        if going is not None:
            return going if going.in_place else None
        return next((one for one in self._going.values() if kernel_id in one.replaced), None)

    async def _look(self, going: Replacement, path: str) -> None:
        """Find the kernel that the notebook has now."""
        paths = await self._keeper.sessions.paths()
        going.replaced.update(
            other for other in paths if paths[other] == path and other != going.kernel_id
        )

    async def _find(self, kernel_id: str) -> None:
        """Find out whether a kernel that a page has is one that is being replaced."""
        found: Replacement | None = None
        try:
            path = (await self._keeper.sessions.paths()).get(kernel_id)
            while path is not None:
                going = [one for one in self._going.values() if not one.in_place]
                found = next((one for one in going if one.is_known and one.path == path), None)
                if found is not None or all(one.is_known for one in going):
                    break
                self._changed.clear()
                await self._changed.wait()
        finally:
            kept = self._unsure.pop(kernel_id, Kept())
            messages = kept.take()
            # It may have lost its session to the restored one just now.
            found = found or self._replacement_of(kernel_id)
            if found is not None:
                found.replaced.add(kernel_id)
                found.held.left_out += kept.left_out
                self._refuse([m for m in messages if not found.held.add(m)], _TOO_MUCH)
            elif (gone := self._gone_by(kernel_id)) is not None:
                left_out([kept], gone.by, self._keeper.log)
                self._pass_over(messages, gone)
            else:
                left_out([kept], kernel_id, self._keeper.log)
                self._others.add(kernel_id)
                each(messages, HeldMessage.deliver, self._keeper.log)

    def _gone_by(self, kernel_id: str) -> _Gone | None:
        """The kernel that has replaced this one a short while ago."""
        now = time.monotonic()
        self._gone = {other: gone for other, gone in self._gone.items() if gone.until > now}
        return self._gone.get(kernel_id)

    def _pass_over(self, held: Iterable[HeldMessage], gone: _Gone) -> bool:
        """Tell pages of their cells, and let a kernel have what they did to its widgets."""
        manager = self._keeper.kernel_manager

        def pass_on(message: HeldMessage) -> None:
            comm = message.comm
            if comm is None:
                self._refuse([message], _REPLACED)
            elif message.connection.kernel_id in manager:  # which goes on beside it
                message.deliver()
            elif comm[0] == "comm_msg" and comm[1] not in gone.opened and gone.by in manager:
                message.deliver_to(manager.get_kernel(gone.by))

        each(held, pass_on, self._keeper.log)
        return True

    def _refuse(self, held: Iterable[HeldMessage], why: str) -> bool:
        told = CkptError("cancelled", f"The cell was not run. {why}", hint="Run it again.")
        each(held, lambda message: message.refuse(told, "CellNotRun"), self._keeper.log)
        return True
