"""Chunks: one immutable file a block, named by its content.

Removal and reuse may meet: a writer finds an old garbage chunk and counts on it
while a collector is about to remove it. Both therefore follow one protocol:

* who counts on an existing chunk moves its modification time forward first, and
  looks whether the name still leads to the file it touched;
* who removes a chunk renames it out of the way first, looks at inode and time
  again, and puts it back if they are not what it decided upon.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import time
from contextlib import suppress
from typing import NamedTuple

from blake3 import blake3

from .codec import TRAILER_SIZE, Scratch, decode, encode, is_whole
from .layout import NO_LINKS, write_all
from .manifest import Damaged
from .owner import OwnerStore

#: Between a chunk's name and a random part: it is being removed (or put back).
GONE = ".gone-"
# How far a reused chunk's time moves at least, in nanoseconds, so that it is seen to
# move: some file systems keep times no finer than two seconds.
_FINE_STEP, _COARSE_STEP = 10_000_000, 2_000_000_000
_SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)


class Created(NamedTuple):
    """A chunk this process wrote: what it must still look like for us to remove it."""

    name: bytes
    size: int
    inode: int
    mtime_ns: int


class Chunks:
    """The chunk files of one owner."""

    def __init__(self, owner: OwnerStore) -> None:
        self._folder = os.fspath(owner.chunks)
        self._key = owner.chunk_key
        self._dirs: set[str] = set()

    def name(self, plain: bytes | bytearray | memoryview) -> bytes:
        """Name of a block: its keyed BLAKE3."""
        return blake3(plain, key=self._key).digest()

    def folder(self, name: bytes) -> str:
        """Folder a chunk lies in."""
        return f"{self._folder}/{name[:1].hex()}"

    def path(self, name: bytes) -> str:
        """Path of a chunk."""
        text = name.hex()
        return f"{self._folder}/{text[:2]}/{text}"

    def reuse(self, name: bytes, now_ns: int) -> bool:
        """Count on a chunk if it is there, so that no collector removes it any more.

        Parameters
        ----------
        name
            The chunk.
        now_ns
            The store's time, in nanoseconds.

        Raises
        ------
        OSError
            Other than that it is not there.
        """
        path = self.path(name)
        for _ in range(8):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return False
            try:
                found = os.fstat(fd)
                if not is_whole(fd, found.st_size):
                    # Left over from a crash of the machine; writing it again repairs it.
                    return False
                old = found.st_mtime_ns
                coarse = old % 1_000_000_000 == 0
                stamp = max(now_ns, old + (_COARSE_STEP if coarse else _FINE_STEP))
                os.utime(fd, ns=(stamp, stamp))
                try:
                    if os.stat(path).st_ino == found.st_ino:
                        return True
                except FileNotFoundError:
                    return False
            finally:
                os.close(fd)
        return False

    def write(
        self, name: bytes, plain: memoryview, temporary: str, scratch: Scratch, now_ns: int
    ) -> Created | None:
        """Store a block unless it is there.

        Parameters
        ----------
        name, plain
            The block.
        temporary
            Path for the file until it is whole; its folder must be on the same file system.
        scratch
            The calling thread's buffers.
        now_ns
            The store's time, in nanoseconds.

        Returns
        -------
        Created or None
            ``None`` if the chunk existed.

        Raises
        ------
        OSError
            Nothing half written stays behind.
        """
        if self.reuse(name, now_ns):
            return None
        payload, trailer = encode(plain, scratch)
        folder = self.folder(name)
        if folder not in self._dirs:
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
                os.chmod(folder, 0o700)
            self._dirs.add(folder)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            size = len(payload) + len(trailer)
            written = os.writev(fd, (payload, trailer))
            if written < size:
                # A full disk may take part of it; the next write says so.
                write_all(fd, (bytes(payload) + trailer)[written:])
            # Start the disk now, so that the flush at the end has little to wait for.
            _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)
            found = os.fstat(fd)
            created = Created(name, size, found.st_ino, found.st_mtime_ns)
            return created if self._publish(temporary, name, now_ns) else None
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _publish(self, temporary: str, name: bytes, now_ns: int) -> bool:
        """Give a whole file its name. False: another writer was faster, its chunk is used."""
        path = self.path(name)
        for _ in range(8):
            try:
                os.link(temporary, path)
                return True
            except FileExistsError:
                if self.reuse(name, now_ns):
                    return False
                # There, but unusable or just being removed.
                with suppress(FileNotFoundError):
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        broken = not is_whole(fd, os.fstat(fd).st_size)
                    finally:
                        os.close(fd)
                    if broken:
                        os.rename(temporary, path)
                        return True
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                # No hard links on this file system. Content and name are the same, so
                # even the replacement of another writer's chunk changes nothing.
                os.rename(temporary, path)
                return True
        raise OSError(errno.EAGAIN, "a block keeps changing", path)

    def read(self, name: bytes, size: int, scratch: Scratch) -> memoryview:
        """Read and verify a block into the thread's buffer.

        Returns
        -------
        memoryview
            `size` bytes, valid until the thread's next call.

        Raises
        ------
        Damaged
            Missing, altered or truncated.
        OSError
            Not readable.
        """
        fd = self._open(name)
        try:
            stored = os.fstat(fd).st_size
            if stored > size + TRAILER_SIZE:
                raise Damaged("a block has the wrong size")
            if stored > len(scratch.stored):
                scratch.stored = bytearray(stored)
            view = memoryview(scratch.stored)[:stored]
            done = 0
            while done < stored:
                got = os.preadv(fd, [view[done:]], done)
                if got == 0:
                    raise Damaged("a block is cut off")
                done += got
        finally:
            os.close(fd)
        plain = decode(view, size, scratch)
        if self.name(plain) != name:
            raise Damaged("a block does not match its checksum")
        return plain

    def _open(self, name: bytes) -> int:
        path = self.path(name)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        for attempt in range(5):
            try:
                return os.open(path, flags)
            except FileNotFoundError:
                # Perhaps a collector moved it aside just now, or died having done so.
                aside = self._aside(name)
                if aside is not None:
                    with suppress(FileNotFoundError):
                        return os.open(aside, flags)
            time.sleep(0.004 * attempt)
        raise Damaged("a block is missing")

    def _aside(self, name: bytes) -> str | None:
        folder, prefix = self.folder(name), name.hex() + GONE
        try:
            return next((f"{folder}/{n}" for n in os.listdir(folder) if n.startswith(prefix)), None)
        except FileNotFoundError:
            return None

    def sync(self, name: bytes) -> bool:
        """Make a chunk's content durable. False: it is not there."""
        try:
            fd = self._open(name)
        except Damaged:
            return False
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        return True

    def remove(self, name: bytes, *, inode: int | None, mtime_ns: int) -> bool:
        """Remove a chunk unless someone counts on it since it was looked at.

        Parameters
        ----------
        name
            The chunk.
        inode, mtime_ns
            What it looked like; a later modification time means it is in use.

        Raises
        ------
        OSError
            Not removable.
        """
        path = self.path(name)
        aside = f"{path}{GONE}{secrets.token_hex(4)}"
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return False
        try:
            found = os.stat(aside)
        except FileNotFoundError:
            return False  # another collector dealt with it
        if found.st_mtime_ns > mtime_ns or (inode is not None and found.st_ino != inode):
            self.put_back(name, aside)
            return False
        with suppress(FileNotFoundError):
            os.unlink(aside)
        return True

    def put_back(self, name: bytes, aside: str) -> None:
        """Give a chunk that was moved aside its name again.

        Should the chunk have been written anew meanwhile, then that one takes over:
        it is marked as in use, so that its writer does not remove it either.

        Raises
        ------
        OSError
            Neither was possible; the chunk stays aside, where readers find it.
        """
        path = self.path(name)
        for _ in range(8):
            try:
                os.link(aside, path)
            except FileNotFoundError:
                return  # another collector dealt with it
            except FileExistsError:
                if not self.reuse(name, 0):
                    continue
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                with suppress(FileNotFoundError):
                    os.rename(aside, path)
                return
            with suppress(FileNotFoundError):
                os.unlink(aside)
            return
        raise OSError(errno.EAGAIN, "a block keeps changing", path)
