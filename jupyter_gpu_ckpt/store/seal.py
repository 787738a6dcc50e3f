"""How what is stored is sealed: packs and manifests, with an owner's keys or with none."""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
from blake3 import blake3

from ..errors import CkptError
from .cipher import BlobSealer, new_salt, open_text, seal_text
from .damage import Damaged
from .keys import KeyRing
from .records import HeldNote, SealedNote

_PACK_ID: Final = re.compile(rb"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}-[0-9]{4,}")


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

    def open(self, number: int, sealed: memoryview, into: memoryview | None = None) -> memoryview:
        """Undo :meth:`seal`; the result may lie in `into`, which has room for it.

        Raises
        ------
        Damaged
            Altered.
        """


class Sealing(Protocol):
    """An owner's keys."""

    @property
    def key_id(self) -> str | None:
        """Id of the key for new states; ``None`` when nothing is encrypted.

        Raises
        ------
        CkptError
            ``key_missing``, ``wrong_key``: nothing can be saved.
        """

    def new_salt(self) -> bytes:
        """Salt for a new pack, 16 bytes."""

    def sealer(self, pack_id: str, salt: bytes, key_id: str | None) -> Sealer:
        """Make what seals one pack's blobs.

        Raises
        ------
        CkptError
            ``key_missing``, ``wrong_key``.
        """

    def seal_manifest(self, body: bytes, context: bytes) -> bytes:
        """Make a manifest's file of its body; `context` says where it belongs.

        Raises
        ------
        CkptError
            ``key_missing``, ``wrong_key``.
        """

    def open_manifest(self, data: bytes, context: bytes) -> bytes:
        """Undo :meth:`seal_manifest`.

        Raises
        ------
        Damaged
            Altered, cut off or of another place.
        CkptError
            ``key_missing``, ``wrong_key``; ``not_restorable`` for one that is not encrypted
            though it should be.
        """

    def seal_note(self, note: str | None, what: str, kernel_id: str) -> HeldNote:
        """What a kernel's file holds of such a text; never in the clear with a key."""

    def open_note(self, held: HeldNote, what: str, kernel_id: str) -> str | None:
        """Undo :meth:`seal_note`; ``None`` for what cannot be read, or be trusted."""


class _NullSealer:
    """Leaves blobs as they are: their names tell an altered one."""

    overhead = 0

    def seal(self, number: int, plain: memoryview) -> memoryview:
        return plain

    def open(self, number: int, sealed: memoryview, into: memoryview | None = None) -> memoryview:
        return sealed


class _Envelope(msgspec.Struct):
    blake3: str
    body: msgspec.Raw


class _Packs(msgspec.Struct):
    packs: dict[str, int]


class _MaybePacks(msgspec.Struct):
    packs: dict[str, int] = {}


class _PlainRefs(msgspec.Struct):
    body: _Packs


class _Format(msgspec.Struct):
    format: int


class _PlainFormat(msgspec.Struct):
    body: _Format


#: What the file of a sealed manifest begins with.
SEALED = b'{"key":'


class _Sealed(msgspec.Struct, kw_only=True):
    """A sealed manifest: the packs it needs stay legible, so that anybody can collect garbage."""

    key: str
    packs: msgspec.Raw
    sealed: str


class _SealedRefs(_Packs):
    key: str


class NullSealing:
    """No key: nothing is encrypted, manifests carry a keyed checksum."""

    key_id: str | None = None

    def __init__(self, manifest_key: bytes) -> None:
        self._key = manifest_key

    def new_salt(self) -> bytes:
        """See :class:`Sealing`."""
        return new_salt()

    def sealer(self, pack_id: str, salt: bytes, key_id: str | None) -> Sealer:
        """See :class:`Sealing`."""
        if key_id is not None:
            raise no_key()
        return _NullSealer()

    def seal_manifest(self, body: bytes, context: bytes) -> bytes:
        """See :class:`Sealing`."""
        envelope = _Envelope(blake3=self._digest(body, context), body=msgspec.Raw(body))
        return msgspec.json.encode(envelope) + b"\n"

    def open_manifest(self, data: bytes, context: bytes) -> bytes:
        """See :class:`Sealing`."""
        if sealed_with(data) is not None:
            raise no_key()
        envelope = _envelope(data)
        body = bytes(envelope.body)
        if not hmac.compare_digest(self._digest(body, context).encode(), envelope.blake3.encode()):
            raise Damaged("its manifest does not match its checksum")
        return body

    def seal_note(self, note: str | None, what: str, kernel_id: str) -> HeldNote:
        """See :class:`Sealing`."""
        return HeldNote(note, None)

    def open_note(self, held: HeldNote, what: str, kernel_id: str) -> str | None:
        """See :class:`Sealing`."""
        return held.clear if held.sealed is None else None

    def _digest(self, body: bytes, context: bytes) -> str:
        return blake3(context + b"\0" + body, key=self._key).hexdigest()


class LockedSealing(NullSealing):
    """No key is set, though this store holds encrypted states: nothing is saved in the clear."""

    @property
    def key_id(self) -> str | None:  # type: ignore[override]
        """See :class:`Sealing`."""
        raise no_key()

    def seal_manifest(self, body: bytes, context: bytes) -> bytes:
        """See :class:`Sealing`."""
        raise no_key()

    def seal_note(self, note: str | None, what: str, kernel_id: str) -> HeldNote:
        """See :class:`Sealing`."""
        return HeldNote(None, None)


