"""What is not as it was written, and how that is told."""

from __future__ import annotations

from ..errors import CkptError


class Damaged(Exception):
    """A manifest, index, pack or blob is not what was written; the message says how."""


class TooNew(Exception):
    """Something was written by a newer version; the message says which format."""


def damaged(state_id: str, why: str) -> CkptError:
    """Build the error for a state that cannot be read back whole."""
    return CkptError(
        "state_damaged",
        f"The saved state {state_id} is damaged: {why}.",
        hint="Restore an older state of this kernel; this one cannot be used.",
    )


def too_new(state_id: str, why: str) -> CkptError:
    """Build the error for a state of a later format."""
    return CkptError(
        "not_restorable",
        f"The saved state {state_id} was written by a newer version ({why}).",
        hint="Upgrade jupyter-gpu-ckpt to restore it.",
    )
