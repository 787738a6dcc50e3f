"""One owner's part of a store: its folder, format version and keys."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from ..errors import CkptError
from .layout import (
    NO_LINKS,
    check_private,
    check_safe_root,
    create_file,
    make_private_dir,
    sync_dir,
)
from .records import FORMAT

_CHUNK_CONTEXT = "jupyter-gpu-ckpt 2026-12-01 chunk names v1"
_MANIFEST_CONTEXT = "jupyter-gpu-ckpt 2026-12-01 manifest checksums v1"
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
    folder, chunks, kernels, writers
        The owner's folder and what is in it.
    chunk_key, manifest_key
        32-byte BLAKE3 keys, derived from the one in ``store.json``, so that equal
        blocks of two owners have different names and a manifest cannot pass for a chunk.
    """

    def __init__(self, folder: Path, key: bytes) -> None:
        self.folder = folder
        self.chunks = folder / "chunks"
        self.kernels = folder / "kernels"
        self.writers = folder / "writers"
        self.chunk_key = blake3(key, derive_key_context=_CHUNK_CONTEXT).digest()
        self.manifest_key = blake3(key, derive_key_context=_MANIFEST_CONTEXT).digest()

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


def open_owner(root: Path, name: str, *, create: bool) -> OwnerStore | None:
    """Open an owner's store.

    Read anew for every operation, because another server may create, move or
    clear it at any time; it is one small file.

    Parameters
    ----------
    root, name
        The store's root, and the owner's folder name in it.
    create
        Make what is missing; otherwise ``None`` is returned where there is nothing.

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
        begun = any((folder / part).exists() for part in ("chunks", "kernels"))
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
    store = OwnerStore(folder, key)
    if create:
        for part in (store.chunks, store.kernels, store.writers):
            make_private_dir(part)
    return store


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
    temporary = folder / f".store.json.{secrets.token_hex(8)}"
    try:
        create_file(temporary, data)
        # Never replaced: if another server was first, its key is the one.
        with suppress(FileExistsError):
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                create_file(path, data)
    finally:
        temporary.unlink(missing_ok=True)
    sync_dir(folder)
    final = _read_key(path)
    if final is None:
        raise CkptError("store_unavailable", f"{path} vanished as soon as it was written.")
    return final
