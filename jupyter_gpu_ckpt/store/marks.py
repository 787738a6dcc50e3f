"""What users and checks note on a state after it was saved: ``<state id>.marks.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ..errors import CkptError
from .damage import Damaged
from .layout import is_of_one_file, put_file
from .owner import OwnerStore
from .seal import SEALED, Sealing, plain_body, sealed_with


class Marks(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Notes on a state.

    Parameters
    ----------
    pinned
        Whether it is never removed but by a user.
    label
        Its label, unset for the one that it was saved with.
    verified
        When all of it was last read and found intact, ISO 8601.
    damage
        What a check found lost, in a line.
    """

    pinned: bool = False
    label: str | UnsetType | None = UNSET
    verified: str | None = None
    damage: str | None = None

    def label_of(self, saved: str | None) -> str | None:
        """The label of a state that was saved with `saved`."""
        return saved if isinstance(self.label, UnsetType) else self.label


def marks_path(manifest: Path) -> Path:
    """Where the marks of a state are, beside its manifest."""
    return manifest.with_suffix(".marks.json")


def read_marks(owner: OwnerStore, manifest: Path) -> Marks:
    """Read a state's marks; what cannot be read counts as a pin, so that nothing is lost by it.

    Raises
    ------
    OSError
        The store is not readable.
    """
    try:
        data = marks_path(manifest).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Marks()
    except OSError as error:
        if not is_of_one_file(error):
            raise
        return Marks(pinned=True)
    try:
        if sealed_with(data) is None:
            if _is_sealed(manifest):
                return Marks(pinned=True)  # anybody may have written them
            # From before there was a key, perhaps. Nothing is entrusted to marks.
            body = plain_body(data)
        else:
            body = owner.sealing.open_manifest(data, _context(manifest))
        return msgspec.json.decode(body, type=Marks)
    except (Damaged, CkptError, msgspec.DecodeError):
        return Marks(pinned=True)


def _is_sealed(manifest: Path) -> bool:
    try:
        with manifest.open("rb") as file:
            return file.read(len(SEALED)) == SEALED
    except (FileNotFoundError, IsADirectoryError):
        return False  # deleted meanwhile, or there was never one


def encode_marks(sealing: Sealing, manifest: Path, marks: Marks) -> bytes:
    """Make a marks file.

    Raises
    ------
    CkptError
        ``key_missing``, ``wrong_key``.
    """
    return sealing.seal_manifest(msgspec.json.encode(marks), _context(manifest))


def put_marks(owner: OwnerStore, manifest: Path, data: bytes) -> None:
    """Write a marks file, whole or not at all.

    Raises
    ------
    FileNotFoundError
        The state is gone.
    OSError
        Not writable.
    """
    manifest.stat()
    path = marks_path(manifest)
    put_file(owner.writers, path, data)
    if not manifest.exists():
        path.unlink(missing_ok=True)
        manifest.stat()


def changed(marks: Marks, **changes: Any) -> Marks:
    """Return these marks with some of them changed; :data:`msgspec.UNSET` changes nothing."""
    wanted = {name: value for name, value in changes.items() if value is not UNSET}
    return msgspec.structs.replace(marks, **wanted)


def _context(manifest: Path) -> bytes:
    return f"{manifest.parent.parent.name}/{manifest.stem}/marks".encode()
