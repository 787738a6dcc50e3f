"""``jupyter gpu-ckpt``: the server's saved states from a shell."""

from .main import main

__all__ = ["main"]
