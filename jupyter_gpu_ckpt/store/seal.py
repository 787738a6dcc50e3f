"""Keys and what is done with them: how blobs are sealed and manifests authenticated."""

from __future__ import annotations

import hmac
from typing import Protocol

import msgspec
from blake3 import blake3

from .damage import Damaged


class Sealer(Protocol):
    """Seals the blobs of one pack; used by many threads.

    Attributes
    ----------
    overhead
        Bytes that sealing adds.
    """

    overhead: int

    def seal(self, number: int, plain: memoryview) -> bytes | memoryview:
        """Seal what is stored under a number, each used once a pack."""

    def open(self, number: int, sealed: memoryview) -> memoryview:
        """Undo :meth:`seal`.

        Raises
        ------
        Damaged
            Altered.
        """


class Sealing(Protocol):
    """An owner's keys.

    Attributes
    ----------
    key_id
        Of the key for new states; ``None`` when there is none and nothing is encrypted.
    """

    key_id: str | None

    def sealer(self, pack_id: str, salt: bytes, key_id: str | None) -> Sealer:
        """Make what seals one pack's blobs; `salt` is the pack's own 16 random bytes.

        Raises
        ------
        CkptError
            ``key_missing``.
        """

    def seal_manifest(self, body: bytes, context: bytes) -> bytes:
        """Make a manifest's file of its body; `context` says where it belongs."""

    def open_manifest(self, data: bytes, context: bytes) -> bytes:
        """Undo :meth:`seal_manifest`.

        Raises
        ------
        Damaged
            Altered, cut off or of another place.
        CkptError
            ``key_missing``, ``wrong_key``.
        """


class _NullSealer:
    """Leaves blobs as they are: their names tell an altered one."""

    overhead = 0

    def seal(self, number: int, plain: memoryview) -> memoryview:
        return plain

    def open(self, number: int, sealed: memoryview) -> memoryview:
        return sealed


class _Envelope(msgspec.Struct):
    blake3: str
    body: msgspec.Raw


class NullSealing:
    """No key: nothing is encrypted, manifests carry a keyed checksum."""

    key_id: str | None = None

    def __init__(self, manifest_key: bytes) -> None:
        self._key = manifest_key

    def sealer(self, pack_id: str, salt: bytes, key_id: str | None) -> Sealer:
        """See :class:`Sealing`."""
        return _NullSealer()

    def seal_manifest(self, body: bytes, context: bytes) -> bytes:
        """See :class:`Sealing`."""
        envelope = _Envelope(blake3=self._digest(body, context), body=msgspec.Raw(body))
        return msgspec.json.encode(envelope) + b"\n"

    def open_manifest(self, data: bytes, context: bytes) -> bytes:
        """See :class:`Sealing`."""
        try:
            envelope = msgspec.json.decode(data, type=_Envelope)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged("its manifest is cut off or unreadable") from error
        body = bytes(envelope.body)
        if not hmac.compare_digest(self._digest(body, context).encode(), envelope.blake3.encode()):
            raise Damaged("its manifest does not match its checksum")
        return body

    def _digest(self, body: bytes, context: bytes) -> str:
        return blake3(context + b"\0" + body, key=self._key).hexdigest()
