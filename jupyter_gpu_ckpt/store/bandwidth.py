"""How fast uploads may be: a rate of one server's, and one that all servers of a node share."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import secrets
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

#: Root's file, for all who cannot make any.
SHARED: Final = "upload-0.lock"
#: A file of one server's while it sends: nobody can guess the name and have it first.
_OWN: Final = "upload-{random}.lock"
_PREFIX, _SUFFIX = "upload-", ".lock"
#: Seconds after which it is looked again how many share a rate.
_LOOK: Final = 1.0
#: So many who share a rate are counted: whoever holds more locks makes no difference.
_MOST: Final = 256
#: So many names in a folder are looked at: where there are more, it is as with too many locks.
_MOST_FILES: Final = 16384
#: So many files of another user's are opened to see whether she sends.
_MOST_OPENED: Final = 16
#: Seconds after which a file of one's own that nobody locks was left by one who was killed.
_LEFT: Final = 60.0
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, process.
_LOCK: Final = struct.Struct("hhqqi0q")
_END: Final = 1 << 62
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NodeShare:
    """One server's part of a rate that all servers of a node have in common.

    Who sends holds a lock, which ends with its process, however that ends: in a file of its own,
    which no other user can lock for writing. The rate is divided by the users who hold any, and a
    user's part by her own locks: nobody takes more than a user's part. Where a folder lets nobody
    make files, as in pods, all hold locks in root's, and each has an equal part. Whoever holds many
    locks there, or one of more than a byte, which hides others, or fills the folder with files,
    leaves all one of 256 parts: slower than need be, and never faster than all may be.

    Parameters
    ----------
    folder
        Where the locks are, the same for all servers of the node; made where it is missing, open to
        everybody as ``/tmp`` is. Who cannot have a lock there counts for herself alone, which the
        log says once.
    total
        Bytes a second that all have; 0: no limit, and nothing is made.
    """

    def __init__(self, folder: Path, total: float) -> None:
        self._folder = folder
        self.total = total if total > 0 else math.inf
        self._sends = self._warned = False
        #: The lock: where, by which descriptor, and whether the file is this server's own.
        self._held: tuple[Path, int, bool] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have a part while in the block."""
        self._sends = not math.isinf(self.total)
        try:
            self._keep()
            yield
        finally:
            self._sends = False
            self._give_back()

    def rate(self) -> float:
        """Bytes a second that this server may send now; infinite without a limit."""
        if math.isinf(self.total):
            return self.total
        self._keep()
        # Whose file the lock is in: hers are told apart, of others only whether they send.
        user = os.geteuid() if self._held is None or self._held[2] else 0
        holders = self._holders(user)
        if self._held is None:
            holders[user] += 1
        return self.total / max(1, len(holders)) / max(1, holders[user])

    def _keep(self) -> None:
        """Have a lock while sending, also when its file was removed, as files in ``/tmp`` are."""
        if self._held is not None:
            path, file, _ = self._held
            with suppress(OSError):
                if os.path.samestat(os.lstat(path), os.fstat(file)):
                    return
            self._give_back()
        if not self._sends:
            return
        with suppress(OSError):
            self._folder.mkdir()
            self._folder.chmod(0o1777)
        problems = []
        for take in (self._take_own, self._take_shared):
            try:
                self._held = take()
            except OSError as error:
                problems.append(str(error))
            else:
                return
        if not self._warned:
            self._warned = True
            _log.warning(
                "This server's uploads are not counted among those of its node, which may be "
                "faster than upload_bandwidth_per_node together: no file can be locked in %s (%s). "
                "Give that folder the mode 1777, the same one in all servers of the node.",
                self._folder, "; ".join(problems),
            )  # fmt: skip

    def _give_back(self) -> None:
        if self._held is None:
            return
        path, file, is_own = self._held
        self._held = None
        if is_own:
            with suppress(OSError):
                path.unlink()
        os.close(file)

    def _take_own(self) -> tuple[Path, int, bool]:
        """A lock in a new file, which others can read only once it is locked."""
        path = self._folder / _OWN.format(random=secrets.token_hex(8))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            _lock(file, fcntl.F_WRLCK, 0)
            os.fchmod(file, 0o644)  # whatever the umask
        except OSError:
            os.close(file)
            with suppress(OSError):
                path.unlink()
            raise
        return path, file, True

    def _take_shared(self) -> tuple[Path, int, bool]:
        """A lock in root's file, at a place of nobody else's."""
        path = self._folder / SHARED
        file = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            status = os.fstat(file)
            if status.st_uid != 0 or not stat.S_ISREG(status.st_mode):
                raise PermissionError(f"{path} is not a file of root's")
            _lock(file, fcntl.F_RDLCK, secrets.randbelow(_END))
        except OSError:
            os.close(file)
            raise
        return path, file, False

    def _holders(self, user: int) -> Counter[int]:
        """How many locks `user` holds, and that others hold any."""
        found: Counter[int] = Counter()
        opened: Counter[int] = Counter()
        with suppress(OSError), os.scandir(self._folder) as entries:
            for number, entry in enumerate(entries):
                if number >= _MOST_FILES:
                    return Counter({user: _MOST})
                if not (entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX)):
                    continue
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    owner = status.st_uid
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    if entry.name == SHARED:
                        if owner == 0:
                            found[owner] += _shared_locks(entry.path)
                        continue
                    if found[owner] >= (_MOST if owner == user else 1):
                        continue
                    opened[owner] += 1
                    if owner != user and opened[owner] > _MOST_OPENED:
                        continue
                    if _is_locked(entry.path):
                        found[owner] += 1
                    elif owner == os.geteuid() and time.time() - status.st_mtime > _LEFT:
                        os.unlink(entry.path)
        return +found


