"""Who is at work in a store: folders that a collector can see, ``writers/<id>/``.

Each holds ``writer.json``, which says what its writer counts on, and is locked by it; the lock
ends with the process, however it ends. Whether the lock of another node is visible depends on
the file system, so writers of other boots also count as alive while their folder is
fresh (they touch it as they go on).

A folder appears whole, with what its writer counts on, and whoever takes it away ends its
writer: packs and manifest are moved from there to their places.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from .layout import is_state_id, make_private_dir, write_all
from .sweep import Present

_FRESH_SECONDS: Final = 3600.0
# What has no writer.json is about to begin or to be moved elsewhere; or somebody died then.
_STARTING_SECONDS: Final = 60.0
_TOUCH_SECONDS: Final = 10.0
_FILE: Final = "writer.json"
_BEGIN: Final = ".begin-"
_READER: Final = "read-"


class _Writer(msgspec.Struct):
    boot_id: str
    locked: bool = True
    pins: dict[str, list[str]] = {}


def boot_id() -> str:
    """Identity of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


class Presence:
    """This writer's folder and lock.

    Parameters
    ----------
    writers
        The owner's folder for writers.
    name
        Name of the folder: the id of the state to be, for a writer.
    pins
        What this writer counts on: ids of states, each with the ids of all its packs. That
        these states are (still) there must be looked at afterwards.

    Attributes
    ----------
    folder
        For temporary files.

    Raises
    ------
    OSError
        The folder cannot be made.
    """

    def __init__(
        self, writers: Path, name: str, *, pins: Mapping[str, Iterable[str]] | None = None
    ) -> None:
        self.folder = writers / f"{_BEGIN}{name}-{secrets.token_hex(4)}"
        self._fd = -1
        make_private_dir(self.folder)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self.folder / _FILE, flags, 0o600)
            os.fchmod(self._fd, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except OSError:
                locked = False  # no locks on this file system: freshness has to do
            kept = {state: sorted(packs) for state, packs in (pins or {}).items()}
            write_all(self._fd, msgspec.json.encode(_Writer(boot_id(), locked, kept)))
            os.utime(self.folder)
            os.rename(self.folder, writers / name)
        except BaseException:
            self.end()
            raise
        self.folder = writers / name
        self._touched = time.monotonic()

    def touch(self) -> None:
        """Say that this writer lives; cheap enough to call for every block."""
        now = time.monotonic()
        if now - self._touched > _TOUCH_SECONDS:
            self._touched = now
            os.utime(self.folder)

    def end(self) -> None:
        """Remove the folder with what is in it, and let go of the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def reading(writers: Path, state_id: str, packs: Iterable[str]) -> Iterator[Presence | None]:
    """Keep a state's packs while they are read, whoever deletes the state.

    Look afterwards that its manifest is still there. Where nothing can be written nobody is
    kept from anything.
    """
    name = f"{_READER}{state_id}-{secrets.token_hex(4)}"
    try:
        presence = Presence(writers, name, pins={state_id: packs})
    except OSError:
        yield None
        return
    try:
        yield presence
    finally:
        presence.end()


def store_now(writers: Path) -> float:
    """Unix time by the clock of the store's file system."""
    path = writers / f".now-{secrets.token_hex(8)}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def look_at(entry: Path, now: float) -> Present | None:
    """See who works in a folder of ``writers/``; ``None`` for one that went meanwhile.

    Parameters
    ----------
    entry
        The folder; a single temporary file among the folders counts as alive for a minute.
    now
        The store's time, in Unix seconds.

    Raises
    ------
    OSError
        Not readable.
    """
    try:
        age = now - entry.stat().st_mtime
        fd = os.open(entry / _FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        with suppress(FileNotFoundError):
            age = now - entry.stat().st_mtime
            return Present(entry.name, None, age < _STARTING_SECONDS, frozenset())
        return None
    try:
        if entry.name.startswith(_BEGIN) and age < _STARTING_SECONDS:
            # Not present yet: it may not even have its lock.
            return Present(entry.name, None, True, frozenset())
        writer = None
        # Somebody may have put a pipe there, or a folder.
        if stat.S_ISREG(os.fstat(fd).st_mode):
            with suppress(msgspec.DecodeError):
                writer = msgspec.json.decode(os.read(fd, 64 << 20), type=_Writer)
        alive = _lives(fd, writer, age)
    finally:
        os.close(fd)
    packs = None if writer is None else frozenset().union(*writer.pins.values())
    return Present(entry.name, entry.name if is_state_id(entry.name) else None, alive, packs)


def _lives(fd: int, writer: _Writer | None, age: float) -> bool:
    try:
        # Shared, so that two collectors do not take each other for the writer.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return age < _FRESH_SECONDS
    if writer is not None and writer.locked and writer.boot_id == boot_id():
        return False
    return age < _FRESH_SECONDS
