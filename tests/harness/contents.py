"""Contents managers that take their time for notebooks while a file of this name is beside them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

from jupyter_server.services.contents.largefilemanager import (
    AsyncLargeFileManager,
    LargeFileManager,
)

SLOW: Final = "slow"
#: Seconds; longer than anybody waits for a notebook to be looked at before an end.
_TIME: Final = 3.0


def _is_slow(manager: Any, path: str) -> bool:
    slow = path.endswith(".ipynb") and (Path(manager.root_dir) / SLOW).exists()
    if slow:
        manager.log.info("Slow: %s", path.strip("/"))
    return slow


class Slow(AsyncLargeFileManager):  # type: ignore[misc]
    """The event loop goes on meanwhile."""

    async def get(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Give a file, or what is known of it."""
        if _is_slow(self, path):
            await asyncio.sleep(_TIME)
        return await super().get(path, *args, **kwargs)


class Hanging(AsyncLargeFileManager):  # type: ignore[misc]
    """It never answers."""

    #: How many wait for it, and how many have given up.
    waiting = 0
    given_up = 0

    async def get(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Give a file, or what is known of it."""
        if _is_slow(self, path):
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
                self.given_up += 1
        return await super().get(path, *args, **kwargs)


class Blocking(LargeFileManager):  # type: ignore[misc]
    """It does not: this is not asynchronous."""

    def get(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Give a file, or what is known of it."""
        if _is_slow(self, path):
            time.sleep(_TIME)
        return super().get(path, *args, **kwargs)
