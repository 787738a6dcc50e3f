"""A state on its way to CRIU: small files through a folder, memory straight from the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from .capture import images
from .capture.stream import ImageServer, is_streamed
from .capture.supervisor import Supervisor
from .errors import CkptError
from .launching import started
from .operations import Run, in_thread
from .store import StateReader, StateStore

#: Makes of an error of the store the one that the user is told.
Told = Callable[[CkptError], Awaitable[CkptError]]


class Feed:
    """The image directory of a state, whose memory stays in the store until CRIU reads it.

    Attributes
    ----------
    image_dir
        The directory, to be looked at and edited.
    """

    def __init__(self, run: Run, reader: StateReader, folder: Path) -> None:
        self.image_dir = folder / "images"
        self._run = run
        self._reader = reader
        self._folder = folder
        self._streams = True

    def read(self, *, verify: bool) -> None:
        """Write the directory. Blocks.

        Parameters
        ----------
        verify
            Read all of the memory once too: something is to be ended in the state's favour.
        """
        run, reader = self._run, self._reader
        progress, cancel = run.span(0.02, 0.05), run.cancel_flag
        reader.extract(self.image_dir, skip=is_streamed, progress=progress, cancel=cancel)
        self._streams = not images.has_huge_pages(self.image_dir)
        if not self._streams:
            self._write_memory()
        elif verify:
            reader.verify(is_streamed, progress=run.span(0.05, 0.3), cancel=cancel)

    def _write_memory(self) -> None:
        folder, progress = self._folder / "memory", self._run.span(0.05, 0.6)
        self._reader.extract(
            folder,
            skip=lambda path: not is_streamed(path),
            progress=progress,
            cancel=self._run.cancel_flag,
        )
        for path in folder.glob("*.img"):
            path.rename(self.image_dir / path.name)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[ImageServer | None]:
        """Have CRIU's images served; ``None`` when all of them are in the directory."""
        if not self._streams:
            yield None
            return
        run, stream = self._run, self._reader.stream
        sizes = {path: size for path, size in self._reader.files() if is_streamed(path)}
        server = await in_thread(
            lambda: ImageServer(
                self.image_dir,
                sizes,
                lambda path, over: stream(path, cancel=over),
                progress=run.span(max(0.1, run.model.progress), 0.88),
            )
        )
        try:
            yield server
        finally:
            await in_thread(server.close)


@contextlib.asynccontextmanager
async def feed(
    run: Run, store: StateStore, state_id: str, folder: Path, told: Told, verify: bool
) -> AsyncIterator[Feed]:
    """Open a state and write its image directory below `folder`; see :meth:`Feed.read`."""
    try:
        reader = await in_thread(store.open, state_id)
    except CkptError as error:
        raise await told(error) from error
    try:
        one = Feed(run, reader, folder)
        try:
            await in_thread(lambda: one.read(verify=verify))
        except CkptError as error:
            raise await told(error) from error
        yield one
    finally:
        await in_thread(reader.close)


async def came_back(
    run: Run, supervisor: Supervisor, server: ImageServer | None, told: Told, timeout: float
) -> None:
    """Wait until the process tree is there; it is ended when that fails.

    It can be cancelled until then, unless the run is past the point of no return. What kept the
    store from handing the state on counts for more than what CRIU says about it.
    """

    async def end_when_cancelled() -> None:
        await run.cancel_event.wait()
        if run.cancellable:
            supervisor.kill()

    async def check() -> None:
        try:
            if server is not None:
                server.check()
        except CkptError as error:
            raise await told(error) from error

    cancelling = asyncio.create_task(end_when_cancelled())
    if server is not None:
        server.when_failed(supervisor.kill)
    try:
        await started(supervisor, timeout)
        await check()
        run.point_of_no_return()
    except CkptError:
        supervisor.kill()
        await check()
        raise
    finally:
        cancelling.cancel()
