"""The node's fingerprint, and what differs between a state's node and this one."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from ..gpus.inventory import GpuInfo, Inventory
from ..models import Difference
from .elf import build_id
from .images import MappedFile
from .protocol import Probe
from .wording import listed

# Instruction sets that libraries choose at start and then use without asking again. Flags
# beyond these (power management, mitigations, virtualisation) do not reach a program.
_MATTERS: Final = re.compile(
    r"(avx|amx_|bmi|sse|ssse|sha|vaes|vpclmul|gfni|fma|f16c|xsave|fsrm|pku|user_shstk|3dnow)"
    r"|(abm|adx|aes|cx16|erms|fxsr|lahf_lm|movbe|movdir|pclmulqdq|popcnt|rdrand|rdseed|rdpid"
    r"|rtm|serialize|waitpkg|fsgsbase|clflushopt|clwb|cldemote)"
    # ARM
    r"|(asimd|atomics|crc32|fp|sve|sme|dcpop|ilrcpc|jscvt|lrcpc|pmull|i8mm|bf16|paca|pacg|bti|mte)"
)


class NodeInfo(msgspec.Struct, frozen=True):
    """What identifies a node, and what a restored kernel depends on.

    ``id`` changes with the boot, the container and the pod: processes of one ``id`` can
    see each other's process ids.
    """

    id: str
    hostname: str
    boot_id: str
    pid_ns: str
    pod_uid: str | None
    kernel_release: str
    machine: str
    cpu_model: str
    cpu_flags: list[str]
    libc: str | None
    criu: str | None
    driver: str | None = None
    gpus: list[GpuInfo] = []
    cuda: int | None = None


def node_id() -> str:
    """Identifies this node while it lives: host name, boot, PID namespace and pod together."""
    parts = (socket.gethostname(), _boot_id(), _pid_namespace(), _pod_uid() or "")
    return hashlib.blake2s("\0".join(parts).encode(), digest_size=12).hexdigest()


def node_info(probe: Probe | None = None, inventory: Inventory | None = None) -> NodeInfo:
    """This node's fingerprint, stored with every state.

    ``probe`` adds the CRIU version, ``inventory`` the GPUs and their driver.
    """
    inventory = inventory or Inventory()
    model, flags = _cpu()
    return NodeInfo(
        id=node_id(),
        hostname=socket.gethostname(),
        boot_id=_boot_id(),
        pid_ns=_pid_namespace(),
        pod_uid=_pod_uid(),
        kernel_release=platform.release(),
        machine=platform.machine(),
        cpu_model=model,
        cpu_flags=list(flags),
        libc=_libc(),
        criu=probe.criu.version if probe is not None and probe.criu is not None else None,
        driver=inventory.driver,
        gpus=[gpu.info for gpu in inventory.gpus],
        cuda=inventory.cuda,
    )


def differences(
    saved: NodeInfo, here: NodeInfo, mapped_files: Sequence[MappedFile]
) -> list[Difference]:
    """What a restore of a state of node ``saved`` would meet here; called before every restore.

    Parameters
    ----------
    saved, here
        The two nodes.
    mapped_files
        The files the state needs unchanged, from its manifest.

    Returns
    -------
    list of Difference
        Blocking ones first.
    """
    found = [*_processor(saved, here), *_files(mapped_files)]
    for what, message, old, new in (
        ("hostname", "The state was saved on another machine.", saved.hostname, here.hostname),
        (
            "kernel_release",
            "The Linux kernel is another one than at the save.",
            saved.kernel_release,
            here.kernel_release,
        ),
        ("criu", "CRIU is another version than at the save.", saved.criu, here.criu),
    ):
        if old is not None and new is not None and old != new:
            found.append(Difference(what, message, False, old, new))
    return sorted(found, key=lambda difference: not difference.blocking)


def _processor(saved: NodeInfo, here: NodeInfo) -> list[Difference]:
    if saved.machine != here.machine:
        message = "The state was saved on another processor architecture."
        return [Difference("machine", message, True, saved.machine, here.machine)]
    missing = sorted(
        flag for flag in set(saved.cpu_flags) - set(here.cpu_flags) if _MATTERS.match(flag)
    )
    if missing:
        shown = listed(missing, 8)
        message = f"The processor here lacks features that the kernel may be using: {shown}."
        return [Difference("cpu", message, True, saved.cpu_model, here.cpu_model)]
    if saved.cpu_model != here.cpu_model:
        message = "The processor is another model, with all the features of the old one."
        return [Difference("cpu_model", message, False, saved.cpu_model, here.cpu_model)]
    return []


def _files(mapped_files: Sequence[MappedFile]) -> list[Difference]:
    found = []
    for file in mapped_files:
        try:
            size = os.stat(file.path).st_size
        except OSError as error:
            message = f"A file that the kernel uses is missing here: {file.path}."
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                message = f"A file that the kernel uses cannot be read here: {file.path}."
            found.append(Difference("file", message, True, file.path, None))
            continue
        message = f"A file that the kernel uses is another version here: {file.path}."
        if size != file.size:
            found.append(Difference("file", message, True, f"{file.size} bytes", f"{size} bytes"))
        elif file.build_id is not None and (other := build_id(file.path)) != file.build_id:
            found.append(Difference("file", message, True, file.build_id, other))
    return found


def _boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _pod_uid() -> str | None:
    """The Kubernetes pod's uid, from the environment (downward API) or the mount table."""
    configured = os.environ.get("POD_UID")
    if configured:
        return configured
    uid = r"([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})"
    for source, pattern in (
        ("/proc/self/cgroup", rf"kubepods.*?pod{uid}"),
        ("/proc/self/mountinfo", rf"/pods/{uid}/"),
    ):
        match = re.search(pattern, _read(source))
        if match:
            return match.group(1).replace("_", "-")
    return None


@lru_cache(maxsize=1)
def _cpu() -> tuple[str, tuple[str, ...]]:
    """Model name and sorted flags of the first processor."""
    fields: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), value.strip())
    model = fields.get("model name") or fields.get("CPU part") or platform.processor()
    flags = fields.get("flags") or fields.get("Features") or fields.get("isa") or ""
    return model, tuple(sorted(set(flags.split())))


def _libc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
