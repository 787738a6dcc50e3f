"""A store in a folder, as a collection sees it; deleting a state there."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from ..errors import CkptError
from .layout import is_of_one_file, is_state_id, make_private_dir, sync_dir
from .owner import OwnerStore
from .presence import look_at, store_now
from .sweep import PackSeen, Present

_PACK = ".pack"
_GONE = ".gone-"


class LocalFiles:
    """The files of one owner; see :class:`~.sweep.StoreFiles`."""

    def __init__(self, owner: OwnerStore) -> None:
        self._owner = owner
        self._packs: dict[str, str] = {}
        self._manifests: dict[str, Path] = {}

    def now(self) -> float:
        """See :class:`~.sweep.StoreFiles`."""
        return store_now(self._owner.writers)

    def packs(self) -> Iterator[PackSeen]:
        """See :class:`~.sweep.StoreFiles`."""
        for path, found in pack_files(self._owner.packs):
            pack_id = os.path.basename(path)[: -len(_PACK)]
            self._packs[pack_id] = path
            yield PackSeen(pack_id, found.st_size, found.st_mtime)

    def manifests(self) -> Iterator[tuple[str, str]]:
        """See :class:`~.sweep.StoreFiles`."""
        for path in self._owner.manifests():
            with suppress(FileNotFoundError):
                found = path.stat()
                self._manifests[path.stem] = path
                yield path.stem, f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"

    def manifest(self, state_id: str) -> bytes | None:
        """See :class:`~.sweep.StoreFiles`."""
        try:
            return _read(self._manifests[state_id])
        except OSError as error:
            if not is_of_one_file(error):
                raise
            raise CkptError(
                "store_unavailable",
                f"The manifest of the saved state {state_id} cannot be read ({error.strerror}), so "
                "what it needs is unknown and nothing was removed.",
                hint=f"Correct its permissions, or delete it: jupyter gpu-ckpt rm {state_id}",
            ) from error

    def deleted(self) -> Iterator[tuple[str, float]]:
        """See :class:`~.sweep.StoreFiles`."""
        folder = self._owner.deleted
        with suppress(FileNotFoundError):
            # A deletion must not be undone by a power cut when its packs are gone.
            sync_dir(folder)
            for name in os.listdir(folder):
                with suppress(FileNotFoundError):
                    if is_state_id(name[:-5]):
                        yield name[:-5], (folder / name).stat().st_mtime

    def deleted_manifest(self, state_id: str) -> bytes | None:
        """See :class:`~.sweep.StoreFiles`."""
        return _read(self._owner.deleted / f"{state_id}.json")

    def present(self) -> Iterator[Present]:
        """See :class:`~.sweep.StoreFiles`."""
        now = self.now()
        for entry in list(self._owner.writers.iterdir()):
            found = look_at(entry, now)
            if found is not None:
                yield found

    def take_away(self, presence_id: str, *, dry_run: bool) -> int:
        """See :class:`~.sweep.StoreFiles`."""
        path = self._owner.writers / presence_id
        aside = self._owner.writers / f"{_GONE}{secrets.token_hex(8)}"
        try:
            if not dry_run:
                # At once, and before its size is known: it may be waking up.
                os.rename(path, aside)
                path = aside
            size = _size(path)
        except FileNotFoundError:
            return 0
        if not dry_run:
            _remove(path)
        return size

    def announced(self, pack_ids: list[str]) -> AbstractContextManager[None]:
        """See :class:`~.sweep.StoreFiles`; nobody uploads to a folder."""
        return nullcontext()

    def remove_pack(self, pack_id: str) -> None:
        """See :class:`~.sweep.StoreFiles`."""
        with suppress(FileNotFoundError):
            os.unlink(self._packs[pack_id])

    def remove_note(self, state_id: str) -> None:
        """See :class:`~.sweep.StoreFiles`."""
        _remove(self._owner.deleted / f"{state_id}.json")


def delete_state(owner: OwnerStore, manifest: Path) -> None:
    """Delete a state, damaged or not: its manifest becomes a note for collections under way.

    Raises
    ------
    FileNotFoundError
        There is no such state (any more).
    OSError
        Not writable.
    """
    make_private_dir(owner.deleted)
    # Before the move, or a collection might take the note for an old one.
    os.utime(manifest)
    os.rename(manifest, owner.deleted / manifest.name)
    _remove(manifest.with_suffix(".marks.json"))
    sync_dir(owner.deleted)
    tidy(manifest.parent, manifest.parent.parent)


def pack_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Paths of all packs, and what the file system says of them."""
    try:
        parts = os.listdir(folder)
    except FileNotFoundError:
        return
    for part in parts:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder / part) as entries:
            for entry in entries:
                if entry.name.endswith(_PACK):
                    with suppress(FileNotFoundError):
                        yield entry.path, entry.stat(follow_symlinks=False)


def tidy(*folders: Path) -> None:
    """Make a removal durable, and remove the folders that it left empty."""
    for folder in folders:
        try:
            sync_dir(folder)
            folder.rmdir()
        except FileNotFoundError:
            continue  # another process tidied up first
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                return
            raise


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _remove(path: Path) -> None:
    """Remove a file, or a folder with its files; another collector may be at it too."""
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):
            for file in path.iterdir():
                file.unlink(missing_ok=True)
            path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    size = 0
    for file in path.iterdir():
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size
