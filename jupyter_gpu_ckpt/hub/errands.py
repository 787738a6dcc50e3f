"""Work that may hang on a user's store: in threads that nothing waits for after a deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakValueDictionary

from ..errors import CkptError

T = TypeVar("T")


class Errands:
    """Threads of their own, one at a time for each key; none is sent after one that hangs.

    A pool's threads would be used up by a store that hangs, for the rest of the process too.
    """

    def __init__(self) -> None:
        self._under_way: dict[object, tuple[Hashable, float, float]] = {}
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def hanging(self, key: Hashable) -> float | None:
        """Seconds since which one has been under way that is past its deadline."""
        now = time.monotonic()
        late = [
            now - began
            for mine, began, deadline in list(self._under_way.values())
            if mine == key and now - began >= deadline
        ]
        return max(late, default=None)

    async def run(self, key: Hashable, work: Callable[[], T], deadline: float) -> T:
        """Do `work` in a thread; after `deadline` seconds it goes on, and nothing waits for it.

        What is asked for with the same key meanwhile waits for its turn, as long at most.

        Raises
        ------
        CkptError
            ``timeout``: it takes longer, or an earlier one hangs; ``busy``: its turn has not come;
            and what the work raises.
        """
        self._check(key)
        turn = self._turns.setdefault(key, asyncio.Lock())
        try:
            await asyncio.wait_for(turn.acquire(), deadline)
        except asyncio.TimeoutError:
            self._check(key)
            raise CkptError(
                "busy",
                "What was asked of the state store before is still under way.",
                hint="Try again in a minute.",
            ) from None
        try:
            self._check(key)
            return await self._run(key, work, deadline)
        finally:
            turn.release()

    def _check(self, key: Hashable) -> None:
        if (seconds := self.hanging(key)) is not None:
            raise CkptError(
                "timeout",
                f"The state store has not answered for {seconds:.0f} seconds.",
                hint="What was asked of it before must end first.",
            )

    async def _run(self, key: Hashable, work: Callable[[], T], deadline: float) -> T:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        me = object()

        def tell(set_it: Callable[[], None]) -> None:
            self._under_way.pop(me, None)
            try:
                loop.call_soon_threadsafe(lambda: None if result.done() else set_it())
            except RuntimeError:
                return  # the service has ended

        def run() -> None:
            try:
                found = work()
            except BaseException as error:
                failure = error
                tell(lambda: result.set_exception(failure))
            else:
                tell(lambda: result.set_result(found))

        self._under_way[me] = key, time.monotonic(), deadline
        threading.Thread(target=run, name="gpu-ckpt-errand", daemon=True).start()
        try:
            return await asyncio.wait_for(result, deadline)
        except asyncio.TimeoutError:
            raise CkptError(
                "timeout",
                f"The state store did not answer within {deadline:.0f} seconds.",
                hint="Is its file system or object store in order?",
            ) from None
