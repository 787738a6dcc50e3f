"""The small files beside a kernel's states: what they tell of its work is sealed with a key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from .records import HeldNote, KernelRecord, SealedNote
from .seal import Sealing


class _OfKernel(Protocol):
    kernel_id: str


T = TypeVar("T", bound=_OfKernel)


class _Seal(msgspec.Struct):
    sealed: SealedNote | None = None


@dataclass(frozen=True)
class KernelFile(Generic[T]):
    """How records of one kind are kept: JSON that anybody can read, but for one sealed text.

    Parameters
    ----------
    record
        The struct.
    place
        What the text is, as docs/format.md has it: it cannot pass for another one.
    told
        Takes that text from a record; ``None`` where there is nothing to hide.
    telling
        Makes the record that tells a text; given ``None``, one that does not tell.
    """

    record: type[T]
    place: str
    told: Callable[[T], str | None]
    telling: Callable[[T, str | None], T]

    def encode(self, record: T, sealing: Sealing) -> bytes:
        """Make the file."""
        held = sealing.seal_note(self.told(record), self.place, record.kernel_id)
        shown = record if held.clear is not None else self.telling(record, None)
        fields = msgspec.to_builtins(shown) | {"sealed": msgspec.to_builtins(held.sealed)}
        return msgspec.json.format(msgspec.json.encode(fields)) + b"\n"

    def decode(self, data: bytes, sealing: Sealing) -> T:
        """Read the file; what cannot be read without a key, or be trusted, is not told.

        Raises
        ------
        msgspec.DecodeError, UnicodeDecodeError
            It is not such a file.
        """
        record = msgspec.json.decode(data, type=self.record)
        sealed = msgspec.json.decode(data, type=_Seal).sealed
        held = HeldNote(self.told(record) if sealed is None else None, sealed)
        return self.telling(record, sealing.open_note(held, self.place, record.kernel_id))


#: ``kernel.json``.
RECORDS: KernelFile[KernelRecord] = KernelFile(
    KernelRecord,
    "path",
    lambda record: record.path,
    lambda record, path: msgspec.structs.replace(record, path=path),
)
