"""What the store keeps about kernels and states, without the memory itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from .layout import begun

#: Version of the on-disk format of stores, packs and indexes (docs/format.md).
FORMAT = 2
#: The newest version of a manifest that this code reads: that of states whose GPU memory is in
#: files of its own. Others are of `FORMAT`, so that older versions read them.
NEWEST_STATE = 3


class StateMeta(msgspec.Struct, kw_only=True):
    """What the keeper knows about a state when it is saved.

    The store only carries it: nested values are plain dicts, so that ``store/``
    need not know the structs of ``capture/``. Durations are seconds.
    """

    kernel_id: str
    kernel_name: str
    display_name: str
    language: str
    path: str | None = None
    reason: str = "user"
    label: str | None = None
    node: dict[str, Any] = {}
    connection: dict[str, Any] = {}
    execution_count: int | None = None
    execution_state: str = "idle"
    in_flight_msg_id: str | None = None
    other_counts: dict[str, int] = {}
    frozen_seconds: float = 0.0
    mapped_files: list[dict[str, Any]] = []
    node_local: list[dict[str, Any]] = []
    pids: list[int] = []
    cwd: str | None = None
    argv: list[str] = []
    warnings: list[str] = []
    contents: dict[str, Any] | None = None
    outside: dict[str, Any] | None = None
    gpu: dict[str, Any] | None = None


def state_format(meta: StateMeta) -> int:
    """The version of a state's manifest: the oldest that can restore it."""
    processes = (meta.gpu or {}).get("processes") or []
    return NEWEST_STATE if any(one.get("stored") for one in processes) else FORMAT


class StateRecord(msgspec.Struct, kw_only=True):
    """One durable state.

    ``created`` is ISO 8601 in UTC; ``size`` is the logical size of the image
    directory and ``stored_size`` what this state added to the store, in bytes; ``parent``
    is the id of the state whose pages it shares, which may be gone by now; ``key_id`` tells the
    key that it is encrypted with. Noted later are whether it is ``pinned``, its label, when it was
    last ``verified`` (ISO 8601), and the ``damage`` that was found then. ``durable`` is
    False for a state that only this node has, in the local tier of a remote store.
    """

    id: str
    created: str
    size: int
    stored_size: int
    meta: StateMeta
    format: int = FORMAT
    parent: str | None = None
    key_id: str | None = None
    pinned: bool = False
    verified: str | None = None
    damage: str | None = None
    durable: bool = True


class Lease(msgspec.Struct, kw_only=True):
    """Which node and server run a kernel now.

    ``server_start`` are clock ticks from the node's boot to the start of the process; ``renewed``
    is Unix seconds by the node's own clock, for people only; ``ttl`` seconds. ``machine_id``
    outlives a boot, where the machine has one.
    """

    node_id: str
    hostname: str
    boot_id: str
    server_pid: int
    server_start: float
    renewed: float
    ttl: float
    machine_id: str = ""


class ServerStop(msgspec.Struct, kw_only=True):
    """The saves before a server stopped in order.

    ``at`` is when they were over (ISO 8601, UTC), ``seconds`` how long all of them took; of
    ``kernels`` with something unsaved, ``saved`` were saved.
    """

    at: str
    seconds: float
    kernels: int
    saved: int


class KernelRecord(msgspec.Struct, kw_only=True):
    """What must be known about a kernel when its server is gone.

    ``offer`` says that the kernel was saved and then ended without its user's wish: ``shutdown``
    (the server was stopped) or ``cull``. ``autosave`` is its user's choice of when it is saved.
    A ``hibernated`` one is in its newest state, whole, and has no process. ``server`` is the name
    of its server among those of its user; empty for the only or unnamed one. ``path`` is ``None``
    where it is not known, or is sealed with a key that cannot be had. ``stop``: the last stop of
    its server with something to save.
    """

    kernel_id: str
    kernel_name: str
    display_name: str
    path: str | None = None
    lease: Lease | None = None
    dismissed: bool = False
    offer: str | None = None
    autosave: dict[str, Any] | None = None
    hibernated: bool = False
    server: str = ""
    stop: ServerStop | None = None


class SealedNote(msgspec.Struct):
    """A text in a kernel's file, sealed: id of the key, and base64 of salt and text."""

    key: str
    text: str


class HeldNote(NamedTuple):
    """A text in a kernel's file: one of the two, or neither where it is not known."""

    clear: str | None
    sealed: SealedNote | None


class GcResult(NamedTuple):
    """What a collection removed (or, dry, would remove): packs and bytes."""

    packs: int
    bytes: int


class DamagedState(NamedTuple):
    """A state of which not even the manifest can be read, why, and what to do but delete it."""

    state_id: str
    kernel_id: str
    message: str
    hint: str | None = None

    @property
    def created(self) -> str:
        """When it was begun to be saved, which its id says: ISO 8601, UTC."""
        return begun(self.state_id).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class LostRange(NamedTuple):
    """A range of a saved file that cannot be read back, in bytes, and why."""

    path: bytes
    offset: int
    length: int
    why: str


class VerifyResult(NamedTuple):
    """What a verification read, and what it found.

    ``blobs`` and ``bytes`` (as stored) were read. ``lost`` is empty for an intact state.
    ``footers`` names packs whose list of pages is damaged: nothing of the state is lost,
    but the next save stores anew what is in them.
    """

    state_id: str
    blobs: int
    bytes: int
    lost: list[LostRange]
    footers: list[str]
