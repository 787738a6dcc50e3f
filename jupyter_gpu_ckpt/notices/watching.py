"""Runs the sources of notices that the administrator chose."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from ..operations import in_thread
from .source import Notice, NoticeSource

#: The entry points that are sources.
GROUP: Final = "jupyter_gpu_ckpt.notice_sources"
#: Stands for all sources that find what they need on this machine.
AUTO: Final = "auto"

#: Seconds after which a source that failed is tried again.
_AGAIN: Final = 60.0


class NoticeWatch:
    """Listens to sources until it is stopped.

    Parameters
    ----------
    names
        Names of sources, and ``auto``.
    parent
        The sources' parent: their configuration is found through it.
    on_notice
        Called on the event loop with each notice and the name of its source.
    log
        Where failures of sources go.
    """

    def __init__(
        self,
        names: Sequence[str],
        parent: Any,
        on_notice: Callable[[Notice, str], object],
        log: logging.Logger | Any,
    ) -> None:
        self._names = names
        self._parent = parent
        self._on_notice = on_notice
        self._log = log
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin; once, when the event loop runs. Never raises: a source is no server's life."""
        if not self._names:
            return
        for name, source in await in_thread(self._sources):
            self._log.debug("Notices that this server ends come from: %s", name)
            self._tasks.append(asyncio.create_task(self._listen(name, source)))

    async def stop(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _sources(self) -> list[tuple[str, NoticeSource]]:
        known = {entry.name: entry for entry in entry_points(group=GROUP)}
        for name in sorted(set(self._names) - known.keys() - {AUTO}):
            self._log.error(
                "AutoSave.notice_sources names %s, which is not installed. There are: %s",
                name,
                ", ".join(sorted(known)) or "none",
            )
        sources = [self._source(entry, AUTO in self._names) for entry in known.values()]
        return [named for named in sources if named is not None]

    def _source(self, entry: EntryPoint, auto: bool) -> tuple[str, NoticeSource] | None:
        wanted = entry.name in self._names
        if not wanted and not auto:
            return None
        try:
            source: NoticeSource = entry.load()(parent=self._parent)
            return (entry.name, source) if wanted or source.applies() else None
        except Exception:
            # Another package's code; what it may raise is its own affair.
            self._log.exception("The source of notices %s cannot be used", entry.name)
            return None

    async def _listen(self, name: str, source: NoticeSource) -> None:
        while True:
            try:
                async for notice in source.notices():
                    self._on_notice(notice, name)
                return
            except Exception:
                # Whatever it is: the word of an end may still come.
                self._log.exception("The source of notices %s failed", name)
            await asyncio.sleep(_AGAIN)
