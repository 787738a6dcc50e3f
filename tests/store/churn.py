"""Processes that use one store at once, made to be killed: ``python -m tests.store.churn ROOT``.

Each is a fork of one that has imported everything, so that a thousand of them take seconds.
Commands, one a line: ``start SEED`` answers with a process id; ``kill PID`` and ``wait PID``
with how it ended: ``killed``, or its exit status.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from functools import lru_cache
from pathlib import Path

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import StateRecord, StateStore

from .conftest import make_meta

KERNELS = ("kernel-a", "kernel-b")
PAGE, PAGES = 4096, 48
MOST_STATES = 5


@lru_cache(maxsize=64)
def content(seed: int) -> bytes:
    """Memory of a kernel: from seed to seed an eighth of its pages changes."""
    pages = []
    for page in range(PAGES):
        version = (seed + page) // 8
        pages.append(
            bytes(PAGE) if page % 7 == 6 else random.Random(f"{page}/{version}").randbytes(PAGE)
        )
    return b"".join(pages)


class Memory:
    """A source that is no file."""

    mode = 0o600
    mtime_ns = 0
    extents = None
    layout = None

    path = b"pages-1.img"

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)

    def open(self) -> None:
        """See Source."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """See Source."""
        buffer[:] = self.data[offset : offset + len(buffer)]

    def done_with(self, offset: int, length: int) -> None:
        """See Source."""

    def close(self) -> None:
        """See Source."""


def save(store: StateStore, kernel_id: str, dice: random.Random) -> None:
    """Save the kernel as it is a little later than at its newest save; or begin to."""
    newest = store.states(kernel_id)[:1]
    seed = int(newest[0].meta.label or 0) + 1 if newest else dice.randrange(1000)
    meta = make_meta(kernel_id)
    meta.label = str(seed)
    with store.begin(kernel_id) as writer:
        writer.add([Memory(content(seed))])
        if dice.random() < 0.9:
            writer.commit(meta)


def check(store: StateStore, state: StateRecord) -> bool:
    """Read all of a state back; False if it was deleted, an assertion if it is not as saved."""
    try:
        with store.open(state.id) as reader, reader.stream(b"pages-1.img") as parts:
            read = b"".join(map(bytes, parts))
    except CkptError as error:
        if error.reason == "unknown_state":
            return False
        raise
    assert read == content(int(state.meta.label or 0)), f"{state.id} is not what was saved"
    return True


def _saver(store: StateStore, dice: random.Random) -> None:
    save(store, dice.choice(KERNELS), dice)


def _cleaner(store: StateStore, dice: random.Random) -> None:
    states = store.states()
    for state in dice.sample(states, max(0, min(len(states) - MOST_STATES, 3))):
        delete(store, state.id)
    store.gc(grace_seconds=0)


def delete(store: StateStore, state_id: str) -> None:
    """Delete a state, unless another has done so."""
    try:
        store.delete(state_id)
    except CkptError as error:
        if error.reason != "unknown_state":
            raise


def _reader(store: StateStore, dice: random.Random) -> None:
    states = store.states()
    if states:
        check(store, dice.choice(states))


def _work(root: Path, seed: int) -> None:
    store, dice = StateStore(root, "ada", workers=1), random.Random(seed)
    while True:
        dice.choices((_saver, _cleaner, _reader), (5, 3, 2))[0](store, dice)


def _start(root: Path, seed: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(0)
        os.nice(5)  # who kills them comes first
        _work(root, seed)
    except BaseException:
        traceback.print_exc()
    os._exit(70)


def main() -> None:
    """Serve commands until the end of the input, then kill what runs."""
    root = Path(sys.argv[1])
    running: set[int] = set()
    for line in sys.stdin:
        command, *words = line.split()
        if command == "start":
            pid = _start(root, int(words[0]))
            running.add(pid)
            print(pid, flush=True)
        else:
            pid = int(words[0])
            if command == "kill":
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            running.discard(pid)
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            print("killed" if killed else status, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
