"""What stands in the way of a save or a restore, found before anything is touched."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Sequence
from typing import Final

from ..errors import CkptError
from ..gpus.fit import Fit
from ..models import Difference
from . import procfs
from .images import MappedFile
from .node import NodeInfo, differences
from .protocol import Probe
from .sockets import is_local
from .wording import listed

_NVIDIA: Final = "/dev/nvidia"
_OTHER_GPU: Final = re.compile(r"/dev/(dri/|kfd$)")
_UNSAVABLE: Final = {
    "anon_inode:[io_uring]": "io_uring (an asynchronous file or network library)",
    "anon_inode:[perf_event]": "a performance counter (a profiler)",
    "anon_inode:[userfaultfd]": "userfaultfd",
    "anon_inode:[fanotify]": "fanotify",
    "anon_inode:kvm-vm": "a virtual machine (KVM)",
    "anon_inode:bpf-prog": "a BPF program",
}


def check_save(pid: int, probe: Probe) -> None:
    """Raise what would make a save fail; called by the keeper before the kernel is frozen.

    Parameters
    ----------
    pid
        The kernel's process id.
    probe
        From :meth:`.native.KernelCapture.probe`.

    Raises
    ------
    CkptError
        ``cannot_capture`` when this node cannot capture at all, ``not_savable`` when the
        kernel holds something that cannot be saved.
    """
    check_node(probe)
    tree = procfs.tree(pid)
    if not tree:
        raise CkptError("not_savable", "The kernel has ended.", hint="Start it again.")
    for member in tree:
        status = procfs.status(member)
        _check_process(member, status, probe)
        _check_namespaces(member, pid, status)


def check_node(probe: Probe) -> None:
    """Raise ``cannot_capture`` with the first problem of the node, if it has one."""
    if probe.can_capture:
        return
    for problem in probe.problems:
        raise CkptError(
            "cannot_capture",
            problem.message,
            hint=problem.hint,
            details="\n".join(other.message for other in probe.problems[1:]) or None,
        )
    raise CkptError(
        "cannot_capture",
        "Kernels cannot be saved on this node.",
        hint="'jupyter gpu-ckpt doctor' says what it lacks.",
    )


def check_restore(
    *,
    probe: Probe,
    saved: NodeInfo,
    here: NodeInfo,
    mapped_files: Sequence[MappedFile],
    open_files: Sequence[str] = (),
    pids: Sequence[int] = (),
    listeners: Sequence[tuple[str, int]] = (),
    ending: Collection[int] = (),
    gpus: Fit | None = None,
) -> list[Difference]:
    """What a restore would meet here; called before every restore and to show a state.

    Parameters
    ----------
    probe
        From :meth:`.native.KernelCapture.probe`.
    saved, here
        The state's node and this one.
    mapped_files
        From the state's manifest.
    open_files
        Paths of other files that the kernel had open, from the manifest too.
    pids
        Every PID and TID that the state needs.
    listeners
        Addresses and TCP ports that the state listens on, from :func:`.images.inet_listeners`.
    ending
        Processes that will have ended by then: the kernel that is rolled back, with its
        descendants. Their PIDs, ports and GPU memory count as free.
    gpus
        How the state's GPU memory fits here.

    Returns
    -------
    list of Difference
        Blocking ones first. Those of process numbers and ports concern a kernel in the place of
        its original only: beside it, it has its own.

    Raises
    ------
    CkptError
        ``cannot_capture`` when this node cannot restore at all.
    """
    check_node(probe)
    found = differences(saved, here, mapped_files)
    found += gpus.differences if gpus is not None else []
    mapped = {file.path for file in mapped_files}
    found += _missing_files([path for path in open_files if path not in mapped])
    if not (probe.pid_namespaces and probe.can_set_pid):
        found += _taken_pids(pids, ending)
        message = "This node cannot run a second kernel of a state: that needs a PID namespace."
        found.append(Difference("pid_namespace", message, True, mode="new"))
    if not ending:
        found += _taken_ports(listeners)
    return sorted(found, key=lambda difference: not difference.blocking)


def kernel_and_descendants(pid: int) -> set[int]:
    """All process and thread ids of a running tree, for ``ending`` of :func:`check_restore`."""
    found = set()
    for member in procfs.tree(pid):
        found.add(member)
        found.update(procfs.threads(member))
    return found


def _check_process(pid: int, status: dict[str, str], probe: Probe) -> None:
    name = f"{status.get('Name', 'a process')} (process {pid})"
    uids = set(status.get("Uid", "").split())
    if uids and uids != {str(os.getuid())}:
        raise CkptError(
            "not_savable",
            f"{name} was started by the kernel and runs as another user.",
            hint="End it, then save again.",
        )
    if status.get("TracerPid", "0") != "0":
        raise CkptError(
            "not_savable",
            f"A debugger or tracer is attached to {name}.",
            hint="Detach it, then save again.",
            details=f"tracer: process {status['TracerPid']}",
        )
    held = [target for _, target in procfs.descriptors(pid)]
    _check_gpus(held, name, probe)
    for target in held:
        if target in _UNSAVABLE:
            raise CkptError(
                "not_savable",
                f"The kernel uses {_UNSAVABLE[target]}, which cannot be saved.",
                hint="Close what uses it, then save again.",
                details=f"{name}: {target}",
            )


def _check_gpus(held: Sequence[str], name: str, probe: Probe) -> None:
    """What is on a GPU can be saved where the driver gives it out."""
    for target in held:
        if _OTHER_GPU.match(target):
            message = "The kernel uses a GPU for graphics, or one that is not NVIDIA's."
            hint = (
                "Only what CUDA has on NVIDIA's GPUs can be saved. Restart the kernel without it."
            )
        elif not target.startswith(_NVIDIA) or (probe.gpu is not None and probe.gpu.checkpoint):
            continue
        else:
            said = [note.message for note in probe.notes if note.reason == "gpu_unsupported"]
            why = said[0] if said else "The driver's library (libcuda.so.1) cannot be loaded here."
            message = f"The kernel uses a GPU whose memory cannot be saved here. {why}"
            hint = "Ask your administrator; 'jupyter gpu-ckpt doctor' says more."
        raise CkptError("not_savable", message, hint=hint, details=f"{name}: {target}")


def _check_namespaces(pid: int, root: int, status: dict[str, str]) -> None:
    """CRIU may dump a process in namespaces of its own, but cannot restore it.

    A child that has ended and that nobody has waited for is in none any more but its PID
    namespace, and is saved like all else.
    """
    pairs = zip(procfs.namespaces(pid), procfs.namespaces(root), strict=True)
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        raise CkptError(
            "not_savable",
            f"{status.get('Name', 'A process')} (process {pid}), which the kernel started, runs in "
            "a container or sandbox of its own, and cannot be saved.",
            hint="End it, then save again.",
        )


def _missing_files(paths: Sequence[str]) -> list[Difference]:
    found = []
    for path in paths:
        if not os.path.exists(path):
            message = f"A file that the kernel had open is missing here: {path}."
            found.append(Difference("file", f"{message} Put it back, or an empty one.", True, path))
    return found


def _taken_pids(pids: Sequence[int], ending: Collection[int]) -> list[Difference]:
    taken = [pid for pid in pids if pid not in ending and os.path.exists(f"/proc/{pid}")]
    if not taken:
        return []
    names = [f"{pid} ({procfs.status(pid).get('Name', '?')})" for pid in taken]
    message = f"Process numbers that the kernel needs are taken on this node: {listed(names)}."
    numbers = ", ".join(map(str, taken))
    return [Difference("pid", message, True, None, numbers, "rollback")]


def _taken_ports(listeners: Sequence[tuple[str, int]]) -> list[Difference]:
    found = []
    for ip, port in listeners:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        if not is_local(socket.inet_pton(family, ip)):
            message = f"The kernel listens on {ip}:{port}, an address that this node lacks."
            place = f"{ip}:{port}"
            found.append(Difference("address", message, False, place, None, "rollback"))
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As a restored listener does: connections of its last life do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ip, port))
            except OSError as error:
                message = f"The kernel's network port {ip}:{port} is not free on this node."
                place, why = f"{ip}:{port}", error.strerror
                found.append(Difference("port", message, True, place, why, "rollback"))
    return found