class KeySealing:
    """Encrypts with the user's key, and reads what is encrypted with any key of the ring.

    Parameters
    ----------
    ring
        The keys.
    owner
        The owner's folder name.
    plain
        What reads and writes manifests that are not encrypted.
    known
        Digests of the manifests that were there, in the clear, before there was a key; ``None``
        as long as nothing was saved with one.
    """

    def __init__(
        self,
        ring: KeyRing,
        owner: str,
        plain: NullSealing,
        known: Callable[[], frozenset[bytes] | None],
    ) -> None:
        self._ring = ring
        self._owner = owner.encode()
        self._plain = plain
        self._known = known

    @property
    def key_id(self) -> str | None:
        """See :class:`Sealing`."""
        key = self._ring.current()
        return key.id if key else None

    def new_salt(self) -> bytes:
        """See :class:`Sealing`."""
        return new_salt()

    def sealer(self, pack_id: str, salt: bytes, key_id: str | None) -> Sealer:
        """See :class:`Sealing`."""
        if key_id is None:
            return _NullSealer()
        return BlobSealer(
            self._ring.find(key_id), self._owner + b"\0pack\0" + pack_id.encode(), salt
        )

    def seal_manifest(self, body: bytes, context: bytes) -> bytes:
        """See :class:`Sealing`."""
        key = self._ring.current()
        if key is None:
            return self._plain.seal_manifest(body, context)
        packs = msgspec.json.encode(msgspec.json.decode(body, type=_MaybePacks).packs)
        sealed = seal_text(key, body, self._place(context, packs))
        envelope = _Sealed(
            key=key.id, packs=msgspec.Raw(packs), sealed=base64.b64encode(sealed).decode()
        )
        return msgspec.json.encode(envelope) + b"\n"

    def open_manifest(self, data: bytes, context: bytes) -> bytes:
        """See :class:`Sealing`."""
        if sealed_with(data) is None:
            body = self._plain.open_manifest(data, context)
            self._check_known(data)
            return body
        try:
            envelope = msgspec.json.decode(data, type=_Sealed)
            sealed = base64.b64decode(envelope.sealed, validate=True)
        except (msgspec.DecodeError, ValueError) as error:
            raise Damaged("its manifest is cut off or unreadable") from error
        key = self._ring.find(envelope.key)
        return open_text(key, sealed, self._place(context, bytes(envelope.packs)))

    def seal_note(self, note: str | None, what: str, kernel_id: str) -> HeldNote:
        """See :class:`Sealing`."""
        if note is None or not self._ring.encrypts:
            return HeldNote(note, None)
        try:
            key = self._ring.current()
        except CkptError:
            key = None
        if key is None:
            return HeldNote(None, None)  # leases are kept up meanwhile
        text = note.encode("utf-8", "surrogatepass")
        sealed = seal_text(key, text, self._place_of_note(what, kernel_id))
        return HeldNote(None, SealedNote(key.id, base64.b64encode(sealed).decode()))

    def open_note(self, held: HeldNote, what: str, kernel_id: str) -> str | None:
        """See :class:`Sealing`."""
        if held.sealed is None:
            return None if self._ring.encrypts else held.clear
        try:
            text = base64.b64decode(held.sealed.text, validate=True)
            key = self._ring.find(held.sealed.key)
            opened = open_text(key, text, self._place_of_note(what, kernel_id))
            return opened.decode("utf-8", "surrogatepass")
        except (CkptError, Damaged, ValueError):
            return None

    def _place_of_note(self, what: str, kernel_id: str) -> bytes:
        return b"\0".join((self._owner, what.encode(), kernel_id.encode()))

    def _place(self, context: bytes, packs: bytes) -> bytes:
        return b"\0".join((self._owner, b"manifest", context, packs))

    def _check_known(self, data: bytes) -> None:
        """Let pass what was there before the key: who has no key can write such a manifest."""
        if not self._ring.encrypts:
            return
        self._ring.current()  # Without it what is known cannot be looked up.
        known = self._known()
        if self._ring.read_unsealed and (known is None or manifest_digest(data) in known):
            return
        raise CkptError(
            "not_restorable",
            "This state is not encrypted, and not one of those that were saved before a key was "
            "set; so anybody may have written it.",
            hint="Only if you know that you saved it: restore it with a server that has "
            "no key set (c.GpuCkpt.key_file, key_env, key_command).",
        )


def manifest_packs(data: bytes) -> set[str]:
    """Ids of the packs that a manifest needs, without any key.

    Of a damaged one, whatever looks like such an id: too many are better than too few.
    """
    try:
        if sealed_with(data) is not None:
            return set(msgspec.json.decode(data, type=_SealedRefs).packs)
        return set(msgspec.json.decode(data, type=_PlainRefs).body.packs)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {match.decode() for match in _PACK_ID.findall(data)}


def plain_body(data: bytes) -> bytes:
    """Body of what is not encrypted, unchecked.

    Raises
    ------
    Damaged
        There is none.
    """
    return bytes(_envelope(data).body)


def _envelope(data: bytes) -> _Envelope:
    try:
        return msgspec.json.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged("its manifest is cut off or unreadable") from error


def manifest_format(data: bytes) -> int | None:
    """Format of a manifest that is not encrypted; ``None`` where it does not say."""
    try:
        return msgspec.json.decode(data, type=_PlainFormat).body.format
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def sealed_with(data: bytes) -> str | None:
    """Id of the key that a manifest says it is sealed with; ``None`` if it is not sealed."""
    if not data.startswith(SEALED):
        return None
    try:
        return msgspec.json.decode(data, type=_Sealed).key
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def manifest_digest(data: bytes) -> bytes:
    """What identifies a manifest's file."""
    return blake3(data).digest()


def no_key() -> CkptError:
    """Build the error for something encrypted where no key is set."""
    return CkptError(
        "key_missing",
        "This is encrypted, and no key is set on this server.",
        hint="Set c.GpuCkpt.key_file (or key_env, key_command) to the key it was saved with.",
    )
