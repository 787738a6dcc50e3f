"""What ``/proc`` says about a process tree."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Mapping(NamedTuple):
    """One line of ``/proc/PID/maps`` that maps a file."""

    path: str
    device: int
    inode: int


def tree(pid: int) -> list[int]:
    """``pid`` and all its descendants, parents first. Empty when ``pid`` is gone.

    The kernel is a subreaper, so nothing it started is anywhere else.
    """
    found: list[int] = []
    waiting = [pid] if os.path.isdir(f"/proc/{pid}") else []
    while waiting:
        current = waiting.pop(0)
        found.append(current)
        for thread in _list(f"/proc/{current}/task"):
            for child in _text(f"/proc/{current}/task/{thread}/children").split():
                if int(child) not in found and int(child) not in waiting:
                    waiting.append(int(child))
    return found


def threads(pid: int) -> list[int]:
    """Thread ids of a process."""
    return [int(name) for name in _list(f"/proc/{pid}/task")]


def descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """``(path of the /proc link, its target)`` of every open descriptor."""
    folder = f"/proc/{pid}/fd"
    for name in _list(folder):
        with contextlib.suppress(OSError):
            yield f"{folder}/{name}", os.readlink(f"{folder}/{name}")


def locks(descriptor: str) -> list[tuple[int, int]]:
    """First and last byte of the POSIX locks that a process holds on a descriptor's file.

    ``descriptor`` is a link of :func:`descriptors`. A lock to the end is given a large number.
    """
    found = []
    for line in _text(descriptor.replace("/fd/", "/fdinfo/")).splitlines():
        fields = line.split()
        if fields[:1] == ["lock:"] and "POSIX" in fields and fields[-2].isdigit():
            found.append((int(fields[-2]), int(fields[-1]) if fields[-1].isdigit() else 1 << 62))
    return found


def is_in_use(device: int, inode: int) -> bool:
    """Whether a process that we may look at has a file open or mapped."""
    for name in _list("/proc"):
        if not name.isdigit():
            continue
        for descriptor in _list(f"/proc/{name}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{name}/fd/{descriptor}")
                if (status.st_dev, status.st_ino) == (device, inode):
                    return True
        if any((m.device, m.inode) == (device, inode) for m in mappings(int(name))):
            return True
    return False


def mappings(pid: int) -> Iterator[Mapping]:
    """The distinct files that a process maps; deleted ones end in `` (deleted)``."""
    seen = set()
    for line in _bytes(f"/proc/{pid}/maps").splitlines():
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith(b"/"):
            continue
        major, _, minor = fields[3].partition(b":")
        # The kernel writes a newline in a name as \012 and nothing else is escaped.
        path = os.fsdecode(fields[5].replace(b"\\012", b"\n"))
        mapping = Mapping(path, os.makedev(int(major, 16), int(minor, 16)), int(fields[4]))
        if mapping not in seen:
            seen.add(mapping)
            yield mapping


def cwd(pid: int) -> str | None:
    """A process's working directory, or ``None`` when it cannot be read."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return None


def namespaces(pid: int) -> tuple[str | None, ...]:
    """Which namespaces a process is in, for comparison."""
    found: list[str | None] = []
    for name in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"):
        try:
            found.append(os.readlink(f"/proc/{pid}/ns/{name}"))
        except OSError:
            found.append(None)
    return tuple(found)


def unix_socket_paths(pid: int) -> dict[int, str]:
    """Inode -> path of the Unix sockets that are bound to a path, in the process's namespace."""
    found = {}
    for line in _bytes(f"/proc/{pid}/net/unix").splitlines()[1:]:
        fields = line.split(None, 7)
        if len(fields) == 8 and fields[7].startswith(b"/"):
            found[int(fields[6])] = os.fsdecode(fields[7])
    return found


def status(pid: int) -> dict[str, str]:
    """The fields of ``/proc/PID/status``; empty when the process is gone."""
    return _fields(f"/proc/{pid}/status")


def started(pid: int) -> int | None:
    """When a process was started, in clock ticks since the boot; ``None`` when it has ended.

    With the process id it says which process it is, whatever the node's clock is set to meanwhile.
    """
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def rollup(pid: int) -> dict[str, str]:
    """The sums of ``/proc/PID/smaps_rollup``, which cost a walk over the process's memory."""
    return _fields(f"/proc/{pid}/smaps_rollup")


def kilobytes(fields: dict[str, str], name: str) -> int:
    """A field of :func:`status` that is given in kB, in bytes; 0 where it is absent."""
    value = fields.get(name, "").split()
    return int(value[0]) * 1024 if value and value[0].isdigit() else 0


def _fields(path: str) -> dict[str, str]:
    fields = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.strip()
    return fields


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _text(path: str) -> str:
    return _bytes(path).decode(errors="replace")
