"""What a kernel had that is not in its state: connections, devices, files of the node.

A user is to know beforehand what a restore cannot bring back, and what it needs to find.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from ..outside import Outside, OutsideConnection, OutsideFile
from . import procfs
from .contents import is_library, shown
from .images import is_below, mapped_ids, remapped_ids
from .images_proto import REG, Image, read_image
from .sockets import Peer, outside_peers

#: So many of each are kept: a list of states reads them all.
_MOST: Final = 24

#: Of every node, or in the tree itself (CRIU saves no terminal whose other end is elsewhere).
#: NVIDIA's are closed for a save: what is on them is in the state, and comes back on any.
_PLAIN_DEVICES: Final = re.compile(
    r"/dev/(null|zero|full|u?random|ptmx|pts/.*|tty|nvidia(ctl|-uvm|-uvm-tools|-modeset|[0-9]+))"
)
#: The system's own: what it maps there (locales, caches) is no data of the kernel's.
_SYSTEM: Final = ("/proc", "/sys", "/dev", "/usr", "/lib", "/etc")
#: Files of a database, which are made again where that is needed.
_OF_DATABASE: Final = ("-wal", "-shm", "-journal")

_Use = Literal["write", "append", "map"]
#: The first of these that is true of a file is said.
_USES: Final[tuple[_Use, ...]] = ("write", "append", "map")

_SERVICES: Final = {
    21: "ftp",
    22: "ssh",
    25: "smtp",
    53: "dns",
    80: "http",
    389: "ldap",
    443: "https",
    445: "smb",
    514: "syslog",
    587: "smtp",
    636: "ldaps",
    1433: "sqlserver",
    1521: "oracle",
    2181: "zookeeper",
    3306: "mysql",
    5432: "postgresql",
    5672: "amqp",
    6379: "redis",
    7077: "spark",
    7687: "neo4j",
    8020: "hdfs",
    8125: "statsd",
    8786: "dask",
    9042: "cassandra",
    9092: "kafka",
    9200: "elasticsearch",
    10001: "ray",
    11211: "memcached",
    27017: "mongodb",
}


def devices(pid: int) -> list[str]:
    """Devices that a running tree has open, beyond those that are alike everywhere; sorted.

    Read before the dump: GPUs are closed for it.
    """
    found = set()
    for member in procfs.tree(pid):
        for link, target in procfs.descriptors(member):
            if target.startswith("/dev/") and not _PLAIN_DEVICES.fullmatch(target):
                try:
                    mode = os.stat(link).st_mode
                except OSError:
                    continue
                if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                    found.add(target)
    return sorted(found)


def survey(
    images_dir: Path,
    *,
    devices: Sequence[str] = (),
    own_ports: Collection[int] = (),
    exclude: Sequence[str] = (),
    is_shared: Callable[[str], bool] = lambda path: False,
) -> Outside:
    """What a finished image directory says of what is not in it.

    Parameters
    ----------
    images_dir
        As CRIU wrote it, of a tree on this node.
    devices
        From :func:`devices`.
    own_ports
        Those on which Jupyter talks with the kernel.
    exclude
        Node-local directories: files below them are in the state.
    is_shared
        Tells of a file's path whether it is Jupyter's own (logs, IPython's history).

    Raises
    ------
    CkptError
        ``state_damaged`` when an image cannot be read.
    """
    opened = read_image(images_dir / "files.img", "file_entry")
    connections = _connections(outside_peers(opened), own_ports)
    files = [
        OutsideFile(shown(os.fsencode(path)), mode)
        for path, mode in _files(images_dir, opened, exclude)
        if not is_shared(path)
    ]
    names = [shown(os.fsencode(path)) for path in devices]
    return Outside(
        connections[:_MOST],
        names[:_MOST],
        files[:_MOST],
        sum(max(0, len(all_) - _MOST) for all_ in (connections, names, files)),
    )


def _connections(peers: Sequence[Peer], own_ports: Collection[int]) -> list[OutsideConnection]:
    counts = Counter(peer for peer in peers if not (peer.incoming and peer.port in own_ports))
    order = sorted(counts, key=lambda peer: (peer.protocol, peer.incoming, peer.address, peer.port))
    return [
        OutsideConnection(
            peer.protocol,
            shown(os.fsencode(peer.address)),
            peer.port,
            None if peer.incoming else _SERVICES.get(peer.port or 0),
            peer.incoming,
            counts[peer],
        )
        for peer in order
    ]


def _files(images_dir: Path, opened: Image, exclude: Sequence[str]) -> list[tuple[str, _Use]]:
    """Path and use of the files that the tree writes or maps, and that are not in the state."""
    data = {id_ for id_, is_code in mapped_ids(images_dir).items() if not is_code}
    nameless = remapped_ids(images_dir)
    exclude = [os.path.realpath(directory) for directory in exclude]
    found: dict[str, set[_Use]] = {}
    for entry in opened.messages:
        if entry.type != REG or entry.id in nameless or not stat.S_ISREG(entry.reg.mode):
            continue
        path = os.fsdecode(entry.reg.name)
        use = _use(entry, path, entry.id in data)
        if use and not any(is_below(path, directory) for directory in (*exclude, "/proc")):
            found.setdefault(path, set()).add(use)
    return [
        (path, next(use for use in _USES if use in uses))
        for path, uses in sorted(found.items())
        if not any(
            path.endswith(end) and os.path.exists(path.removesuffix(end)) for end in _OF_DATABASE
        )
    ]


def _use(entry: Any, path: str, maps_data: bool) -> _Use | None:
    if entry.reg.flags & os.O_ACCMODE != os.O_RDONLY:
        return "append" if entry.reg.flags & os.O_APPEND else "write"
    if not maps_data or is_library(entry.reg.name):
        return None
    return None if any(is_below(path, directory) for directory in _SYSTEM) else "map"
