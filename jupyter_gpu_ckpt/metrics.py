"""Prometheus metrics, on the server's own ``/metrics``."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from .models import Operation
from .moments import read_moment

_BUCKETS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 300)

OPERATIONS: Final = Counter(
    "gpu_ckpt_operations",
    "Saves and restores that ended, by why they were made and how they ended",
    ["kind", "cause", "status", "reason"],
)
SECONDS: Final = Histogram(
    "gpu_ckpt_operation_seconds",
    "How long saves and restores that succeeded took",
    ["kind"],
    buckets=_BUCKETS,
)
FROZEN: Final = Histogram(
    "gpu_ckpt_frozen_seconds", "How long saves froze their kernels", buckets=_BUCKETS
)
BYTES: Final = Counter("gpu_ckpt_bytes", "Logical size of what was saved and restored", ["kind"])
LAST_SAVE: Final = Gauge(
    "gpu_ckpt_last_save_timestamp_seconds",
    "When a running kernel's newest state was saved, or that it came out of (Unix time)",
    ["kernel_id"],
)
RECOVERY: Final = Histogram(
    "gpu_ckpt_recovery_seconds",
    "From a kernel's death, the start of a lost one's restore, or what woke it, to serving again",
    ["cause"],
    buckets=_BUCKETS,
)
NOTICES: Final = Counter(
    "gpu_ckpt_notices", "Notices that the server ends, by who gave them", ["source"]
)
FORETOLD: Final = Counter(
    "gpu_ckpt_foretold_saves",
    "Kernels with something unsaved when the server's end was foretold, by whether they were saved",
    ["source", "saved"],
)
#: Restores that nobody asked for, or whose user waits.
_RECOVERIES: Final = ("death", "lost", "wake")


def count(operation: Operation) -> None:
    """Count an operation that has ended."""
    reason = operation.error.reason if operation.error is not None else ""
    kind = operation.kind
    OPERATIONS.labels(kind, operation.cause, operation.status, reason).inc()
    result = operation.result
    if operation.status != "done" or result is None:
        return
    SECONDS.labels(kind).observe(result.seconds)
    BYTES.labels(kind).inc(result.size)
    if result.frozen_seconds is not None:
        FROZEN.observe(result.frozen_seconds)
    if kind == "save":
        LAST_SAVE.labels(operation.kernel_id).set_to_current_time()
    elif operation.cause in _RECOVERIES:
        RECOVERY.labels(operation.cause).observe(result.seconds)


def restored(kernel_id: str, created: str) -> None:
    """A kernel came out of the state that was made at that time, ISO 8601."""
    when = read_moment(created)
    LAST_SAVE.labels(kernel_id).set(when.timestamp())


def count_foretold(source: str, saved: int, failed: int) -> None:
    """Count what came of one round of saves before an end that was foretold."""
    FORETOLD.labels(source, "true").inc(saved)
    FORETOLD.labels(source, "false").inc(failed)


def forget(kernel_id: str) -> None:
    """A kernel does not run any more."""
    if (kernel_id,) in LAST_SAVE._metrics:
        LAST_SAVE.remove(kernel_id)
