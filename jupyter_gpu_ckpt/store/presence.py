"""Writers at work, as folders that a collector can see: ``writers/<state id>/``.

Each holds a locked ``writer.json``, whose modification time is when the writer began,
and the writer's temporary files. The lock ends with the process, however it ends.
Whether the lock of another node is visible depends on the file system, so writers of
other boots also count as alive while their folder is fresh (they touch it as they go on).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from .layout import create_file, make_private_dir

_FRESH_NS = 3600 * 10**9
_STARTING_NS = 60 * 10**9
_TOUCH_SECONDS = 10.0
_FILE = "writer.json"


class _Writer(msgspec.Struct):
    boot_id: str


def boot_id() -> str:
    """Identity of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


class Presence:
    """This writer's folder and lock.

    Attributes
    ----------
    folder
        For temporary files.
    start_ns
        When the writer began, in nanoseconds by the clock of the store's file system.

    Raises
    ------
    OSError
        The folder cannot be made.
    """

    def __init__(self, writers: Path, state_id: str) -> None:
        self.folder = writers / state_id
        self._fd = -1
        make_private_dir(self.folder)
        try:
            # Locked before it has its name, so that no collector sees it unlocked.
            hidden = self.folder / f".{_FILE}"
            create_file(hidden, msgspec.json.encode(_Writer(boot_id())))
            self._fd = os.open(hidden, os.O_RDWR | os.O_CLOEXEC)
            with suppress(OSError):  # No locks on this file system: freshness has to do.
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(hidden, self.folder / _FILE)
            # From here on collectors see us. One that looked before took its time before
            # that, so what we touch from now on is younger than all it removes.
            os.utime(self._fd)
            self.start_ns = os.fstat(self._fd).st_mtime_ns
        except BaseException:
            self.end()
            raise
        self._began = self._touched = time.monotonic()

    def now_ns(self) -> int:
        """Return the store's time, in nanoseconds; never goes back."""
        return self.start_ns + int((time.monotonic() - self._began) * 1e9)

    def touch(self) -> None:
        """Say that this writer lives; cheap enough to call for every block."""
        now = time.monotonic()
        if now - self._touched > _TOUCH_SECONDS:
            self._touched = now
            stamp = self.now_ns()
            os.utime(self.folder, ns=(stamp, stamp))

    def end(self) -> None:
        """Remove the folder with what is in it, and let go of the lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def store_now_ns(writers: Path) -> int:
    """Time by the clock of the store's file system, in nanoseconds."""
    path = writers / f".now-{os.getpid()}-{time.monotonic_ns()}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def alive_since(folder: Path, now_ns: int) -> int | None:
    """When the writer that owns `folder` began, in nanoseconds; ``None`` if it is dead.

    A single temporary file among the folders counts as alive for a minute.

    Raises
    ------
    OSError
        Other than that the folder is gone, which is the same as dead.
    """
    try:
        fresh = folder.stat().st_mtime_ns
        fd = os.open(folder / _FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        # About to begin, just ended, or killed in one of these moments; or a temporary
        # file that is about to be moved elsewhere.
        with suppress(FileNotFoundError):
            fresh = folder.stat().st_mtime_ns
            return now_ns if now_ns - fresh < _STARTING_NS else None
        return None
    try:
        began = os.fstat(fd).st_mtime_ns
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return began
        except OSError:
            ours = False
        else:
            ours = _boot_of(fd) == boot_id()
        return None if ours or now_ns - fresh > _FRESH_NS else began
    finally:
        os.close(fd)


def _boot_of(fd: int) -> str | None:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=_Writer).boot_id
    except msgspec.DecodeError:
        return None
