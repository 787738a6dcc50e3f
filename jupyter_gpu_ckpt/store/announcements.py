"""What collections of garbage may just remove from a remote tier, for uploads to see.

Of each collection there is an object ``removing/<id>.json`` while it removes, and on the node's
disk a file that its process has locked. If the process is killed the lock is free, and after a
while, in which its last requests have surely come to an end, its announcement counts no longer.
That of another node counts for an hour, and so does one that stays behind because a removal
failed, as that may still come to pass.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from .clocks import uptime
from .layout import make_private_dir
from .remote import RemoteFiles, RemoteOwner

_VOID_SECONDS: Final = 3600.0
#: Seconds after which nothing comes any more of what a process did that is seen to be dead.
_DEAD_SECONDS: Final = 120.0


class _Announcement(msgspec.Struct):
    packs: list[str]


class Announcements:
    """Announcements of one owner's remote tier.

    Parameters
    ----------
    remote
        The owner's objects.
    locks
        Folder for locks, on this node's disk; it is made.
    """

    def __init__(self, remote: RemoteOwner, locks: Path) -> None:
        self._remote = remote
        self._locks = locks
        self._now = RemoteFiles(remote).now
        #: When processes were first seen to be dead, by the ids of what they announced.
        self._dead: dict[str, float] = {}

    @contextmanager
    def made(self, pack_ids: list[str]) -> Iterator[None]:
        """Announce that these packs may be removed; stays behind where something failed."""
        now = self._now()
        for name, found in self._remote.objects.list("removing").items():
            if now - found.modified > _VOID_SECONDS:
                self._remote.forget(name)
        name = secrets.token_hex(8)
        make_private_dir(self._locks)
        path = self._locks / name
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = msgspec.json.encode(_Announcement(pack_ids))
            self._remote.objects.put(f"removing/{name}.json", data)
            yield
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        else:
            if self._remote.forget(f"removing/{name}.json"):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def packs(self) -> set[str]:
        """Packs that collections under way may remove."""
        found = self._remote.objects.list("removing")
        if not found:
            return set()
        now = self._now()
        packs: set[str] = set()
        for name, entry in found.items():
            if now - entry.modified >= _VOID_SECONDS or self._is_of_the_dead(Path(name).stem):
                continue
            data = self._remote.maybe(name)
            if data is not None:
                try:
                    packs.update(msgspec.json.decode(data, type=_Announcement).packs)
                except msgspec.DecodeError:
                    packs.update(self._remote.packs())
        return packs

    def _is_of_the_dead(self, name: str) -> bool:
        """Whether the process that announced ran on this node, and was killed some time ago."""
        path = self._locks / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self._dead.pop(name, None)
            return False
        finally:
            os.close(fd)
        now = uptime()
        if now - self._dead.setdefault(name, now) < _DEAD_SECONDS:
            return False
        if self._remote.forget(f"removing/{name}.json"):
            path.unlink(missing_ok=True)
        return True
