"""The local tier: a store in a folder whose packs may be missing because they are elsewhere too.

Beside the store itself it keeps, in ``tier/``: ``durable/<state id>``, an empty file for each state
that the remote tier holds whole; ``manifests/<state id>``, what is known of its manifest there;
``confirmed``, the store.json of the remote tier that this one was made for; ``incoming/``, packs on
their way; ``removing/``, locks of processes that remove packs there; ``upload.lock``.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

from .layout import create_file, make_private_dir, move_into
from .local_files import pack_files
from .seal import manifest_packs

_STALE_SECONDS: Final = 3600.0


class _Known(msgspec.Struct):
    version: str
    blake3: str


class LocalTier:
    """What the local tier of one owner knows about the remote one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tier"
        self.store_file = folder / "store.json"
        self._manifests = self.folder / "manifests"
        self.removing = self.folder / "removing"
        self._durable = self.folder / "durable"
        self._incoming = self.folder / "incoming"

    # -- which remote store it belongs to --------------------------------------------------

    def confirmed(self) -> bool:
        """Whether store.json is known to be the remote tier's."""
        try:
            return (self.folder / "confirmed").read_bytes() == self.store_file.read_bytes()
        except FileNotFoundError:
            return False

    def confirm(self, data: bytes) -> None:
        """Note that `data` is the remote tier's store.json; take it over if we have another."""
        make_private_dir(self.folder)
        for path in (self.folder / "confirmed", self.store_file):
            if not path.exists() or path.read_bytes() != data:
                self.write(path, data)

    def write(self, path: Path, data: bytes, *, age: float | None = None) -> None:
        """Write a small file, whole or not at all, in the place of what is there.

        With an `age`, in seconds, it was modified so long ago.
        """
        make_private_dir(self._incoming)
        temporary = self._incoming / secrets.token_hex(8)
        try:
            create_file(temporary, data)
            if age is not None:
                when = temporary.stat().st_mtime - max(0.0, age)
                os.utime(temporary, (when, when))
            move_into(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    # -- durable states --------------------------------------------------------------------

    def durable(self) -> set[str]:
        """Ids of the states that the remote tier holds."""
        try:
            return set(os.listdir(self._durable))
        except FileNotFoundError:
            return set()

    def is_durable(self, state_id: str) -> bool:
        """Whether the remote tier holds a state."""
        return (self._durable / state_id).exists()

    def set_durable(self, state_id: str) -> None:
        """Note that the remote tier holds a state."""
        make_private_dir(self._durable)
        with suppress(FileExistsError):
            create_file(self._durable / state_id, b"")

    def forget(self, state_id: str) -> None:
        """The remote tier holds it no more."""
        (self._durable / state_id).unlink(missing_ok=True)
        (self._manifests / state_id).unlink(missing_ok=True)

    def note_manifest(self, state_id: str, version: str, data: bytes) -> None:
        """The remote tier has this manifest, and lists it with that version."""
        known = msgspec.json.encode(_Known(version, blake3(data).hexdigest()))
        with suppress(OSError):
            make_private_dir(self._manifests)
            self.write(self._manifests / state_id, known)

    def is_manifest(self, state_id: str, version: str, data: bytes) -> bool:
        """Whether the remote tier has exactly this manifest, if it lists that version."""
        try:
            known = msgspec.json.decode((self._manifests / state_id).read_bytes(), type=_Known)
        except (OSError, msgspec.DecodeError):
            return False
        return known == _Known(version, blake3(data).hexdigest())

    # -- packs -----------------------------------------------------------------------------

    @contextmanager
    def incoming(self, path: Path) -> Iterator[Path]:
        """Give a path for a file that is moved to `path` at the end, if all went well."""
        make_private_dir(self._incoming)
        temporary = self._incoming / secrets.token_hex(8)
        try:
            yield temporary
            make_private_dir(path.parent)
            os.rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what transfers left behind that were killed."""
        with suppress(FileNotFoundError):
            for entry in self._incoming.iterdir():
                with suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                        entry.unlink()

    def evict(
        self,
        packs: Path,
        manifests: Callable[[], Iterator[Path]],
        limit: int,
        *,
        spared: Collection[str] = (),
    ) -> int:
        """Remove packs that the remote tier has too, least recently used first.

        Parameters
        ----------
        packs
            The folder of packs.
        manifests
            Gives the paths of all manifests.
        limit
            Bytes of packs that may stay; more do only if they are nowhere else, or spared.
        spared
            Packs that saves under way count on.

        Returns
        -------
        int
            Bytes freed.
        """
        found = sorted(pack_files(packs), key=lambda entry: entry[1].st_mtime)
        excess = sum(entry.st_size for _, entry in found) - limit
        if excess <= 0:
            return 0
        elsewhere: set[str] = set()
        only_here = set(spared)
        for path in manifests():
            with suppress(FileNotFoundError):
                needs = manifest_packs(path.read_bytes())
                (elsewhere if self.is_durable(path.stem) else only_here).update(needs)
        freed = 0
        for name, entry in found:
            pack = os.path.basename(name).removesuffix(".pack")
            if freed >= excess:
                break
            if pack in elsewhere and pack not in only_here:
                with suppress(FileNotFoundError):
                    os.unlink(name)
                    freed += entry.st_size
        return freed

    @contextmanager
    def uploading(self) -> Iterator[bool]:
        """Be the one process of this node that uploads; False if another one is."""
        make_private_dir(self.folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self.folder / "upload.lock", flags, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)
