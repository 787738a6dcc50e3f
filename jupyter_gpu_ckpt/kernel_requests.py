"""What kernels ask of their server (:mod:`.talk`), and callbacks in the kernel before a save."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from . import durations
from .autosave import SECONDS
from .errors import CkptError
from .models import AutoSaveChoice, AutoSaves
from .operations import in_thread
from .store import StateRecord
from .talk import COMM_ID
from .work import Work

if TYPE_CHECKING:
    from .keeper import Keeper
    from .policies import Policies

#: How many requests of one kernel are answered at a time; more are ignored.
_AT_ONCE: Final = 16
_LONGEST_LABEL: Final = 200
_SHOWN: Final = 20
#: Seconds that the cell with the request has to end, so that the state is that of an idle kernel.
_CELL_END: Final = 0.5
#: Seconds for which a socket is kept, so that a message is surely delivered.
_DELIVERY: Final = 5.0

_SWITCHES: Final = {
    "before_shutdown": "before a shutdown",
    "before_preemption": "when its server's end is foretold",
    "before_cull": "before it is culled",
}
_TIMES: Final = {
    "idle": "when idle for {}",
    "interval": "after {} of work",
    "long_cell": "after cells that run longer than {}",
    "hibernate": "and hibernated when idle for {}",
    "park": "and parked, where it uses a GPU, when idle for {}",
}


class _Request(msgspec.Struct):
    """What a kernel may say; anything else is ignored."""

    ask: str
    id: str = ""
    label: str | None = None
    hooks: bool = False
    set: AutoSaveChoice = AutoSaveChoice()
    reset: bool = False


class KernelRequests:
    """Answers kernels; part of :class:`~jupyter_gpu_ckpt.policies.Policies`."""

    def __init__(self, keeper: Keeper, policies: Policies) -> None:
        self._keeper = keeper
        self._policies = policies
        self._handling: dict[str, int] = {}
        self._waiting: dict[str, asyncio.Event] = {}

    def handle(self, work: Work, data: Any) -> None:
        """Act on a message of a kernel, whatever is in it."""
        try:
            request = msgspec.convert(data, _Request)
        except msgspec.ValidationError as error:
            self._answer_bad(work, data, str(error))
            return
        if request.ask == "hello":
            work.has_hooks = request.hooks
        elif request.ask == "ready":
            if (event := self._waiting.get(request.id)) is not None:
                event.set()
        elif request.ask in _ANSWERS:
            kernel_id = work.kernel.kernel_id
            if self._handling.get(kernel_id, 0) < _AT_ONCE:
                self._handling[kernel_id] = self._handling.get(kernel_id, 0) + 1
                self._keeper.in_background(self._answer(work, request))

    def _answer_bad(self, work: Work, data: Any, why: str) -> None:
        if isinstance(data, dict) and isinstance(number := data.get("id"), str):
            send_to_kernel(work.kernel.km, {"answer": number, "ok": False, "text": why})

    async def _answer(self, work: Work, request: _Request) -> None:
        kernel_id = work.kernel.kernel_id
        try:
            text = await _ANSWERS[request.ask](self, work, request)
            answer = {"answer": request.id, "ok": True, "text": text}
        except CkptError as error:
            said = " ".join(part for part in (error.message, error.hint) if part)
            answer = {"answer": request.id, "ok": False, "text": said}
        finally:
            self._handling[kernel_id] -= 1
            if not self._handling[kernel_id]:
                del self._handling[kernel_id]
        if self._policies.work_of(kernel_id) is work:
            send_to_kernel(work.kernel.km, answer)

    async def _save(self, work: Work, request: _Request) -> str:
        label = (request.label or "").strip()[:_LONGEST_LABEL] or None
        await self._cell_end(work)
        kernel_id = work.kernel.kernel_id
        await self._keeper.save(kernel_id, label=label)
        run = self._keeper.running(kernel_id)
        assert run is not None
        model = await run.ended()
        if model.result is None:
            error = model.error
            return f"The state was not saved. {error.message if error else ''}".strip()
        result = model.result
        return (
            f"Saved state {result.state_id}"
            + (f" “{label}”" if label else "")
            + f": {_size(result.size)} in {result.seconds:.1f} s"
            + f" (the kernel stood still for {result.frozen_seconds or 0:.2f} s)."
        )

    async def _cell_end(self, work: Work) -> None:
        """Wait a moment for the end of the cell that asked."""
        for _ in range(10):
            if not work.is_running:
                return
            await asyncio.sleep(_CELL_END / 10)

    async def _states(self, work: Work, request: _Request) -> str:
        records = await in_thread(self._keeper.store.states, work.kernel.kernel_id)
        if not records:
            return "There are no states of this kernel."
        lines = [_line(record) for record in records[:_SHOWN]]
        if len(records) > _SHOWN:
            lines.append(f"... and {len(records) - _SHOWN} older ones")
        return "\n".join(lines)

    async def _autosave(self, work: Work, request: _Request) -> str:
        kernel_id = work.kernel.kernel_id
        if request.reset or request.set != AutoSaveChoice():
            saves = await self._policies.choose_for(kernel_id, request.set, merge=not request.reset)
        else:
            saves = self._policies.of_kernel(kernel_id)
        return describe(saves)

    # -- callbacks before a save ---------------------------------------------------------

    async def before_save(self, work: Work) -> str | None:
        """Have the kernel's callbacks called, if it has some and is idle.

        Returns a warning for the state where they were not.
        """
        if not work.has_hooks:
            return None
        if work.is_running:
            return "The kernel was in the middle of a cell: before_save callbacks were not called."
        if work.kernel.parked is not None:
            return "The kernel is parked: before_save callbacks were not called."
        number, event = uuid.uuid4().hex, asyncio.Event()
        self._waiting[number] = event
        try:
            send_to_kernel(work.kernel.km, {"before_save": number})
            await asyncio.wait_for(event.wait(), self._policies.settings.hook_timeout)
        except asyncio.TimeoutError:
            return "The kernel's before_save callbacks did not end in time."
        finally:
            del self._waiting[number]
        return None


_ANSWERS: Final[dict[str, Callable[[KernelRequests, Work, _Request], Awaitable[str]]]] = {
    "save": KernelRequests._save,
    "states": KernelRequests._states,
    "autosave": KernelRequests._autosave,
}


def send_to_kernel(km: Any, data: dict[str, Any]) -> None:
    """Send a kernel a message on the comm, if it listens to that.

    It comes to it when no cell runs.
    """
    channel = km.connect_shell()
    header = km.session.msg_header("comm_msg")
    header["msg_id"] = f"{COMM_ID}-{header['msg_id']}"  # by which its echoes are known
    content = {"comm_id": COMM_ID, "data": data}
    km.session.send(channel, "comm_msg", content=content, header=header)
    asyncio.get_running_loop().call_later(_DELIVERY, channel.close)


def describe(saves: AutoSaves) -> str:
    """A policy in a user's words."""
    policy = msgspec.structs.asdict(saves.policy)
    if not policy["enabled"]:
        return "This kernel is not saved automatically."
    said = [_TIMES[name].format(durations.words(policy[name])) for name in SECONDS if policy[name]]
    said += [words for name, words in _SWITCHES.items() if policy[name]]
    if not said:
        return "This kernel is not saved automatically."
    return "This kernel is saved automatically: " + ", ".join(said) + "."


def _line(record: StateRecord) -> str:
    meta = record.meta
    count = f"[{meta.execution_count}]" if meta.execution_count is not None else "[ ]"
    label = f"  {meta.label}" if meta.label else ""
    return f"{record.id}  {count:>6}  {_size(record.size):>8}  {meta.reason:<9}{label}"


def _size(size: int) -> str:
    number = float(size)
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
