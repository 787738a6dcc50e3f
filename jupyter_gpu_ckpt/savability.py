"""Why a kernel that is about to be launched could not be saved; it is then a stock one."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from .capture.native import find_kernel_capture
from .errors import CkptError
from .store import make_private_dir

#: What a launch may ask of the supervisor; anything else (a pipe for stdout, say) is Popen's.
_SUPPORTED: Final = frozenset(
    {"env", "cwd", "independent", "extra_arguments", "transport_encryption"}
)


def why_not(
    km: Any, arguments: Collection[str], *, kernel_capture: str | None, logs: Path
) -> CkptError | None:
    """Why the kernel could not be saved, ``not_savable``; ``None``: it could.

    Called by the provisioner before each launch. Whatever is amiss here, the kernel runs.

    Parameters
    ----------
    km
        The kernel's manager, or ``None``.
    arguments
        Names of the launch's arguments.
    kernel_capture
        The configured program.
    logs
        The folder for kernels' logs; made if it is missing.
    """
    message, hint = None, None
    if sys.platform != "linux":
        message = "Kernels can be saved on Linux only."
    elif km is None or km.transport != "tcp":
        message = "Kernels that talk over ipc sockets cannot be saved."
        hint = "Leave KernelManager.transport at 'tcp'."
    elif set(arguments) - _SUPPORTED:
        message = "The kernel was launched with pipes or options of its launcher."
    elif find_kernel_capture(kernel_capture) is None:
        message = "The kernel-capture program is not installed."
        hint = "Install the Linux wheel, or set GpuCkptProvisioner.kernel_capture."
    elif not _can_be_written(logs):
        message = f"The folder for kernels' logs cannot be written: {logs}."
        hint = "Check its permissions, or set GpuCkptProvisioner.log_dir; then restart the kernel."
    return None if message is None else CkptError("not_savable", message, hint=hint)


def _can_be_written(folder: Path) -> bool:
    try:
        make_private_dir(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
