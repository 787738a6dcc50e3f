"""PID 1 of a test node: sets the node up, then reaps orphans until it is killed.

Runs as a script inside fresh namespaces (see :mod:`tests.harness.node`), with the
node's description as JSON in ``argv[1]``. Prints ``ready`` once the node can be used,
and ends (which ends the whole node) when its stdin closes, that is when the test dies.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

STAGE = Path("/mnt")


def mount(*args: str) -> None:
    subprocess.run(["mount", "--no-mtab", *args], check=True)


def hide(folder: str, keep: list[Path]) -> None:
    """Mount an empty file system over `folder`, with the `keep` paths below it still there."""
    inside = [path for path in keep if path.is_relative_to(folder)]
    for number, path in enumerate(inside):
        stage = STAGE / str(number)
        stage.mkdir(exist_ok=True)
        mount("--bind", str(path), str(stage))
    mode = "1777" if folder in ("/tmp", "/var/tmp", "/dev/shm") else "0755"
    mount("-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", folder)
    for number, path in enumerate(inside):
        path.mkdir(parents=True)
        mount("--move", str(STAGE / str(number)), str(path))


def closed_to_others(path: Path) -> Path | None:
    """Return the outermost folder above `path` that an ordinary user cannot pass."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            return parent
    return None


def set_up(node: dict[str, object]) -> None:
    socket.sethostname(str(node["hostname"]))
    keep = [Path(path) for path in node["keep"]]  # type: ignore[attr-defined]
    mount("-t", "tmpfs", "tmpfs", str(STAGE))
    for folder in node["hide"]:  # type: ignore[attr-defined]
        hide(str(folder), keep)
    if node["for_users"]:
        # The interpreter or the checkout may lie in a private folder such as /root.
        while closed := next(filter(None, map(closed_to_others, keep)), None):
            hide(str(closed), keep)
    mount("-t", "tmpfs", "tmpfs", str(STAGE))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def burn(pids: int) -> None:
    """Keep the PIDs up to `pids` taken, each by a sleeping process."""
    taken = os.getpid()
    while taken < pids:
        taken = os.fork()
        if taken == 0:
            signal.pause()


def end_with_the_test() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    node = json.loads(sys.argv[1])
    burn(int(node["burn_pids"]))  # first: the set-up's own processes would use PIDs up
    set_up(node)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    threading.Thread(target=end_with_the_test, daemon=True).start()
    print("ready", flush=True)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            pass
        signal.sigwait([signal.SIGCHLD])


if __name__ == "__main__":
    main()
