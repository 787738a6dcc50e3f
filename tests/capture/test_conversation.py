"""How long is waited for what ``kernel-capture`` undoes; a script says what it would say."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt.capture import conversation
from jupyter_gpu_ckpt.capture.conversation import GPU_UNDO, Conversation
from jupyter_gpu_ckpt.capture.explain import explain
from jupyter_gpu_ckpt.errors import CkptError

ON_GPU = """echo '{"event":"gpu","step":"checkpoint","pid":1}'; """
LATE = """sleep 1; echo '{"event":"error","reason":"gpu_busy","message":"late"}'"""
STUCK = "exec sleep 600"


def talk(script: str) -> tuple[CkptError, int]:
    """What is told of a process that should be done at once, and how it ended."""

    async def run() -> tuple[CkptError, int]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", script, stdin=pipe, stdout=pipe, stderr=pipe
        )
        talks = Conversation(process, partial(explain, doing="save"), None, None)
        try:
            with pytest.raises(CkptError) as told:
                await talks.run(None, 0.0)
        finally:
            await talks.finish()
        assert process.returncode is not None
        return told.value, process.returncode

    return asyncio.run(run())


def test_what_is_undone_on_a_gpu_is_waited_for_as_long_as_that_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation, "UNDO_GRACE", 0.05)
    error, code = talk(ON_GPU + LATE)
    assert (error.reason, code) == ("busy", 0)


@pytest.mark.parametrize("on_gpu", [ON_GPU, ""])
def test_it_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch, on_gpu: str) -> None:
    monkeypatch.setattr(conversation, "UNDO_GRACE", 0.05)
    monkeypatch.setattr(conversation, "GPU_UNDO", 0.05)
    error, code = talk(on_gpu + STUCK)
    assert (error.reason, code) == ("timeout", -9)


def test_the_program_allows_itself_no_longer() -> None:
    source: Any = Path(__file__).parents[2] / "native" / "src" / "cuda.c"
    found = re.search(r"undo_beside = ([\d.]+);", source.read_text())
    assert found is not None and float(found[1]) <= GPU_UNDO
