"""What the REST API, the events and the CLI's ``--json`` say: one struct a resource.

Field names are the JSON names. Times are ISO 8601 in UTC, sizes are bytes,
durations are seconds, progress runs from 0 to 1.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from .outside import Outside
from .parked import Parked
from .saved_gpus import SavedGpus

OperationStatus = Literal["pending", "running", "done", "failed", "cancelled"]
OperationKind = Literal["save", "restore", "verify", "park", "unpark"]
RestoreMode = Literal["rollback", "new"]
ContentsKind = Literal["anon", "python", "libraries", "shared", "gpu", "files", "other"]
Phase = Literal[
    "waiting", "checking", "dumping", "gpu", "storing", "reading", "restoring", "connecting",
    "verifying", "moving", "finished",
]  # fmt: skip

#: The kinds in a reader's words.
CONTENTS_WORDS: Final[dict[ContentsKind, str]] = {
    "anon": "anonymous memory",
    "python": "Python heap",
    "libraries": "shared libraries",
    "shared": "shared memory",
    "gpu": "GPU memory",
    "files": "files",
    "other": "other",
}


class ErrorBody(msgspec.Struct, frozen=True):
    """Why something failed; see :class:`jupyter_gpu_ckpt.errors.CkptError`."""

    message: str
    reason: str
    hint: str | None = None
    details: str | None = None


class Difference(msgspec.Struct, frozen=True):
    """One thing that differs between a state and this node.

    ``blocking`` means the state cannot be restored here because of it; where ``mode`` is given,
    it stands in the way of that mode only.
    """

    what: str
    message: str
    blocking: bool
    saved: str | None = None
    here: str | None = None
    mode: RestoreMode | None = None


class Node(msgspec.Struct, frozen=True):
    """The machine or pod a state was captured on."""

    id: str
    hostname: str
    kernel_release: str
    cpu: str
    criu: str | None
    gpus: list[str] = []


class State(msgspec.Struct, frozen=True):
    """One saved state.

    ``size`` is what it holds, ``stored_size`` what it added to the store when it was saved, and
    ``cost`` what deleting it now would free: pages that later states share stay. ``durable`` is
    false while it is on this node's disk only. ``verified`` is when a check last found it whole,
    ``damage`` what is wrong with it, if that is known.

    ``modes`` are the ways in which it can be restored on this node, ``restorable`` says whether
    there is one; both are ``None`` where that was not checked (lists). ``outside`` is ``None``
    where it is not known, ``gpu`` where the kernel had nothing on a GPU.
    """

    id: str
    kernel_id: str
    kernel_name: str
    display_name: str
    path: str | None
    created: str
    reason: str
    label: str | None
    node: Node
    size: int
    stored_size: int
    frozen_seconds: float
    execution_count: int | None
    execution_state: str
    restorable: bool | None = None
    modes: list[RestoreMode] | None = None
    differences: list[Difference] = []
    warnings: list[str] = []
    parent: str | None = None
    cost: int | None = None
    pinned: bool = False
    durable: bool = True
    encrypted: bool = False
    verified: str | None = None
    damage: str | None = None
    outside: Outside | None = None
    gpu: SavedGpus | None = None


class ContentsSum(msgspec.Struct):
    """All of one kind in a state; see :class:`Contents`."""

    kind: ContentsKind
    size: int = 0
    new: int = 0


class ContentsItem(msgspec.Struct):
    """A mapping of a process, a shared memory or a file in a state.

    ``pid`` and ``start`` (the address, hexadecimal) are ``None`` for what is no mapping, and
    ``start`` where mappings of one name are put together.
    """

    kind: ContentsKind
    name: str
    pid: int | None = None
    start: str | None = None
    size: int = 0
    new: int = 0


class Contents(msgspec.Struct):
    """What is in a state.

    ``new`` are the bytes that were stored for it, because the state before it (``parent``) did
    not have them. ``items`` are the largest ones, ``left_out`` is how many more there are.
    """

    size: int
    new: int
    parent: str | None
    kinds: list[ContentsSum]
    items: list[ContentsItem]
    left_out: int = 0


class LostPart(msgspec.Struct):
    """A range of a file, in bytes."""

    offset: int
    length: int


class LostFile(msgspec.Struct):
    """A file of a state that cannot be read back whole.

    More than 16 ranges are not listed: ``size`` is the sum of all.
    """

    path: str
    size: int
    ranges: list[LostPart]
    why: str


class Verification(msgspec.Struct):
    """What a check of a state found.

    ``size`` are the bytes that were checked. Of a damaged state ``files`` says what is lost in the
    store's terms, ``items`` what that was in the kernel (``size`` is what is lost of each), and
    ``older`` is the newest older state of the kernel that is whole, if there is one.
    """

    intact: bool
    size: int
    lost: int = 0
    files: list[LostFile] = []
    items: list[ContentsItem] = []
    older: str | None = None


class OperationResult(msgspec.Struct, frozen=True):
    """What a finished operation achieved; of ``park`` and ``unpark`` ``state_id`` is empty."""

    state_id: str
    kernel_id: str
    seconds: float
    size: int
    frozen_seconds: float | None = None
    warnings: list[str] = []
    verification: Verification | None = None


class Operation(msgspec.Struct):
    """A long operation on one kernel.

    ``cause`` is why: ``user``; for saves the policy (``idle``, ``interval``, ``long_cell``,
    ``shutdown``, ``preemption``, ``cull``, ``hibernate``); for restores ``death``, ``lost`` or
    ``wake``; for a park ``idle`` or ``room`` (another needs it), for an unpark ``execute``.

    ``phases`` says how many seconds after ``started`` each phase began that it has come to.
    """

    id: str
    kind: OperationKind
    kernel_id: str
    path: str | None
    state_id: str | None
    status: OperationStatus
    phase: Phase
    progress: float
    started: str
    cause: str
    finished: str | None = None
    result: OperationResult | None = None
    error: ErrorBody | None = None
    phases: dict[str, float] = {}


class RestoredFrom(msgspec.Struct, frozen=True):
    """The state that a running kernel came out of; ``restored`` is when.

    Cells were counted up to ``execution_count`` when it was saved, the one that ran then included
    (``in_flight_msg_id``), and up to ``last_execution_count`` when the kernel ended that it
    replaced, which is not always known. ``other_counts`` are cells of the notebook, by id, that had
    higher counts at the save, and so from an earlier kernel. ``warnings`` are what its user is to
    know, as that connections are closed.
    """

    state_id: str
    created: str
    restored: str
    cause: Literal["death", "user", "lost", "wake"]
    execution_count: int | None
    in_flight_msg_id: str | None
    last_execution_count: int | None = None
    other_counts: dict[str, int] = {}
    warnings: list[str] = []


class Kernel(msgspec.Struct, frozen=True):
    """A running kernel and whether it can be saved (if not: ``error`` says why).

    ``execution_state`` is Jupyter's, or ``hibernated``: ``error`` is ``restore_failed`` then where
    it did not wake. ``can_park``: this node's driver can. ``gpu_lost`` says that a GPU is lost
    which it uses.
    """

    id: str
    name: str
    display_name: str
    path: str | None
    execution_state: str
    savable: bool
    error: ErrorBody | None
    last_state: State | None
    operation: Operation | None
    restored_from: RestoredFrom | None = None
    parked: Parked | None = None
    can_park: bool = False
    gpu_lost: str | None = None


class LostKernel(msgspec.Struct, frozen=True):
    """A kernel that ended without its user's wish and has at least one state.

    ``why``: lost with its server or node, saved and then ended as the server was stopped or by its
    culler, or hibernated, so that nothing of it is lost. ``damaged`` are the ids of states that are
    newer than ``state``, and damaged. ``server``: its named server; empty for the unnamed one.
    """

    kernel_id: str
    kernel_name: str
    display_name: str
    path: str | None
    node: str
    last_seen: str
    state: State
    why: Literal["lost", "shutdown", "cull", "hibernated"] = "lost"
    damaged: list[str] = []
    server: str = ""


class EndingKernel(msgspec.Struct, frozen=True):
    """A kernel of a server that is about to end, and if it is not saved, why."""

    kernel_id: str
    path: str | None
    saved: bool
    message: str | None = None


class Ending(msgspec.Struct):
    """A notice that the server is about to end, and what was done for it.

    ``source`` is who said it, ``why`` what happens, in a user's words; ``sure`` is false where it
    may not come to that. ``kernels`` are those with something to save, and are known when ``phase``
    is not ``saving`` any more; ``not_uploaded`` are the states that only this node has, known when
    it is ``done``.
    """

    id: str
    source: str
    why: str
    sure: bool
    ends: str
    phase: Literal["saving", "uploading", "done"] = "saving"
    kernels: list[EndingKernel] = []
    not_uploaded: list[str] = []


class DoctorCheck(msgspec.Struct, frozen=True):
    """One line of ``doctor``."""

    name: str
    status: Literal["ok", "warning", "problem"]
    message: str
    hint: str | None = None


RightsRow = Literal["none", "minimal", "sys_ptrace", "sys_admin", "root"]


class Rights(msgspec.Struct, frozen=True):
    """What works with the rights that a server has: a row of the table in docs/install.md.

    ``missing`` are the capabilities that lead to the next row, and ``adds`` is what more would
    work there; null where no capability adds anything.
    """

    row: RightsRow
    works: str
    missing: list[str]
    adds: str | None


class Doctor(msgspec.Struct, frozen=True):
    """What this node can capture, and why not; ``rights`` is null where that cannot be told."""

    can_capture: bool
    version: str
    checks: list[DoctorCheck]
    rights: Rights | None = None


class AutoSavePolicy(msgspec.Struct, frozen=True):
    """When a kernel is saved automatically; seconds, 0 for never.

    ``enabled`` false leaves the kernel alone, whatever the others say.
    """

    enabled: bool
    idle: float
    interval: float
    long_cell: float
    before_shutdown: bool
    before_preemption: bool
    before_cull: bool
    hibernate: float = 0.0
    park: float = 0.0


class AutoSaveChoice(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a user changes of a policy; null: nothing."""

    enabled: bool | None = None
    idle: Annotated[float, msgspec.Meta(ge=0)] | None = None
    interval: Annotated[float, msgspec.Meta(ge=0)] | None = None
    long_cell: Annotated[float, msgspec.Meta(ge=0)] | None = None
    before_shutdown: bool | None = None
    before_preemption: bool | None = None
    before_cull: bool | None = None
    hibernate: Annotated[float, msgspec.Meta(ge=0)] | None = None
    park: Annotated[float, msgspec.Meta(ge=0)] | None = None


class AutoSaveLimits(msgspec.Struct, frozen=True):
    """What users may not do: choose less than ``shortest`` seconds, or change what is locked."""

    shortest: float
    locked: list[str]


class AutoSaves(msgspec.Struct, frozen=True):
    """A policy that counts, what was chosen for it, and within which limits."""

    policy: AutoSavePolicy
    own: AutoSaveChoice
    limits: AutoSaveLimits
