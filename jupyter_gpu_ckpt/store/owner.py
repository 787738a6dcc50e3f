"""One owner's part of a store: its folder, format version and keys."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec
from blake3 import blake3

from ..errors import CkptError
from . import key_records
from .keys import KeyRing
from .layout import check_private, check_safe_root, create_once, is_state_id, make_private_dir
from .records import FORMAT
from .seal import KeySealing, LockedSealing, NullSealing, Sealing

_MANIFEST_CONTEXT = "jupyter-gpu-ckpt 2026-12-01 manifest checksums v1"
_NAME_CONTEXT = "jupyter-gpu-ckpt 2026-12-02 blob names v2"
_FOOTER_CONTEXT = "jupyter-gpu-ckpt 2026-12-02 footer checksums v2"
_PAGE_CONTEXT = "jupyter-gpu-ckpt 2026-12-02 page hashes v2"
_KEY_CONTEXT = "jupyter-gpu-ckpt 2026-12-01 key check v1"


class _StoreFile(msgspec.Struct, kw_only=True):
    """Content of ``store.json``."""

    format: int
    key: str
    key_check: str


class _Version(msgspec.Struct):
    format: int


class OwnerStore:
    """Paths and keys below ``<root>/<owner>``.

    Attributes
    ----------
    folder, packs, kernels, writers, deleted, keys
        The owner's folder and what is in it.
    name_key, footer_key
        32-byte BLAKE3 keys, derived from the one in ``store.json``, so that equal
        blobs of two owners have different names and nothing can pass for something else.
    sealing
        Seals packs and manifests.
    """

    def __init__(self, folder: Path, key: bytes, ring: KeyRing | None = None) -> None:
        self.folder = folder
        self.packs = folder / "packs"
        self.kernels = folder / "kernels"
        self.writers = folder / "writers"
        self.deleted = folder / "deleted"
        self.keys = folder / "keys"
        self.name_key = blake3(key, derive_key_context=_NAME_CONTEXT).digest()
        self.footer_key = blake3(key, derive_key_context=_FOOTER_CONTEXT).digest()
        self.sealing = self._sealing(
            blake3(key, derive_key_context=_MANIFEST_CONTEXT).digest(), ring
        )
        self._key = key
        self._ring = ring

    @property
    def page_seed(self) -> int:
        """Seed of the hashes by which pages are compared; secret with the user's key.

        Raises
        ------
        CkptError
            ``key_missing``, ``wrong_key``.
        """
        key = self._ring.current() if self._ring else None
        secret = self._key + (key.secret if key else b"")
        digest = blake3(secret, derive_key_context=_PAGE_CONTEXT).digest(length=8)
        return int.from_bytes(digest, "little")

    def _sealing(self, manifest_key: bytes, ring: KeyRing | None) -> Sealing:
        if ring is None:
            locked = key_records.encrypted(self.keys)
            return (LockedSealing if locked else NullSealing)(manifest_key)

        @cache
        def known() -> frozenset[bytes] | None:
            return key_records.known_before(
                self.keys, self.folder.name, ring, lambda: _manifests(self)
            )

        return KeySealing(ring, self.folder.name, NullSealing(manifest_key), known)

    def manifests(self) -> Iterator[Path]:
        """Paths of all manifests."""
        for kernel in self.kernel_folders():
            yield from manifests_of(kernel / "states")

    def kernel_folders(self) -> list[Path]:
        """Folders of all kernels that have a record or a state, in order of their ids."""
        try:
            return sorted(self.kernels.iterdir())
        except FileNotFoundError:
            return []  # another server is making the store right now

    def states_of(self, kernel_id: str) -> Path:
        """Folder of a kernel's manifests."""
        return self.kernels / kernel_id / "states"

    def manifest(self, kernel_id: str, state_id: str) -> Path:
        """Path of a state's manifest."""
        return self.states_of(kernel_id) / f"{state_id}.json"


