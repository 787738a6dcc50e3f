"""An ordinary user of the machine, with or without a privileged ``kernel-capture``."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.harness.client import wait_for

#: What an administrator grants on the one binary (docs: "rights that capture needs").
CAPABILITIES = "cap_checkpoint_restore,cap_net_admin,cap_setpcap=p"


def _exists(name: str) -> bool:
    return any(entry.pw_name == name for entry in pwd.getpwall())


class User:
    """An account; made when it does not exist yet."""

    def __init__(self, name: str = "jupyter-tester") -> None:
        if not _exists(name):
            made = subprocess.run(
                ["useradd", "--no-create-home", "--shell", "/bin/bash", name],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            # A test beside this one may be about to make it, and then this could not.
            wait_for(f"user {name} is there {made.stderr}", lambda: _exists(name), 30)
        entry = pwd.getpwnam(name)
        self.name = name
        self.uid = entry.pw_uid
        self.gid = entry.pw_gid

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return `argv` wrapped so that root runs it as this user."""
        return [
            "setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups",
            "--inh-caps=-all", "--", *argv,
        ]  # fmt: skip

    def own(self, folder: Path) -> None:
        """Give `folder` and everything below it to this user."""
        for path in (folder, *folder.rglob("*")):
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def environment(self) -> dict[str, str]:
        """Return what login would set besides HOME."""
        return {"USER": self.name, "LOGNAME": self.name}


def privileged_copy(kernel_capture: Path, folder: Path) -> Path:
    """Install `kernel_capture` as an administrator does: root's file, with capabilities."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "kernel-capture"
    shutil.copy(kernel_capture, copy)
    os.chown(copy, 0, 0)
    copy.chmod(0o755)
    subprocess.run(["setcap", CAPABILITIES, str(copy)], check=True)
    return copy
