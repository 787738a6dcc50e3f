"""Where states live: chunks, manifests and kernel records in a folder (docs/format.md)."""

from .layout import make_private_dir
from .reader import StateReader
from .records import GcResult, KernelRecord, Lease, StateMeta, StateRecord
from .state_store import StateStore
from .writer import StateWriter

__all__ = [
    "GcResult",
    "KernelRecord",
    "Lease",
    "StateMeta",
    "StateReader",
    "StateRecord",
    "StateStore",
    "StateWriter",
    "make_private_dir",
]
