"""Since when a store is encrypted: ``keys/<key id>.json``, made at the first write with a key.

A manifest that is not encrypted can be written by anybody who can write to the store. So the
record holds, sealed with the key, the digests of those that were there before; others are
not restored.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from .cipher import open_text, seal_text
from .damage import Damaged
from .keys import Key, KeyRing
from .layout import create_once, make_private_dir
from .seal import manifest_digest, sealed_with

_DIGEST = 32


class _Record(msgspec.Struct, kw_only=True):
    key: str
    began: str
    sealed: str


def encrypted(folder: Path) -> bool:
    """Whether anything was ever saved with a key here."""
    return any(folder.glob("*.json"))


def begin(
    folder: Path, owner: str, ring: KeyRing, manifests: Callable[[], Iterable[bytes]]
) -> None:
    """Make the record of the current key, unless there is one.

    Parameters
    ----------
    folder, owner
        The owner's ``keys`` folder, and the owner's folder name.
    ring
        The keys.
    manifests
        Gives the content of all manifests that there are.

    Raises
    ------
    CkptError
        ``key_missing``, ``wrong_key``.
    OSError
        Not writable.
    """
    key = ring.current()
    if key is None or (folder / f"{key.id}.json").exists():
        return
    known = known_before(folder, owner, ring, manifests)
    if known is None:
        known = frozenset(manifest_digest(data) for data in manifests())
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    sealed = seal_text(key, b"".join(sorted(known)), _place(owner, began))
    record = _Record(key=key.id, began=began, sealed=base64.b64encode(sealed).decode())
    make_private_dir(folder)
    create_once(folder / f"{key.id}.json", msgspec.json.encode(record) + b"\n")


def known_before(
    folder: Path, owner: str, ring: KeyRing, manifests: Callable[[], Iterable[bytes]]
) -> frozenset[bytes] | None:
    """Digests of the manifests from before there was a key.

    The current key's record counts, else those of older keys; ``None`` as long as nothing is
    encrypted. Parameters and errors are those of :func:`begin`.
    """
    key = ring.current()
    if key is not None and (folder / f"{key.id}.json").exists():
        return _read(folder, owner, key)
    if not encrypted(folder):
        # With something encrypted there was a record, and somebody has removed it.
        tampered = any(sealed_with(data) is not None for data in manifests())
        return frozenset() if tampered else None
    return frozenset().union(*(_read(folder, owner, held) for held in ring.held()))


def _read(folder: Path, owner: str, key: Key) -> frozenset[bytes]:
    """What a record says; nothing if it is not there or was altered."""
    try:
        record = msgspec.json.decode((folder / f"{key.id}.json").read_bytes(), type=_Record)
        sealed = base64.b64decode(record.sealed, validate=True)
        digests = open_text(key, sealed, _place(owner, record.began))
    except (FileNotFoundError, msgspec.DecodeError, ValueError, Damaged):
        return frozenset()
    return frozenset(digests[at : at + _DIGEST] for at in range(0, len(digests), _DIGEST))


def _place(owner: str, began: str) -> bytes:
    return b"\0".join((owner.encode(), b"before", began.encode()))
