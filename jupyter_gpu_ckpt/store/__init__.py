"""Where states live: chunks, manifests and kernel records in a folder (docs/format.md)."""

from .failures import SaveFailure
from .layout import make_private_dir
from .reader import StateReader
from .records import (
    DamagedState,
    GcResult,
    KernelRecord,
    Lease,
    LostRange,
    ServerStop,
    StateMeta,
    StateRecord,
)
from .state_store import StateStore
from .tree import Layout
from .writer import StateWriter

__all__ = [
    "DamagedState",
    "GcResult",
    "KernelRecord",
    "Layout",
    "Lease",
    "LostRange",
    "SaveFailure",
    "ServerStop",
    "StateMeta",
    "StateReader",
    "StateRecord",
    "StateStore",
    "StateWriter",
    "make_private_dir",
]
