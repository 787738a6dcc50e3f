"""How fast uploads may be: a rate of one server's, and one that all servers of a node share."""

from __future__ import annotations

import fcntl
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
from itertools import islice
from pathlib import Path
from typing import Final

#: A user's file in the folder of a node; root's is for all who cannot make one.
FILE: Final = "upload-{uid}.lock"
#: Seconds after which it is looked again how many share a rate.
_LOOK: Final = 1.0
#: So many who share a rate are counted: whoever holds more locks makes no difference.
_MOST: Final = 256
#: So much of a folder is looked at, whatever somebody has put into it.
_MOST_FILES: Final = 4096
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, process.
_LOCK: Final = struct.Struct("hhqqi0q")
_END: Final = 1 << 62
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NodeShare:
    """One server's part of a rate that all servers of a node have in common.

    Who sends holds a lock, which ends with its process, however that ends. The rate is divided by
    the users who hold any, and a user's part by her own locks: nobody takes more than a user's
    part. Where a folder lets nobody make files, as in pods, all hold locks in root's, and each has
    an equal part; whoever holds many there leaves others one of 256 parts.

    Parameters
    ----------
    folder
        Where the locks are, the same for all servers of the node; made where it is missing, open to
        everybody as ``/tmp`` is. Who cannot have a lock there counts for herself alone.
    total
        Bytes a second that all have; 0: no limit, and nothing is made.
    """

    def __init__(self, folder: Path, total: float) -> None:
        self._folder = folder
        self.total = total if total > 0 else math.inf
        #: The user whose file the lock is in.
        self._user = os.geteuid()
        self._has_lock = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have a part while in the block."""
        file = None if math.isinf(self.total) else self._take()
        self._has_lock = file is not None
        try:
            yield
        finally:
            self._has_lock = False
            if file is not None:
                os.close(file)

    def rate(self) -> float:
        """Bytes a second that this server may send now; infinite without a limit."""
        if math.isinf(self.total):
            return self.total
        holders = self._holders()
        if not self._has_lock:
            holders[self._user] += 1
        return self.total / max(1, len(holders)) / max(1, holders[self._user])

    def _take(self) -> int | None:
        """A descriptor that holds a lock, in a file of one's own, else in root's."""
        with suppress(OSError):
            self._folder.mkdir()
            self._folder.chmod(0o1777)
        mine = self._folder / FILE.format(uid=os.geteuid())
        for path, flags, kind in (
            (mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, fcntl.F_WRLCK),
            (mine, os.O_RDWR, fcntl.F_WRLCK),
            (self._folder / FILE.format(uid=0), os.O_RDONLY, fcntl.F_RDLCK),
        ):
            with suppress(OSError):
                file = os.open(path, flags | _FLAGS, 0o644)
                try:
                    status = os.fstat(file)
                    if stat.S_ISREG(status.st_mode) and status.st_uid in (os.geteuid(), 0):
                        if flags & os.O_CREAT:
                            os.fchmod(file, 0o644)  # whatever the umask
                        where = secrets.randbelow(_END)  # a place of nobody else's
                        lock = _LOCK.pack(kind, os.SEEK_SET, where, 1, 0)
                        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
                        self._user = status.st_uid
                        return file
                except OSError:
                    os.close(file)
                    raise
                os.close(file)
        return None

    def _holders(self) -> Counter[int]:
        """How many locks are held, by user."""
        found: Counter[int] = Counter()
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in islice(entries, _MOST_FILES):
                if entry.name.startswith("upload-"):
                    with suppress(OSError):
                        user, count = _locks(entry.path)
                        found[user] += count
        return +found


def _locks(path: str) -> tuple[int, int]:
    """Whose a file is, and how many locks are held in it."""
    file = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return status.st_uid, 0
        # Everybody can lock a user's file for reading, and only she for writing; root's, which
        # others share, for reading.
        against = fcntl.F_WRLCK if status.st_uid == 0 else fcntl.F_RDLCK
        found, ranges = 0, [(0, _END)]
        while ranges and found < _MOST:
            start, end = ranges.pop()
            asked = _LOCK.pack(against, os.SEEK_SET, start, end - start, 0)
            kind, _, at, length, _ = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                continue
            found += 1
            beyond = at + length if length else end
            ranges += [(a, b) for a, b in ((start, at), (beyond, end)) if a < b]
        return status.st_uid, found
    finally:
        os.close(file)


class Bandwidth:
    """Lets bytes pass at a rate, on average; for several threads.

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
        self._since = 0.0
        self._rate = 0.0
        self._credit = 0.0

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While in the block bytes are sent: it counts among those who share the node's rate."""
        with self._share.held():
            self._rate = self._now()
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
                if self._credit >= size:
                    # What more there is was not used: some of it may make up for a slow network.
                    self._credit = min(self._credit - size, rate * _LOOK)
                    return
                left = (size - self._credit) / rate + self._since - now
                stop.wait(min(left, _LOOK))

    def _now(self) -> float:
        return min(self._own, self._share.rate())
