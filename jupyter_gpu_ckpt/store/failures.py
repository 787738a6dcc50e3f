"""Kernels whose last save failed, and why: for who looks at the store from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Final

import msgspec

from ..moments import read_moment
from .kernel_files import KernelFile
from .layout import is_of_one_file
from .seal import Sealing

#: Name of the file beside a kernel's record.
NAME: Final = "failure.json"
#: So many kernels' failures an owner's store holds, and for so long.
MOST: Final = 50
LONGEST: Final = timedelta(days=30)
_LONGEST_TEXT: Final = 300
#: The message for who has no key.
UNTOLD: Final = "The message is encrypted, and cannot be read without the key."


class SaveFailure(msgspec.Struct, kw_only=True):
    """Why the last save of a kernel failed; gone once one succeeds.

    ``at`` is ISO 8601, UTC, and so is ``since``, the first failure after the last success;
    ``count`` says how many there were. ``cause`` is who wanted the save: ``user`` or a policy.
    """

    kernel_id: str
    at: str
    since: str
    cause: str
    reason: str
    message: str
    hint: str | None = None
    count: int = 1
    path: str | None = None
    hostname: str = ""


class _Told(msgspec.Struct, array_like=True):
    """What of a failure may name files, variables and data."""

    message: str
    hint: str | None
    path: str | None


def _told(failure: SaveFailure) -> str:
    told = _Told(failure.message, failure.hint, failure.path)
    return msgspec.json.encode(told).decode()


def _telling(failure: SaveFailure, text: str | None) -> SaveFailure:
    told = _Told(UNTOLD, None, None) if text is None else msgspec.json.decode(text, type=_Told)
    return msgspec.structs.replace(failure, **msgspec.structs.asdict(told))


_FILE: Final = KernelFile(SaveFailure, "failure", _told, _telling)


def encode(failure: SaveFailure, before: SaveFailure | None, sealing: Sealing) -> bytes:
    """Make the file of a failure, after an earlier one; long texts are cut."""
    if before is not None:
        failure = msgspec.structs.replace(failure, since=before.since, count=before.count + 1)
    failure = msgspec.structs.replace(
        failure,
        message=failure.message[:_LONGEST_TEXT],
        hint=failure.hint and failure.hint[:_LONGEST_TEXT],
    )
    return _FILE.encode(failure, sealing)


def read(path: Path, sealing: Sealing) -> SaveFailure | None:
    """Read a failure's file; ``None`` where there is none, or one that cannot be read or is old.

    Raises
    ------
    OSError
        The store is not readable.
    """
    try:
        found = _FILE.decode(path.read_bytes(), sealing)
        at = read_moment(found.at)
        old = datetime.now(timezone.utc) - at > LONGEST
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if not is_of_one_file(error):
            raise
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, TypeError):
        return None
    if old or found.kernel_id != path.parent.name:
        return None
    return found


def make_room(folders: list[Path], remove: Callable[[str], None]) -> None:
    """Have the oldest failures removed, so that there is room for one more.

    Parameters
    ----------
    folders
        Of all kernels.
    remove
        Called with the ids of kernels.
    """
    found: list[tuple[float, str]] = []
    for folder in folders:
        with suppress(OSError):
            found.append((os.stat(folder / NAME).st_mtime, folder.name))
    for _, kernel_id in sorted(found)[: max(0, len(found) - MOST + 1)]:
        remove(kernel_id)
