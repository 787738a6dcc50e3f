"""``kernel-capture``'s errors about GPUs in a user's words."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from ..errors import CkptError

#: GPU memory goes to host memory, or comes back.
Move = Literal["park", "unpark"]


class _Words(NamedTuple):
    reason: str
    message: str  # {said} is what kernel-capture said
    hint: str | None


_SAVE: Final = {
    "gpu_unsupported": _Words(
        "not_savable",
        "The kernel's GPU memory cannot be saved. {said} The kernel runs on.",
        "Restart the kernel without using the GPU in this way; 'jupyter gpu-ckpt doctor' says what "
        "the driver here can do.",
    ),
    "no_memory": _Words(
        "no_space",
        "To be saved, what the kernel has on the GPU has to go to this machine's memory. {said} "
        "The kernel runs on.",
        "Free GPU memory in the kernel, end other kernels, or ask for a larger memory limit.",
    ),
    "gpu_busy": _Words(
        "busy",
        "What the kernel has running on the GPU did not end in time, so it was not saved. "
        "The kernel runs on.",
        "Save again when the cell has ended, or raise GpuCkpt.gpu_timeout.",
    ),
    "gpu_full": _Words(
        "dump_failed",
        "The GPU has no room any more for the kernel's memory. {said}",
        "Restore a saved state of the kernel when the GPU has room.",
    ),
    "gpu_failed": _Words(
        "dump_failed",
        "The NVIDIA driver could not give the kernel's GPU memory to be saved. That was undone, "
        "and the kernel runs on.",
        "Try again; see also 'nvidia-smi' and the system's log (dmesg).",
    ),
    "gpu_stuck": _Words(
        "dump_failed",
        "The kernel could not be saved, and did not get its GPU back: what it does on the GPU "
        "waits or fails.",
        "Restore its last saved state, or restart it.",
    ),
}

_RESTORE: Final = {
    "gpu_unsupported": _Words(
        "not_restorable",
        "The kernel's GPU memory cannot be restored here. {said}",
        "The state is kept: restore it on a node like the one it was saved on.",
    ),
    "no_memory": _Words(
        "not_restorable",
        "This machine has no memory for what the kernel has on the GPU. {said} The state is kept.",
        "End other kernels, or ask for a larger memory limit.",
    ),
    "gpu_full": _Words(
        "not_restorable",
        "The GPU has no room for the kernel's memory. The state is kept.",
        "End other kernels that use the GPU, then restore.",
    ),
}
_RESTORE_FAILED: Final = _Words(
    "restore_failed",
    "The NVIDIA driver could not restore the kernel's GPU memory. The state is kept.",
    "Try again; see also 'nvidia-smi' and the system's log (dmesg).",
)


def gpu_error(reason: str, said: str, details: str | None, *, save: bool) -> CkptError | None:
    """What a GPU stood in the way of; ``None`` where it is none of these reasons.

    Parameters
    ----------
    reason
        Of the ``error`` event, or of ``problem`` in ``done``.
    said
        Its message.
    details
        The error's details.
    save
        Whether it was a save that failed, or a restore.
    """
    words = _SAVE.get(reason)
    if words is None:
        return None
    if not save:
        words = _RESTORE.get(reason, _RESTORE_FAILED)
    message = words.message.format(said=said).strip()
    return CkptError(words.reason, message, hint=words.hint, details=details)


_MOVE: Final = {
    "gpu_unsupported": _Words(
        "not_savable",
        "The kernel's GPU memory cannot be moved. {said}",
        "'jupyter gpu-ckpt doctor' says what the driver here can do.",
    ),
    "no_memory": _Words(
        "no_space",
        "This machine has no memory for what the kernel has on the GPU. {said}",
        "Free GPU memory in the kernel, end other kernels, or ask for a larger memory limit.",
    ),
    "gpu_busy": _Words(
        "busy",
        "What the kernel has running on the GPU did not end in time.",
        "Try again when it has ended, or raise GpuCkpt.gpu_timeout.",
    ),
    "gpu_full": _Words(
        "no_space",
        "The GPU has no room for the kernel's memory.",
        "Park or end other kernels that use the GPU.",
    ),
    "timeout": _Words("timeout", "It took too long to move the kernel's GPU memory.", None),
    "cancelled": _Words("cancelled", "It was cancelled.", None),
    "no_process": _Words("cancelled", "The kernel ended meanwhile.", None),
}
_STUCK: Final = _Words(
    "internal",
    "The NVIDIA driver left the kernel without its GPU: what it does there waits or fails.",
    "Restore its last saved state, or restart it.",
)


def move_error(what: Move, event: dict[str, Any]) -> CkptError:
    """What an ``error`` event of ``park`` or ``unpark`` means.

    Reasons: ``not_savable`` (the driver cannot do it), ``no_space`` (of host memory for a park, on
    the GPU for an unpark), ``busy`` (work on the GPU did not end), ``timeout``, ``cancelled``,
    ``internal``, and ``dump_failed`` or ``restore_failed`` where the driver failed.
    """
    reason = str(event.get("reason") or "internal")
    said = str(event.get("message") or "")
    stays = "The kernel runs on." if what == "park" else "The kernel stays parked."
    words = _MOVE.get(reason)
    if reason == "gpu_stuck":
        words, stays = _STUCK, ""
    elif reason == "no_process":
        stays = ""
    if words is None:
        words = _Words(
            "dump_failed" if what == "park" else "restore_failed",
            "The NVIDIA driver could not move the kernel's GPU memory.",
            "Try again; see also 'nvidia-smi' and the system's log (dmesg).",
        )
    message = " ".join(f"{words.message.format(said=said)} {stays}".split())
    return CkptError(words.reason, message, hint=words.hint, details=said or None)
