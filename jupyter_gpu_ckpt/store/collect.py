"""Garbage collection: what no manifest needs and no writer counts on."""

from __future__ import annotations

import os
import re
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import CkptError
from .chunks import GONE, Chunks
from .codec import Scratch
from .layout import is_state_id
from .manifest import NAME_SIZE, Body, Damaged, TooNew, decode_manifest
from .owner import OwnerStore
from .presence import alive_since, store_now_ns
from .reader import load_index
from .records import GcResult

_INDEX_NAME = re.compile(rb'"index":"([0-9a-f]{64})","index_size":([0-9]{1,12})')
_CHUNK_FILE = re.compile(rf"([0-9a-f]{{{2 * NAME_SIZE}}})(?:{re.escape(GONE)}[0-9a-f]+)?\Z")

# Names are taken apart by the thousand: there may be millions.
_MANY = struct.Struct(f"{NAME_SIZE}s" * 1000)


def collect(
    owner: OwnerStore,
    *,
    grace_seconds: float,
    dry_run: bool,
    stop: threading.Event | None = None,
) -> GcResult:
    """Remove garbage older than the grace period.

    The order makes it safe beside writers: take the time, look who writes, mark, sweep. What
    a writer makes or counts on is younger than the writer's beginning (see
    :mod:`.chunks`), and the sweep spares everything younger than the oldest writer.

    Parameters
    ----------
    owner
        Whose store.
    grace_seconds
        Spare what is younger than this, in seconds.
    dry_run
        Only count.
    stop
        Once set, no more is removed. The result is what was removed until then.

    Raises
    ------
    CkptError
        ``store_unavailable``: a state of a newer format, whose blocks cannot be known.
    OSError
        A file cannot be read or removed.
    """
    now = store_now_ns(owner.writers)
    cutoff = now - max(0, int(grace_seconds * 1e9))
    dead: list[Path] = []
    for folder in owner.writers.iterdir():
        began = alive_since(folder, now)
        if began is None:
            dead.append(folder)
        else:
            cutoff = min(cutoff, began)
    used = mark(owner, stop)
    chunks, size = 0, 0
    for folder in dead:
        with suppress(FileNotFoundError):
            if folder.stat().st_mtime_ns < cutoff:
                size += _remove_left_over(folder, dry_run)
    chunks_of = Chunks(owner)
    for path in _chunk_files(owner):
        if stop is not None and stop.is_set():
            break
        match = _CHUNK_FILE.match(os.path.basename(path))
        if match is None:
            continue
        name = bytes.fromhex(match[1])
        aside = GONE in path
        if name in used:
            if aside and not dry_run:
                chunks_of.put_back(name, path)
            continue
        try:
            found = os.stat(path)
        except FileNotFoundError:
            continue
        # Times equal to the cutoff are too close to call.
        if found.st_mtime_ns >= cutoff:
            continue
        if dry_run:
            removed = True
        elif aside:
            with suppress(FileNotFoundError):
                os.unlink(path)
            removed = True
        else:
            removed = chunks_of.remove(name, inode=None, mtime_ns=found.st_mtime_ns)
        if removed:
            chunks += 1
            size += found.st_size
    return GcResult(chunks, size)


def _remove_left_over(path: Path, dry_run: bool) -> int:
    """Remove what a killed writer left: its folder, or a single temporary file. Returns bytes."""
    if not path.is_dir():
        size = path.stat().st_size
        if not dry_run:
            path.unlink()
        return size
    size = sum(file.stat().st_size for file in path.iterdir())
    if not dry_run:
        shutil.rmtree(path)
    return size


def mark(owner: OwnerStore, stop: threading.Event | None = None) -> set[bytes]:
    """Names of all chunks that any manifest needs; incomplete once `stop` is set."""
    chunks = Chunks(owner)
    scratch = Scratch(level=1)
    used: set[bytes] = set()
    for path in manifests(owner):
        if stop is not None and stop.is_set():
            break
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        body = _body(data, owner, path)
        if body is None or bytes.fromhex(body[0]) in used:
            continue
        used.add(bytes.fromhex(body[0]))
        with suppress(Damaged):
            for file in load_index(chunks, *body, scratch).files:
                whole = len(file.blocks) // _MANY.size * _MANY.size
                for names in _MANY.iter_unpack(file.blocks[:whole]):
                    used.update(names)
                for names in struct.iter_unpack(f"{NAME_SIZE}s", file.blocks[whole:]):
                    used.update(names)
    return used


def _body(data: bytes, owner: OwnerStore, path: Path) -> tuple[str, int] | None:
    try:
        body: Body = decode_manifest(data, owner.manifest_key)
    except TooNew as error:
        raise CkptError(
            "store_unavailable",
            f"The saved state {path.stem} was written by a newer version ({error}), "
            "so what it needs is unknown and nothing was removed.",
            hint="Upgrade jupyter-gpu-ckpt.",
        ) from error
    except Damaged:
        # Keep what a damaged manifest still names: it is not for us to make it worse.
        match = _INDEX_NAME.search(data)
        return (match[1].decode(), int(match[2])) if match else None
    return body.index, body.index_size


def manifests(owner: OwnerStore) -> Iterator[Path]:
    """Paths of all manifests."""
    for kernel in owner.kernel_folders():
        yield from manifests_of(kernel / "states")


def manifests_of(folder: Path) -> Iterator[Path]:
    """Paths of the manifests in one kernel's folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if name.endswith(".json") and is_state_id(name[:-5]):
            yield folder / name


def _chunk_files(owner: OwnerStore) -> Iterator[str]:
    for folder in sorted(owner.chunks.iterdir()):
        if folder.is_dir():
            for name in os.listdir(folder):
                yield os.path.join(folder, name)
