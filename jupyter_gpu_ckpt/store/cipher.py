"""Authenticated encryption: a cipher for every pack and for everything that stands alone.

Each has a key of its own, derived from the user's key, a random salt, the owner and the place it
belongs to; so a nonce (the number of a blob in its pack) is never used twice with one key, and
nothing can be passed off as something else.
"""

from __future__ import annotations

import re
import secrets
import threading
from functools import cache
from pathlib import Path
from typing import Final

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from .damage import Damaged
from .keys import Key

#: Bytes of a salt. The first says which cipher, the others are random.
SALT_SIZE: Final = 16
_TAG: Final = 16
_AES_GCM, _CHACHA20 = 1, 2
_CONTEXT: Final = "jupyter-gpu-ckpt 2026-12-02 sealing v1"
# Only cryptography 47 and newer writes into memory that is there already; memory that is new each
# time makes opening six times slower.
_INTO: Final = hasattr(AESGCM, "decrypt_into")


class BlobSealer:
    """Seals the blobs of a pack with the pack's own key; the number is the nonce."""

    overhead = _TAG

    def __init__(self, key: Key, place: bytes, salt: bytes) -> None:
        self._cipher = _cipher(key, place, salt)
        self._place = place
        self._sealed: set[int] = set()
        self._lock = threading.Lock()

    def seal(self, number: int, plain: memoryview) -> bytes:
        with self._lock:
            if number in self._sealed:
                raise RuntimeError("a number was used twice in a pack")
            self._sealed.add(number)
        return self._cipher.encrypt(_nonce(number), plain, self._place)

    def open(self, number: int, sealed: memoryview, into: memoryview | None = None) -> memoryview:
        size = len(sealed) - _TAG
        try:
            if _INTO and into is not None and 0 <= size <= len(into):
                self._cipher.decrypt_into(_nonce(number), sealed, self._place, into[:size])
                return into[:size]
            return memoryview(self._cipher.decrypt(_nonce(number), sealed, self._place))
        except InvalidTag as error:
            raise Damaged("a block was altered") from error


def seal_text(key: Key, plain: bytes, place: bytes) -> bytes:
    """Seal something that stands alone: a salt, then the sealed text."""
    salt = new_salt()
    return salt + _cipher(key, place, salt).encrypt(_nonce(0), plain, place)


def open_text(key: Key, sealed: bytes, place: bytes) -> bytes:
    """Undo :func:`seal_text`.

    Raises
    ------
    Damaged
        Altered, or of another place.
    """
    salt, text = sealed[:SALT_SIZE], sealed[SALT_SIZE:]
    try:
        return _cipher(key, place, salt).decrypt(_nonce(0), text, place)
    except InvalidTag as error:
        raise Damaged("it was altered, or belongs elsewhere") from error


def new_salt() -> bytes:
    """Salt for something new, with this machine's faster cipher in it."""
    return bytes((_AES_GCM if _has_aes() else _CHACHA20,)) + secrets.token_bytes(SALT_SIZE - 1)


def _cipher(key: Key, place: bytes, salt: bytes) -> AESGCM | ChaCha20Poly1305:
    if len(salt) != SALT_SIZE:
        raise Damaged("it is cut off")
    secret = blake3(key.secret + salt + place, derive_key_context=_CONTEXT).digest()
    if salt[0] == _AES_GCM:
        return AESGCM(secret)
    if salt[0] == _CHACHA20:
        return ChaCha20Poly1305(secret)
    raise Damaged("it is sealed in an unknown way")


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


@cache
def _has_aes() -> bool:
    """Whether the CPU computes AES itself; without, ChaCha20 is faster, and safer."""
    try:
        info = Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return True
    return re.search(r"^(flags|Features)\s*:.*\baes\b", info, re.MULTILINE) is not None
