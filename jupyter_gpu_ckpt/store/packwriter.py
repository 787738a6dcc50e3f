"""Writes the packs of one save: many threads add blobs, one flushes whole packs to disk."""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from .columns import to_column
from .index import PackEntry
from .layout import make_private_dir, sync_dir
from .owner import OwnerStore
from .packs import HASH_SIZE, PACK_BLOBS, PACK_SIZE, encode_footer, pack_id, pack_key

_SYNC_FILE_RANGE_WRITE = 2
# Bytes after which the disk is told to start, and packs that may wait for it: both keep
# what the flush at the end has to wait for small.
_START_DISK = 8 << 20
_WAITING_PACKS = 4

_libc = ctypes.CDLL(None, use_errno=True)


class Placed(NamedTuple):
    """Where a blob is: position of the pack among the writer's, number in it, bytes."""

    pack: int
    number: int
    offset: int
    length: int


class _Pack:
    """A pack being written."""

    def __init__(self, folder: Path, state_id: str, position: int, owner: OwnerStore) -> None:
        self.position = position
        self.id = pack_id(state_id, position)
        self.temporary = folder / f"{self.id}.pack"
        self.path = owner.packs / pack_key(self.id)
        self.salt = owner.sealing.new_salt()
        self.sealer = owner.sealing.sealer(self.id, self.salt, owner.sealing.key_id)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(self.temporary, flags, 0o600)
        os.fchmod(self.fd, 0o600)
        self.size = 0
        self.pending = 0
        self.full = False
        self.lengths, self.pages = array("I"), array("H")
        self.codecs, self.names, self.hashes = bytearray(), bytearray(), bytearray()
        self._started = 0
        self._writing = threading.Lock()

    def write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        # The file system lets one thread at a time write to a file, and the others spin:
        # waiting here leaves the processor to those that compress.
        with self._writing:
            done = 0
            while done < len(view):
                done += os.pwrite(self.fd, view[done:], offset + done)
            self._started += done
            start = self._started >= _START_DISK
            if start:
                self._started = 0
        if start:
            _libc.sync_file_range(
                self.fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE
            )

    def columns(self) -> list[bytes]:
        return [
            to_column("I", self.lengths),
            bytes(self.codecs),
            to_column("H", self.pages),
            bytes(self.names),
            bytes(self.hashes),
        ]

    def publish(self) -> None:
        """Make it durable and move it to its place."""
        os.fdatasync(self.fd)
        self.close()
        make_private_dir(self.path.parent)
        # A collector that took the writer for dead has removed the file: that ends the save.
        os.rename(self.temporary, self.path)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PackWriter:
    """The packs of one state.

    Parameters
    ----------
    owner
        Whose store.
    state_id
        The state: its packs are named after it.
    folder
        For packs that are not whole yet; on the same file system.
    on_pack
        Called from another thread with the id of each pack that is whole and durable.

    Attributes
    ----------
    entries
        All packs begun so far, in order.
    stored
        Bytes of all blobs added, but for the index.
    """

    def __init__(
        self,
        owner: OwnerStore,
        state_id: str,
        folder: Path,
        on_pack: Callable[[str], None] | None = None,
    ) -> None:
        self.entries: list[PackEntry] = []
        self.stored = 0
        self._owner = owner
        self._state_id = state_id
        self._folder = folder
        self._on_pack = on_pack
        self._lock = threading.Lock()
        self._packs: list[_Pack] = []
        self._current: _Pack | None = None
        self._flushing: SimpleQueue[_Pack | None] = SimpleQueue()
        self._room = threading.Semaphore(_WAITING_PACKS)
        self._flusher: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, name: bytes, hashes: bytes, codec: int, payload: memoryview) -> Placed:
        """Write a blob.

        Parameters
        ----------
        name, hashes
            Keyed BLAKE3 of the plain blob, and the hashes of its pages.
        codec, payload
            The encoded blob.

        Raises
        ------
        OSError
            Not writable; then or later, that an earlier pack could not be made durable.
        """
        pages = len(hashes) // HASH_SIZE
        with self._lock:
            pack = self._pack(len(payload))
            placed = self._place(pack, len(payload))
            pack.lengths.append(placed.length)
            pack.pages.append(pages)
            pack.codecs.append(codec)
            pack.names += name
            pack.hashes += hashes
            self.entries[pack.position].stored += placed.length
            self.stored += placed.length
        self._write(pack, placed, payload)
        return placed

    def add_index(self, payload: memoryview) -> tuple[PackEntry, Placed]:
        """Write the index, behind all blobs: no pack lists it, the manifest knows where it is."""
        with self._lock:
            # A pack may become larger than others by its index; one only for it may not be due.
            pack = self._current or self._begin()
            placed = self._place(pack, len(payload))
            self.stored += placed.length
        self._write(pack, placed, payload)
        return self.entries[pack.position], placed

    def finish(self) -> int:
        """Make all packs durable, with their names; returns their bytes.

        Raises
        ------
        OSError
            They are not.
        """
        with self._lock:
            current, self._current = self._current, None
        if current is not None:
            self._end(current)
        self._stop()
        self._check()
        for folder in sorted({pack.path.parent for pack in self._packs}):
            sync_dir(folder)
        if self._packs:
            sync_dir(self._owner.packs)
        return sum(pack.size for pack in self._packs)

    def abort(self) -> None:
        """Remove the packs; never raises for what it cannot remove."""
        self._stop()
        with self._lock:
            self._current = None
            for pack in self._packs:
                with suppress(OSError):
                    pack.close()
                for path in (pack.temporary, pack.path):
                    with suppress(OSError):
                        path.unlink()
            self._packs.clear()

    def _pack(self, length: int) -> _Pack:
        """The pack for the next blob; the lock is held."""
        self._check()
        pack = self._current
        if pack is not None and (pack.size + length > PACK_SIZE or len(pack.lengths) >= PACK_BLOBS):
            pack.full = True
            if not pack.pending:
                self._end(pack)
            pack = None
        return pack or self._begin()

    def _begin(self) -> _Pack:
        pack = _Pack(self._folder, self._state_id, len(self.entries), self._owner)
        self._packs.append(pack)
        self.entries.append(PackEntry(pack.id, pack.salt, self._owner.sealing.key_id, 0))
        self._current = pack
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush, name="gpu-ckpt-store-flush")
            self._flusher.start()
        return pack

    def _place(self, pack: _Pack, length: int) -> Placed:
        length += pack.sealer.overhead
        # The index, which no footer lists, comes last: so numbers are positions.
        placed = Placed(pack.position, len(pack.lengths), pack.size, length)
        pack.size += length
        pack.pending += 1
        return placed

    def _write(self, pack: _Pack, placed: Placed, payload: memoryview) -> None:
        pack.write(pack.sealer.seal(placed.number, payload), placed.offset)
        with self._lock:
            pack.pending -= 1
            last = pack.full and not pack.pending
        if last:
            self._end(pack)

    def _end(self, pack: _Pack) -> None:
        """Write a pack's footer and hand it over to be flushed."""
        end = encode_footer(
            pack.id,
            pack.columns(),
            salt=pack.salt,
            footer_key=self._owner.footer_key,
            sealing=self._owner.sealing,
        )
        pack.write(end, pack.size)
        pack.size += len(end)
        pack.names, pack.hashes = bytearray(), bytearray()
        self._room.acquire()
        self._flushing.put(pack)

    def _flush(self) -> None:
        while (pack := self._flushing.get()) is not None:
            try:
                if self._error is None:
                    pack.publish()
                    if self._on_pack is not None:
                        self._on_pack(pack.id)
            except BaseException as error:
                # Not swallowed: the next call of the writer raises it.
                self._error = error
            finally:
                with suppress(OSError):
                    pack.close()
                self._room.release()

    def _stop(self) -> None:
        if self._flusher is not None:
            self._flushing.put(None)
            self._flusher.join()
            self._flusher = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
