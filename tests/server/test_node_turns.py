"""All servers of a node together save only so many kernels at a time."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.node_turns import turn


def wanted() -> None:
    """The save is wanted."""


async def test_so_many_at_a_time_and_the_next_when_one_is_free(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        for stack in (first, second):
            held = turn(folder, 2, wait=0, still_wanted=wanted)
            assert await stack.enter_async_context(held)
        async with turn(folder, 2, wait=0, still_wanted=wanted) as had:
            assert not had
        third = asyncio.create_task(turn(folder, 2, wait=30, still_wanted=wanted).__aenter__())
        await asyncio.sleep(0.3)
        assert not third.done()
        await first.aclose()
        assert await third
    # Open to everybody, and nobody can remove another's.
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o644}


async def test_a_turn_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    holder = os.fork()
    if holder == 0:
        held = turn(tmp_path, 1, wait=0, still_wanted=wanted).__aenter__()
        with pytest.raises(StopIteration):
            held.send(None)
        (tmp_path / "held").touch()
        time.sleep(60)
        os._exit(0)
    try:
        until = time.monotonic() + 30
        while not (tmp_path / "held").exists() and time.monotonic() < until:
            await asyncio.sleep(0.05)
        async with turn(tmp_path, 1, wait=0, still_wanted=wanted) as had:
            assert not had
    finally:
        os.kill(holder, 9)
        os.waitpid(holder, 0)
    async with turn(tmp_path, 1, wait=30, still_wanted=wanted) as had:
        assert had


async def test_who_keeps_all_turns_keeps_nobody_from_saving(tmp_path: Path) -> None:
    (tmp_path / "0.lock").mkdir()
    (tmp_path / "1.lock").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "2.lock")
    async with turn(tmp_path, 3, wait=0.2, still_wanted=wanted) as had:
        assert not had


async def test_a_save_that_is_cancelled_waits_no_longer(tmp_path: Path) -> None:
    def cancelled() -> None:
        raise CkptError("cancelled", "The operation was cancelled.")

    async with turn(tmp_path, 1, wait=0, still_wanted=wanted):
        with pytest.raises(CkptError):
            async with turn(tmp_path, 1, wait=30, still_wanted=cancelled):
                raise AssertionError("it is not waited for")


async def test_without_a_limit_nothing_is_made(tmp_path: Path) -> None:
    async with turn(tmp_path / "turns", 0, wait=0, still_wanted=wanted) as had:
        assert had
    assert not (tmp_path / "turns").exists()