def _lock(file: int, kind: int, at: int) -> None:
    """Lock one byte; raises ``BlockingIOError`` where another holds it."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, at, 1, 0))


def _in_the_way(file: int, kind: int, start: int, end: int) -> tuple[int, int] | None:
    """Where a lock is that keeps others from one of this kind, and its length; 0: endless."""
    asked = _LOCK.pack(kind, os.SEEK_SET, start, end - start, 0)
    held, _, at, length, _ = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))
    return None if held == fcntl.F_UNLCK else (at, length)


def _is_locked(path: str) -> bool:
    """Whether its owner holds a lock: only she can for writing, everybody for reading."""
    file = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        return _in_the_way(file, fcntl.F_RDLCK, 0, _END) is not None
    finally:
        os.close(file)


def _shared_locks(path: str) -> int:
    """How many locks of one byte are held in root's file, or the most there can be."""
    file = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        found, ranges = 0, [(0, _END)]
        while ranges and found < _MOST:
            start, end = ranges.pop()
            held = _in_the_way(file, fcntl.F_WRLCK, start, end)
            if held is None:
                continue
            at, length = held
            if length != 1:  # none of ours, and others within it cannot be seen
                return _MOST
            found += 1
            ranges += [(a, b) for a, b in ((start, at), (at + 1, end)) if a < b]
        return found
    finally:
        os.close(file)


class Bandwidth:
    """Lets bytes pass at a rate, on average; for several threads.

    With a rate of its own alone the first bytes pass at once, and what follows waits until they
    would have taken their time, whatever it belongs to. Of a rate that many share nothing passes
    before its time, or all who begin would send at once.

    Parameters
    ----------
    own
        Bytes a second at most; 0: no limit.
    share
        Of a rate of the node's, too.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        own: float = 0.0,
        share: NodeShare | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own if own > 0 else math.inf
        self._share = NodeShare(Path(), 0.0) if share is None else share
        self._clock = clock
        self._lock = threading.Lock()
        #: When it was counted last what may pass; the rate then, and what may pass since.
        self._since = clock()
        self._rate = 0.0
        self._credit = 0.0

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While in the block bytes are sent: it counts among those who share the node's rate."""
        with self._share.held():
            self._rate = self._now()
            if self._is_alone():
                yield
                return
            others = self._share.rate() < self._share.total
            # Those who send already have seen by then that they are one more.
            self._since = self._clock() + (_LOOK if others else 0.0)
            self._credit = 0.0
            yield

    def wait(self, size: int, stop: threading.Event) -> None:
        """Wait until `size` bytes may pass, or until `stop`; in :meth:`sending` only."""
        with self._lock:
            while not stop.is_set() and not math.isinf(rate := self._now()):
                now = self._clock()
                # Whoever has gone meanwhile had a part until now.
                self._credit += min(rate, self._rate) * max(0.0, now - self._since)
                self._since, self._rate = max(now, self._since), rate
                needed = 0.0 if self._is_alone() else size
                if self._credit >= needed:
                    # What more there is was not used: some of it may make up for a slow network.
                    self._credit = min(self._credit - needed, rate * _LOOK) + needed - size
                    return
                left = (needed - self._credit) / rate + self._since - now
                stop.wait(min(left, _LOOK))

    def _is_alone(self) -> bool:
        """Whether there is no rate but its own."""
        return math.isinf(self._share.total)

    def _now(self) -> float:
        return min(self._own, self._share.rate())
