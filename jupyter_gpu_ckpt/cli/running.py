"""The servers that run here, found as ``jupyter server list`` finds them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from jupyter_core.paths import jupyter_runtime_dir
from jupyter_server.utils import check_pid


class Running(msgspec.Struct, frozen=True):
    """What a running server wrote about itself."""

    url: str
    pid: int
    token: str = ""
    root_dir: str | None = None


def running_servers() -> list[Running]:
    """The servers of this user that run on this machine, oldest first.

    ``jupyter_server.serverapp.list_running_servers`` does the same (a test compares them), but
    importing it takes three times as long as a whole command of this program.
    """
    found = []
    for file in Path(jupyter_runtime_dir()).glob("jpserver-*.json"):
        try:
            info = msgspec.json.decode(file.read_bytes(), type=Running)
            started = file.stat().st_mtime
        except (OSError, msgspec.DecodeError):
            continue  # it ended just now, or is about to start
        if check_pid(info.pid):
            found.append((started, info))
    return [info for _, info in sorted(found, key=lambda entry: entry[0])]
