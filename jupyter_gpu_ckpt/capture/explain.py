"""CRIU's and ``kernel-capture``'s errors in a user's words.

CRIU's own lines are never thrown away: they become the error's ``details``.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, NamedTuple

from ..errors import CkptError
from .gpu_words import gpu_error
from .wording import listed

Doing = Literal["save", "restore"]


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    message: str  # may use {1}, {2}: groups of the pattern
    hint: str | None
    reason: str | None = None  # None: not_savable for a save, not_restorable for a restore


def _rule(pattern: str, message: str, hint: str | None = None, reason: str | None = None) -> _Rule:
    return _Rule(re.compile(pattern), message, hint, reason)


_CLOSE_IT: Final = "Close it in the notebook and save again."

_COLLISION: Final = r"Can't link remap to (\S+): File exists"

# Tried in order on every line; the first rule that matches any line wins.
_SAVE: Final = (
    _rule(
        r"No space left on device|ENOSPC|Disk quota exceeded|EDQUOT",
        "There is not enough disk space for the saved state.",
        "Free disk space, delete old states, or ask for a larger quota.",
        "no_space",
    ),
    _rule(
        r"io_uring|send_fds failed \(-22\)",
        "The kernel uses io_uring, which cannot be saved.",
        "Close what uses it (an asynchronous file or network library), then save again.",
    ),
    _rule(
        r"/dev/nvidia|nvidia(?:ctl|-uvm)|/dev/dri/|/dev/kfd|of that type .*\(chr (?:195|226):",
        "The kernel, or a process that it started, has a GPU open in a way that cannot be saved.",
        "End that process, or restart the kernel without using the GPU.",
    ),
    _rule(
        _COLLISION,
        "A link of another save, which goes on at this moment or was interrupted, is in the way of "
        "{1}.",
        "Save again in a moment; if that fails too, remove the link_remap files of your own in "
        "/dev/shm and /tmp.",
    ),
    _rule(
        r"link_remap|Can't link remap",
        "The kernel uses a file whose name was removed while another name of it stays, and this "
        "node does not allow such a file to be saved.",
        "Close the file, then save again.",
    ),
    _rule(
        r"Can't dump ghost file (\S+) of (\d+) size|ghost file.*(?:limit|too (?:big|large))",
        "A deleted file that the kernel still has open is too large to be saved.",
        "Close the file and save again, or raise the limit (ghost_limit).",
    ),
    _rule(
        r"In-flight connection",
        "A program was just connecting to the kernel, and such a half-open connection cannot "
        "be saved.",
        "Save again in a moment.",
    ),
    _rule(
        r"in-flight socket",
        "A program was just connecting to the kernel through a Unix socket, and such a half-open "
        "connection cannot be saved.",
        "Save again in a moment.",
    ),
    _rule(
        r"half of stream unix connection\. name: (?:\(null\)|(\S+)); peer name: (?!\(null\))(\S+)",
        "The kernel is connected to a program outside of it through the Unix socket {1}.",
        "Close that connection (a database, a display, an agent) and save again.",
    ),
    _rule(
        r"Can't dump half of stream unix connection|external stream|unix.*(?:external|peer.*not)",
        "The kernel has a Unix socket connection to a program outside of it.",
        "Close that connection (a database, a display, an agent) and save again.",
    ),
    _rule(
        r"(?:External|external) pipe|Pipe.*is external|has no (?:reader|writer)",
        "The kernel is connected by a pipe to a program outside of it.",
        "End that program or close the pipe, then save again.",
    ),
    _rule(
        r"tty.*(?:peer|slave|master|session|external)|Found dangling tty|/dev/(?:pts/|tty)",
        "The kernel has a terminal of a program outside of it open.",
        "Close the terminal and save again.",
    ),
    _rule(
        r"(?:Unsupported|Unknown) (?:socket|proto|family|type)|Can't dump \d+ (?:inet )?socket",
        "The kernel has a kind of network socket open that cannot be saved.",
        _CLOSE_IT,
    ),
    _rule(
        r"(userfaultfd|perf_event|fanotify|bpf|secretmem|kvm|vfio|fuse)\b.*|"
        r"anon_inode:\[?(\w[\w-]*)\]?",
        "The kernel has something open that cannot be saved ({1}).",
        _CLOSE_IT,
    ),
    _rule(
        r"SysVIPC|doesn't live in IPC ns",
        "The kernel uses System V shared memory or semaphores, which cannot be saved.",
        "Release them, or use POSIX shared memory (multiprocessing.shared_memory).",
    ),
    _rule(
        r"pidfd pid (\d+) is not a part of process tree",
        "The kernel holds a handle (pidfd) on process {1}, which is not its own.",
        _CLOSE_IT,
    ),
    _rule(
        r"path=/(secretmem) \(deleted\)",
        "The kernel has something open that cannot be saved ({1}).",
        _CLOSE_IT,
    ),
    _rule(
        r"Can't get rlimit|Can't (?:get|dump) .*Operation not permitted",
        "A process that the kernel started runs as another user, or is protected.",
        "End processes that were started with sudo, then save again.",
    ),
    _rule(
        r"Can't dump file \d+ of that type|unsupported (?:file|mode)|Unsupported file",
        "The kernel has a file of a kind open that cannot be saved.",
        _CLOSE_IT,
    ),
    _rule(
        r"Can't lookup mount=?|Unable to look ?up mount|Can't find.*mount",
        "The kernel has a file open on a file system that this machine no longer shows at that "
        "place.",
        "Close files on removable, overlaid or private mounts, then save again.",
    ),
    _rule(
        r"[Nn]ested (?:\w+ )?namespace|namespaces? (?:is|are) not supported",
        "A process of the kernel runs in a container or sandbox of its own, which cannot be saved.",
        "End that process (a sandboxed browser, say) and save again.",
    ),
    _rule(
        r"(?:Unable to|Can't) (?:seize|interrupt|attach).*|ptrace.*Operation not permitted|"
        r"is (?:already )?(?:being )?traced",
        "A debugger or tracer is attached to a process of the kernel.",
        "Detach it and save again.",
    ),
    _rule(
        r"seccomp",
        "A process of the kernel, or this container, runs under a seccomp filter that cannot be "
        "saved.",
        "Ask your administrator to run the container with seccomp unconfined.",
        "cannot_capture",
    ),
    _rule(
        r"Operation not permitted|EPERM|CAP_\w+|not enough privileges?|Permission denied",
        "This node does not allow the kernel to be saved.",
        "Ask your administrator to run 'jupyter gpu-ckpt doctor'.",
        "cannot_capture",
    ),
)

_RESTORE: Final = (
    _rule(
        r"No space left on device|ENOSPC|Disk quota exceeded|EDQUOT",
        "There is not enough disk space to restore the state.",
        "Free disk space (also in /tmp and /dev/shm).",
        "no_space",
    ),
    _rule(
        r"Can't fork for (\d+): File exists|Pid (\d+) do(?:es)? not match|"
        r"Unable to (?:create|fork).*File exists|Unable to create a thread: -17|clone.*EEXIST|"
        r"Thread pid mismatch",
        "A process number that the kernel needs is taken on this node.",
        "Try again in a while, or restore on another node.",
        "pid_in_use",
    ),
    _rule(
        # CRIU writes some paths without the slash at the beginning.
        r"File /?(\S+) has bad size (\d+) \(expect (\d+)\)",
        "The file /{1} has changed since the save: it has {2} bytes, and had {3}.",
        "Put the old file back (an earlier version of the package, say), then restore.",
    ),
    _rule(
        r"File /?(\S+) has bad (?:build-ID|build id|checksum)|"
        r"[Bb]uild-?[Ii][Dd].*(?:mismatch|differ)",
        "A program file has changed since the save: /{1}.",
        "Install the same version of the package as when the state was saved.",
    ),
    _rule(
        r"File /?(\S+) has bad mode",
        "The permissions of /{1} have changed since the save.",
        "Put the old permissions back, then restore.",
    ),
    _rule(
        r"Can't open file /?(\S+) on restore|Can't open (?:file )?/(\S+): No such file|"
        r"Can't restore.*?/(\S+).*No such file",
        "A file that the kernel had open is missing here: /{1}.",
        "Put the file back at that place, then restore.",
    ),
    _rule(
        r"Can't bind inet socket|Can't (?:bind|listen).*Address already in use|"
        r"Cannot assign requested address",
        "A network port or address that the kernel uses is not free on this node.",
        "End the program that uses it, or restore on another node.",
    ),
    _rule(
        r"Can't bind (?:unix )?socket|bind.*unix|Can't bind id",
        "A Unix socket of the kernel could not be made again, because its folder is missing.",
        "Create the folder that the socket was in, then restore.",
    ),
    _rule(
        r"cpuinfo|CPU (?:feature|capabilit)|FPU feature|xsave|Unsupported CPU",
        "The processor here lacks features that the kernel was using.",
        "Restore on a machine with the same or a newer kind of processor.",
    ),
    _rule(
        r"Cannot allocate memory|ENOMEM|Out of memory|Can't (?:mmap|map|premap)",
        "There is not enough memory here for the kernel.",
        "End other kernels, or restore on a machine with more memory.",
    ),
    _rule(
        r"Can't restore sub-task in NS",
        "A process of the kernel ran in a container or sandbox of its own, which cannot be "
        "restored.",
        "Restore an older state, from before that process was started.",
    ),
    _rule(
        r"seccomp",
        "This container's seccomp filter does not allow a restore.",
        "Ask your administrator to run the container with seccomp unconfined.",
        "cannot_capture",
    ),
    _rule(
        r"(?:image|magic|protobuf|pb).*(?:corrupt|mismatch|doesn't match|Unexpected EOF)|"
        r"Unexpected EOF|Magic doesn't match|Can't open image",
        "The saved state is damaged.",
        "Restore an older state of this kernel.",
        "state_damaged",
    ),
    _rule(
        r"Can't lookup mount|[Nn]o mount|Can't find.*mount",
        "A file system that the kernel had files on is not mounted here.",
        "Mount it at the same place, then restore.",
    ),
    _rule(
        r"ns_last_pid|set_tid|Operation not permitted|EPERM|Permission denied|CAP_\w+",
        "This node does not allow kernels to be restored.",
        "Ask your administrator to run 'jupyter gpu-ckpt doctor'.",
        "cannot_capture",
    ),
)

# Reasons of kernel-capture itself: our reason, message for a save, for a restore, hint.
_NATIVE: Final[dict[str, tuple[str, str, str, str | None]]] = {
    "no_criu": (
        "cannot_capture",
        "Kernels cannot be saved here: there is no CRIU 4.2 or newer that can be trusted.",
        "Kernels cannot be restored here: there is no CRIU 4.2 or newer that can be trusted.",
        "Ask your administrator to install CRIU; 'jupyter gpu-ckpt doctor' says more.",
    ),
    "no_capability": (
        "cannot_capture",
        "Kernels cannot be saved here: the rights for it are missing.",
        "Kernels cannot be restored here: the rights for it are missing.",
        "Ask your administrator for the capabilities that 'jupyter gpu-ckpt doctor' names.",
    ),
    "not_yours": (
        "not_savable",
        "The kernel, or a process that it started, runs as another user.",
        "The state is of a process with other rights than yours: another user's, or from a "
        "container with other capabilities.",
        "End processes that were started with sudo, then save again.",
    ),
    "no_process": (
        "not_savable",
        "The kernel ended before it could be saved.",
        "The kernel ended while it was restored.",
        None,
    ),
    "timeout": (
        "timeout",
        "Saving took too long and was undone. The kernel runs on.",
        "Restoring took too long and was given up. The state is kept.",
        "Try again, or raise the time limit.",
    ),
    "cancelled": (
        "cancelled",
        "Saving was cancelled. The kernel runs on.",
        "Restoring was cancelled. The state is kept.",
        None,
    ),
    "no_space": (
        "no_space",
        "There is not enough disk space for the saved state. The kernel runs on.",
        "There is not enough disk space to restore the state.",
        "Free disk space or delete old states.",
    ),
}


def explain(native_error: dict[str, Any], *, doing: Doing) -> CkptError:
    """Turn an ``error`` event into the error that the user sees.

    Parameters
    ----------
    native_error
        The event: ``reason``, ``message``, ``criu_errors``, and for ``pid_in_use`` ``pids``.
        Every field may be missing or odd.
    doing
        What failed.

    Returns
    -------
    CkptError
        To be raised by the caller. ``details`` holds CRIU's own lines.
    """
    reason = str(native_error.get("reason") or "internal")
    lines = [str(line) for line in native_error.get("criu_errors") or []]
    message = str(native_error.get("message") or "")
    details = "\n".join([message, *lines]).strip() or None
    if (of_gpu := gpu_error(reason, message, details, save=doing == "save")) is not None:
        return of_gpu
    if reason == "pid_in_use":
        return _pid_in_use(native_error.get("pids"), details)
    if reason in _NATIVE:
        ours, save, restore, hint = _NATIVE[reason]
        if ours == "not_savable" and doing == "restore":
            ours = "not_restorable"
        return CkptError(ours, save if doing == "save" else restore, hint=hint, details=details)
    found = _by_rule([*lines, message], doing, details) if reason == "criu_failed" else None
    if found is not None:
        return found
    if doing == "save":
        return CkptError(
            "dump_failed",
            "The kernel could not be saved. It runs on.",
            hint="The details say what CRIU, the program that saves processes, ran into.",
            details=details,
        )
    return CkptError(
        "restore_failed",
        "The kernel could not be restored. The state is kept.",
        hint="The details say what CRIU, the program that restores processes, ran into.",
        details=details,
    )


def links_collided(error: CkptError) -> bool:
    """Whether a dump failed for a link that another dump made; it may succeed when repeated."""
    return re.search(_COLLISION, error.details or "") is not None


def _by_rule(lines: list[str], doing: Doing, details: str | None) -> CkptError | None:
    fallback = "not_savable" if doing == "save" else "not_restorable"
    for rule in _SAVE if doing == "save" else _RESTORE:
        for line in lines:
            match = rule.pattern.search(line)
            if match is None:
                continue
            groups = [group for group in match.groups() if group is not None]
            message = rule.message
            if "{" in message:
                try:
                    message = message.format("", *groups)
                except IndexError:
                    continue
            if doing == "save":
                message += " The kernel runs on."
            return CkptError(rule.reason or fallback, message, hint=rule.hint, details=details)
    return None


def _pid_in_use(pids: Any, details: str | None) -> CkptError:
    names = [
        f"{entry['pid']} ({entry['comm']})" if entry.get("comm") else str(entry["pid"])
        for entry in pids or []
        if isinstance(entry, dict) and "pid" in entry
    ]
    what = listed(names)
    return CkptError(
        "pid_in_use",
        "A process number that the kernel needs is taken on this node"
        + (f": {what}." if what else "."),
        hint="End that process, or restore on another node.",
        details=details,
    )
