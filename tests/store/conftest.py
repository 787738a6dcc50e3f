"""A store in a fresh folder, an image directory to save, and what to compare it with."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt.store import GcResult, StateMeta, StateRecord, StateStore

KERNEL = "5f4f6b2e-1a52-4c53-8d2f-6d9c6cf0a001"

Save = Callable[..., StateRecord]


def make_meta(kernel_id: str = KERNEL, path: str | None = "work/a.ipynb") -> StateMeta:
    return StateMeta(
        kernel_id=kernel_id,
        kernel_name="python3",
        display_name="Python 3",
        language="python",
        path=path,
        label="before the long run",
        node={"hostname": "node-a"},
        connection={"ip": "127.3.4.5", "shell_port": 5555},
        execution_count=7,
        pids=[4711],
        argv=["python", "-m", "ipykernel_launcher"],
    )


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)


def extract(store: StateStore, state_id: str, dest: Path, **how: Any) -> None:
    """Rebuild a state's image directory, whole; `how` is for :meth:`.StateReader.extract`."""
    with store.open(state_id) as reader:
        reader.extract(dest, **how)


def snapshot(folder: Path) -> dict[bytes, tuple[int, bytes | None]]:
    """What is in a folder: path -> (mode, content or None for a folder)."""
    found: dict[bytes, tuple[int, bytes | None]] = {}
    root = os.fsencode(folder)
    for at, dirs, files in os.walk(root):
        for name in dirs + files:
            path = os.path.join(at, name)
            content = None
            if name in files:
                with open(path, "rb") as file:
                    content = file.read()
            found[os.path.relpath(path, root)] = (os.stat(path).st_mode, content)
    return found


def disk_bytes(folder: Path) -> int:
    """Sum of the sizes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def pack_files(root: Path) -> set[Path]:
    return set(root.glob("*/packs/*/*.pack"))


def collect_all(store: StateStore) -> GcResult:
    """Collect as if the grace period of everything in the store had passed."""
    for path in store.root.glob("*/packs/*/*"):
        os.utime(path, (0, 0))
    for path in store.root.glob("*/writers/*"):
        os.utime(path, (0, 0))
    return store.gc(grace_seconds=0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> StateStore:
    return StateStore(root, "ada")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image directory with something of every kind."""
    folder = tmp_path / "image"
    (folder / "node-local" / "0").mkdir(parents=True)
    (folder / "pages-1.img").write_bytes(
        noise(2 << 20) + bytes(3 << 20) + b"row of a table\n" * 200_000 + b"tail"
    )
    (folder / "core-1.img").write_bytes(b"core" * 100)
    (folder / "one").write_bytes(b"1")
    (folder / "empty.img").write_bytes(b"")
    script = folder / "node-local" / "0" / "run.sh"
    script.write_bytes(b"#!/bin/sh\n")
    script.chmod(0o755)
    return folder


@pytest.fixture
def save(store: StateStore) -> Save:
    def save(
        source: Path, kernel_id: str = KERNEL, path: str | None = "work/a.ipynb"
    ) -> StateRecord:
        with store.begin(kernel_id) as writer:
            writer.add_tree(source)
            return writer.commit(make_meta(kernel_id, path))

    return save
