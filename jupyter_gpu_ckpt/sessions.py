"""Which notebook belongs to which kernel: reading and setting the server's sessions."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import posixpath
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from jupyter_core.utils import ensure_async
from tornado import web

from .operations import in_thread

#: What pages call the session of a console that belongs to no file.
_CONSOLE: Final = re.compile(r"console-(\d+)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

#: Most seconds that a save waits for its notebook.
_LONGEST: Final = 5.0
#: Seconds of a read for which the event loop should not wait often.
_SLOW: Final = 0.5


class Sessions:
    """The server's session manager, as the keeper needs it.

    Parameters
    ----------
    kernel_manager, session_manager
        The server's own.
    is_pristine
        Whether a kernel has run nothing yet, so that nobody misses it.
    log
        For sessions that cannot be read or written.
    """

    def __init__(
        self,
        kernel_manager: Any,
        session_manager: Any,
        is_pristine: Callable[[str], Awaitable[bool]],
        log: logging.Logger | Any,
    ) -> None:
        self._kernels = kernel_manager
        self._sessions = session_manager
        self._is_pristine = is_pristine
        self._log = log
        #: Seconds that the contents manager took last.
        self._took = 0.0

    async def paths(self) -> dict[str, str]:
        """The notebook path of each kernel that has a session, below the server's root."""
        try:
            sessions = await ensure_async(self._sessions.list_sessions())
        except web.HTTPError as error:
            self._log.warning("The sessions cannot be read: %s", error)
            return {}
        return {session["kernel"]["id"]: session["path"] for session in sessions}

    @property
    def is_blocking(self) -> bool:
        """Whether the event loop waits while a notebook is read.

        A contents manager that is not asynchronous cannot be asked in a thread: it may tell of
        what it does with events, whose listeners belong to the loop.
        """
        return not inspect.iscoroutinefunction(self._sessions.contents_manager.get)

    async def metadata(self, path: str | None, *, unless: Any) -> tuple[Any, Any] | None:
        """A notebook's own metadata, and when it was changed last.

        ``None`` where it is no notebook, or was last changed when ``unless`` says. Raises what
        the contents manager raises.
        """
        if path is None or not path.endswith(".ipynb"):
            return None
        changed = (await self._get(path, content=False))["last_modified"]
        if changed == unless:
            return None
        notebook = await self._notebook(path)
        return notebook.get("metadata"), changed

    async def counts(self, path: str | None) -> dict[str, int]:
        """The execution count of each cell of a notebook as it was last written, by cell id.

        Empty where it is no notebook, or cannot be read soon enough for a save to wait for it.
        """
        if self.is_blocking and self._took > _SLOW:
            return {}
        try:
            found = await asyncio.wait_for(self._notebook(path), _LONGEST)
        except Exception as error:  # a contents manager may raise anything
            self._log.debug("The cells of %s cannot be read: %s", path, error)
            return {}
        cells = found.get("cells") if isinstance(found, dict) else None
        return {
            cell["id"]: cell["execution_count"]
            for cell in (cells if isinstance(cells, list) else ())
            if isinstance(cell, dict)
            and isinstance(cell.get("id"), str)
            and isinstance(cell.get("execution_count"), int)
        }

    async def _notebook(self, path: str | None) -> Any:
        if path is None or not path.endswith(".ipynb"):
            return None
        # As a file: reading a notebook would check whether it is trusted, and say so in the log.
        model = await self._get(path, content=True, type="file", format="text")
        return await in_thread(json.loads, model["content"])

    async def _get(self, path: str, **how: Any) -> Any:
        began = time.monotonic()
        try:
            return await ensure_async(self._sessions.contents_manager.get(path, **how))
        finally:
            self._took = time.monotonic() - began

    async def launch_arguments(self, path: str | None) -> dict[str, Any]:
        """What a session for this path gives a kernel at its start: folder and environment."""
        if path is None:
            return {}
        kernel_path = await ensure_async(self._sessions.contents_manager.get_kernel_path(path=path))
        arguments = {"path": kernel_path}
        if hasattr(self._sessions, "get_kernel_env"):
            arguments["env"] = self._sessions.get_kernel_env(path, posixpath.basename(path))
        return arguments

    async def attach(self, path: str, kernel_id: str) -> str | None:
        """Make the session of this path use this kernel, so that a page that asks finds it.

        A fresh kernel that a page started for the path meanwhile, and that ran nothing, is
        shut down; one that ran something stays, without a session.

        Returns
        -------
        str or None
            The kernel that the session had before, if it was another.
        """
        for session in await ensure_async(self._sessions.list_sessions()):
            if session["path"] != path:
                continue
            other = session["kernel"]["id"]
            if other != kernel_id:
                await self._sessions.update_session(session["id"], kernel_id=kernel_id)
                if await self._is_pristine(other):
                    await ensure_async(self._kernels.shutdown_kernel(other, now=True))
            return other if other != kernel_id else None
        await self._sessions.create_session(
            path=path,
            name=_name(path),
            type="notebook" if path.endswith(".ipynb") else "console",
            kernel_id=kernel_id,
        )
        return None


def _name(path: str) -> str:
    """What a page shows as the name of a session."""
    base = posixpath.basename(path)
    console = _CONSOLE.fullmatch(base)
    return f"Console {console[1]}" if console else base
