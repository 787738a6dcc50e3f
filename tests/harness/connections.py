"""The connections of an asyncio server in a thread, none of which outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Connections:
    """Serves each connection in a task, and ends them all."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a new connection: the callback for ``asyncio.start_server``.

        Not a coroutine: a task that is cancelled before its first step never gets to close what
        it was given.
        """
        task = asyncio.ensure_future(self._run(reader, writer))
        self._tasks[task] = writer
        task.add_done_callback(self._ended)

    async def end(self, server: asyncio.Server) -> None:
        """Close the server and cut all connections, also those that were accepted just now."""
        # One that was accepted and has no transport yet when the server closes is left half
        # made, and open. So accept no more, and let these become connections first.
        loop = asyncio.get_running_loop()
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())
        for _ in range(5):
            await asyncio.sleep(0)
        server.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._serve(reader, writer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task).transport.abort()
        if not task.cancelled():
            task.exception()  # seen: a cut connection is nobody's error here
