"""A key for each user, derived from one that only the hub has."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from blake3 import blake3

from ..store.keys import KEY_SIZE, KeyFile, KeyRing

#: The environment variable of a server that holds its user's key; kernels do not inherit it.
VARIABLE: Final = "JUPYTER_GPU_CKPT_KEY"
_CONTEXT: Final = "jupyter-gpu-ckpt 2026-12-02 user key v1"


def user_key(master: Path, user: str) -> str:
    """A user's key in hex digits, always the same for the same master key and name.

    Raises
    ------
    CkptError
        ``key_missing``: the file cannot be read, or others can read it. ``wrong_key``: it holds no
        key.
    """
    key = KeyRing(KeyFile(master)).current()
    assert key is not None
    secret = blake3(key.secret, derive_key_context=_CONTEXT).digest(length=KEY_SIZE)
    return blake3(user.encode(), key=secret).hexdigest(length=KEY_SIZE)
