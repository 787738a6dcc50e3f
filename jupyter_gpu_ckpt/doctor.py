"""What this node can capture, and why not: the answer of ``doctor``, with or without a server."""

from __future__ import annotations

from . import __version__
from .capture.native import KernelCapture, find_kernel_capture
from .capture.protocol import Probe
from .errors import CkptError
from .models import Doctor, DoctorCheck


async def examine(kernel_capture: str | None = None) -> Doctor:
    """Examine this node.

    Called by the keeper for ``GET /doctor``, and by the command line where no server runs.

    Parameters
    ----------
    kernel_capture
        Configured path of ``kernel-capture``; ``None`` looks in the usual places.

    Returns
    -------
    Doctor
        Never fails: what stands in the way is in the checks.
    """
    path = find_kernel_capture(kernel_capture)
    if path is None:
        where = f"at {kernel_capture}" if kernel_capture else "in this installation"
        return _cannot(
            f"There is no kernel-capture program {where}.",
            "Install jupyter-gpu-ckpt from its wheel, or build it with Meson and a C compiler.",
        )
    try:
        probe = await KernelCapture(path).probe()
    except CkptError as error:
        return _cannot(error.message, error.hint)
    return from_probe(probe)


def from_probe(probe: Probe) -> Doctor:
    """Put the answer of ``kernel-capture probe`` into checks; called by the keeper too."""
    checks = [
        DoctorCheck("kernel-capture", "ok", f"Version {probe.version}."),
        DoctorCheck("Linux kernel", "ok", f"{probe.kernel}."),
    ]
    if probe.criu is not None:
        checks.append(
            DoctorCheck("CRIU", "ok", f"Version {probe.criu.version}, {probe.criu.path}.")
        )
    rights = "root" if probe.root else f"user {probe.uid}"
    held = [name for name, has in _capabilities(probe) if has]
    checks.append(
        DoctorCheck(
            "rights",
            "ok" if probe.can_capture else "warning",
            f"Runs as {rights}, with {', '.join(held) if held else 'no capability'}.",
        )
    )
    checks += [DoctorCheck(p.reason, "problem", p.message, p.hint) for p in probe.problems]
    checks += [DoctorCheck(n.reason, "warning", n.message, n.hint) for n in probe.notes]
    return Doctor(can_capture=probe.can_capture, version=__version__, checks=checks)


def _capabilities(probe: Probe) -> list[tuple[str, bool]]:
    has = probe.capabilities
    return [
        ("CHECKPOINT_RESTORE", has.checkpoint_restore),
        ("NET_ADMIN", has.net_admin),
        ("SETPCAP", has.setpcap),
        ("SYS_PTRACE", has.sys_ptrace),
        ("SYS_ADMIN", has.sys_admin),
    ]


def _cannot(message: str, hint: str | None) -> Doctor:
    check = DoctorCheck("kernel-capture", "problem", message, hint)
    return Doctor(can_capture=False, version=__version__, checks=[check])