def manifests_of(folder: Path) -> Iterator[Path]:
    """Paths of the manifests in one kernel's folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if name.endswith(".json") and is_state_id(name[:-5]):
            yield folder / name


def open_owner(
    root: Path,
    name: str,
    *,
    create: bool,
    ring: KeyRing | None = None,
) -> OwnerStore | None:
    """Open an owner's store.

    Read anew for every operation, because another server may create, move or
    clear it at any time; it is one small file.

    Parameters
    ----------
    root, name
        The store's root, and the owner's folder name in it.
    create
        Make what is missing; otherwise ``None`` is returned where there is nothing.
    ring
        The owner's keys; ``None`` for no encryption.

    Raises
    ------
    CkptError
        ``store_unavailable``: unsafe folder, damaged ``store.json``, newer format.
    OSError
        Not readable, or not writable.
    """
    folder = root / name
    if create:
        make_private_dir(root)
    else:
        try:
            os.lstat(folder)
        except FileNotFoundError:
            return None
    check_safe_root(root)
    if create:
        make_private_dir(folder)
    check_private(folder)
    key = _read_key(folder / "store.json")
    if key is None:
        # Another server may be making the store right now: it writes store.json first.
        begun = any((folder / part).exists() for part in ("chunks", "packs", "kernels"))
        key = _read_key(folder / "store.json")
        if key is None and begun:
            raise CkptError(
                "store_unavailable",
                f"The state store in {folder} has lost its store.json, "
                "without which its states cannot be read.",
                hint="Put store.json back from a backup, or move the folder away to start anew.",
            )
    if key is None:
        if not create:
            return None
        key = _create_key(folder)
    store = OwnerStore(folder, key, ring)
    if create:
        # `deleted` too: where the disk is full, a state can then still be deleted.
        for part in (store.packs, store.kernels, store.writers, store.deleted):
            make_private_dir(part)
        if ring is not None and ring.encrypts:
            # Without the key nothing is encrypted either; who saves is told.
            with suppress(CkptError):
                key_records.begin(store.keys, name, ring, lambda: _manifests(store))
    return store


def _manifests(store: OwnerStore) -> Iterator[bytes]:
    for path in store.manifests():
        with suppress(FileNotFoundError):
            yield path.read_bytes()


def _read_key(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version > FORMAT:
            raise CkptError(
                "store_unavailable",
                f"The state store in {path.parent} has format {version}; "
                f"this version of jupyter-gpu-ckpt reads formats up to {FORMAT}.",
                hint="Upgrade jupyter-gpu-ckpt.",
            )
        if version < FORMAT:
            raise CkptError(
                "store_unavailable",
                f"The state store in {path.parent} was made by a development version of "
                "jupyter-gpu-ckpt; no released version reads it.",
                hint=f"Move the folder away to start anew: mv {path.parent} {path.parent}.old",
            )
        content = msgspec.json.decode(data, type=_StoreFile)
        key = bytes.fromhex(content.key)
    except (msgspec.DecodeError, ValueError) as error:
        raise _damaged(path) from error
    if len(key) != 32 or content.key_check != _key_check(key):
        raise _damaged(path)
    return key


def _damaged(path: Path) -> CkptError:
    return CkptError(
        "store_unavailable",
        f"{path} is damaged, so the states in this store cannot be read.",
        hint="Put store.json back from a backup, or move the folder away to start anew.",
    )


def _key_check(key: bytes) -> str:
    return blake3(key, derive_key_context=_KEY_CONTEXT).hexdigest(length=8)


def _create_key(folder: Path) -> bytes:
    key = secrets.token_bytes(32)
    content = _StoreFile(format=FORMAT, key=key.hex(), key_check=_key_check(key))
    data = msgspec.json.format(msgspec.json.encode(content)) + b"\n"
    path = folder / "store.json"
    # If another server was first, its key is the one.
    create_once(path, data)
    final = _read_key(path)
    if final is None:
        raise CkptError(
            "store_unavailable",
            f"{path} vanished as soon as it was written.",
            hint="Something removes files there: choose another place for the store.",
        )
    return final
