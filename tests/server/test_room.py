"""How often a kernel that waits for room on its GPU looks again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from jupyter_gpu_ckpt import room
from jupyter_gpu_ckpt.room import Room


def took(work: Callable[[], Awaitable[None]]) -> float:
    async def timed() -> float:
        began = time.monotonic()
        await work()
        return time.monotonic() - began

    return asyncio.run(timed())


def test_it_looks_less_and_less_often_and_at_once_when_there_is_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "SHORTEST", 0.05)
    monkeypatch.setattr(room, "LONGEST", 0.2)

    async def alone() -> None:
        one, never = Room(), asyncio.Event()
        for _ in range(5):
            await one.wait(never, 100)

    assert took(alone) >= 0.05 + 0.1 + 3 * 0.2 - 0.02

    monkeypatch.setattr(room, "SHORTEST", 1000.0)
    monkeypatch.setattr(room, "LONGEST", 1000.0)

    async def told() -> None:
        one, cancelled = Room(), asyncio.Event()
        one.may_be_there()  # while it was looking
        await one.wait(cancelled, 1000)
        asyncio.get_running_loop().call_later(0.05, one.may_be_there)
        await one.wait(cancelled, 1000)
        await one.wait(cancelled, 0.05)
        await one.wait(cancelled, -1)
        cancelled.set()
        await one.wait(cancelled, 1000)

    assert took(told) < 500
