"""What notebooks choose is read beside everything else, whatever their contents manager does."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

from jupyter_gpu_ckpt import notebook_choices
from jupyter_gpu_ckpt.autosave import AutoSave
from jupyter_gpu_ckpt.keeper import Keeper
from jupyter_gpu_ckpt.notebook_choices import NotebookChoices
from jupyter_gpu_ckpt.sessions import Sessions
from jupyter_gpu_ckpt.tracking import TrackedKernel
from jupyter_gpu_ckpt.work import Work
from tests.harness.contents import SLOW, Hanging

SESSION = {"path": "book.ipynb", "kernel": {"id": "K"}}


async def cancelled() -> None:
    """Wait for something that somebody else cancels."""
    task = asyncio.create_task(asyncio.sleep(1000))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


class Cancelling(AsyncLargeFileManager):  # type: ignore[misc]
    """Contents of which one file's reading is given up."""

    async def get(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Give a file, or what is known of it."""
        if path.startswith("gone"):
            await cancelled()
        return await super().get(path, *args, **kwargs)


class Quiet:
    """Nobody acts on what the kernel does."""

    def worked(self, work: Work) -> None: ...

    def asked(self, work: Work, data: dict[str, Any]) -> None: ...


async def until(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)


async def test_a_look_that_is_never_answered_is_given_up_and_there_is_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("_LOOK", 0.0), ("_LOOK_REST", 0.0), ("_LONGEST_LOOK", 0.1)):
        monkeypatch.setattr(notebook_choices, name, seconds)
    metadata = {"gpu_ckpt": {"autosave": {"idle": 77.0}}}
    book = {"cells": [], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "book.ipynb").write_text(json.dumps(book))
    (tmp_path / SLOW).touch()
    contents = Hanging(root_dir=str(tmp_path))
    tasks: list[asyncio.Task[None]] = []

    async def list_sessions() -> list[dict[str, Any]]:
        return [SESSION]

    async def is_pristine(kernel_id: str) -> bool:
        return False

    def in_background(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(work))

    log = logging.getLogger("contents")
    managers = SimpleNamespace(contents_manager=contents, list_sessions=list_sessions)
    sessions = Sessions(None, managers, is_pristine, log)
    keeper = SimpleNamespace(sessions=sessions, log=log, in_background=in_background)
    changed: list[Work] = []
    choices = NotebookChoices(cast(Keeper, keeper), changed.append)
    kernel = cast(TrackedKernel, SimpleNamespace(kernel_id="K"))
    work = Work(kernel, AutoSave().defaults(), Quiet())
    choices.see_soon(work)
    assert tasks == [], "it has run nothing"
    work.cell_started(time.time())
    seen = 0
    while contents.given_up < 3:  # as a kernel that works all the time
        choices.see_soon(work)
        seen = max(seen, contents.waiting)
        assert len([task for task in tasks if not task.done()]) == 1
        await asyncio.sleep(0.01)
    assert seen == 1
    (tmp_path / SLOW).unlink()
    choices.see_soon(work)
    await until("the notebook is read", lambda: changed == [work])
    assert work.notebook[0].idle == 77
    await until("nobody looks any more", lambda: all(task.done() for task in tasks))
    choices.stop()
    choices.see_soon(work)
    assert all(task.done() for task in tasks)


async def test_what_contents_cancel_themselves_keeps_nobody_from_reading_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not look as if the end of the server were cancelled: kernels are saved then."""
    metadata = {"gpu_ckpt": {"autosave": {"idle": 77.0}}}
    for name in ("book", "gone"):
        book = {"cells": [], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path / f"{name}.ipynb").write_text(json.dumps(book))
    ids = {"gone.ipynb": "G", "book.ipynb": "K"}
    are_listed = True

    async def list_sessions() -> list[dict[str, Any]]:
        if not are_listed:
            await cancelled()
        return [{"path": path, "kernel": {"id": kernel_id}} for path, kernel_id in ids.items()]

    async def is_pristine(kernel_id: str) -> bool:
        return False

    log = logging.getLogger("contents")
    contents = Cancelling(root_dir=str(tmp_path))
    managers = SimpleNamespace(contents_manager=contents, list_sessions=list_sessions)
    sessions = Sessions(None, managers, is_pristine, log)
    tasks: list[asyncio.Task[None]] = []

    def in_background(work: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(work))

    keeper = SimpleNamespace(sessions=sessions, log=log, in_background=in_background)
    changed: list[Work] = []
    choices = NotebookChoices(cast(Keeper, keeper), changed.append)
    works = [
        Work(
            cast(TrackedKernel, SimpleNamespace(kernel_id=kernel_id)),
            AutoSave().defaults(),
            Quiet(),
        )
        for kernel_id in ids.values()
    ]
    await choices.see(works)
    assert changed == works[1:] and works[1].notebook[0].idle == 77
    works[0].cell_started(time.time())
    choices.see_soon(works[0])
    await until("it was looked", lambda: all(task.done() for task in tasks))
    assert not tasks[0].cancelled() and tasks[0].exception() is None
    are_listed = False
    await choices.see(works)
    assert "the reading was cancelled" in caplog.text
