"""Docker's interface as podman offers it, and an image that is this machine's own programs."""

from __future__ import annotations

import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dockerspawner import DockerSpawner

from tests.harness.client import wait_for
from tests.harness.container import PODMAN
from tests.harness.node import REPOSITORY

#: Where a node's turns are; the image has it as docs/jupyterhub/Dockerfile makes it.
TURNS = "tmp/jupyter-gpu-ckpt-turns"
#: The volume of configure(c) for them.
VOLUME = "jupyter-gpu-ckpt-turns"
#: What ends the engine's containers where the tests were killed: its input ends with them.
_AFTER_THE_TESTS = """
read -r left && exit
kill "$1"
image=$2
shift 2
"$@" ps -aq --filter=ancestor="$image" | xargs -r "$@" rm --force --time=0
"$@" rmi --force "$image"
"""
#: Of the machine's settings, what programs need to run as a user of it.
SETTINGS = ("etc/passwd", "etc/group", "etc/nsswitch.conf", "etc/ld.so.cache", "etc/hosts")


class HostDockerSpawner(DockerSpawner):  # type: ignore[misc]
    """On the machine's own network, where its documentation says that this is to be overridden."""

    async def get_ip_and_port(self) -> tuple[str, int]:
        return self.host_ip, self.port


class Engine:
    """An engine that DockerSpawner can talk to, and an image. Leaving it ends all containers.

    Parameters
    ----------
    folder
        Where its socket is.
    shared
        Folders that containers share with the machine.
    """

    def __init__(self, folder: Path, shared: Sequence[Path]) -> None:
        self.image = f"localhost/gpu-ckpt-{secrets.token_hex(4)}:1"
        self.url = f"unix://{folder}/docker.sock"
        self._shared = shared
        #: A developer's own servers may have theirs in it.
        self._had_turns = self._has_turns()
        self._service = subprocess.Popen([*PODMAN, "system", "service", "--time=0", self.url])
        self._after = subprocess.Popen(
            ["sh", "-c", _AFTER_THE_TESTS, "sh", str(self._service.pid), self.image, *PODMAN],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )  # fmt: skip
        image = folder / "image.tar"
        try:
            with tarfile.open(image, "w") as tar:
                _fill(tar)
            self._podman("import", "--quiet", str(image), self.image)
            wait_for("the engine listens", (folder / "docker.sock").exists, 60)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _has_turns(self) -> bool:
        return VOLUME in self._podman("volume", "ls", "--quiet").split()

    def volumes(self) -> dict[str, dict[str, str]]:
        """What containers have of the machine, as DockerSpawner takes it."""
        programs = {Path("/usr"), Path("/opt"), REPOSITORY, Path(sys.prefix)}
        programs.add(Path(os.path.realpath(sys.base_prefix)))
        outermost = [path for path in programs if not programs & {*path.parents}]
        return {str(path): {"bind": str(path), "mode": "ro"} for path in outermost} | {
            str(path): {"bind": str(path), "mode": "rw"} for path in self._shared
        }

    def kill(self, name: str) -> None:
        """Let a container die as with its machine."""
        self._podman("kill", "--signal=KILL", name)

    def told(self, name: str) -> dict[str, Any]:
        """What there is of a container, as the engine says it."""
        return dict(json.loads(self._podman("inspect", name))[0])

    def _podman(self, *args: str, check: bool = True) -> str:
        return subprocess.run(
            [*PODMAN, *args], capture_output=True, text=True, timeout=120, check=check
        ).stdout

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self._podman("ps", "-aq", f"--filter=ancestor={self.image}", check=False).split()
        if left:
            if error is not None:
                print(self._podman("logs", left[0], check=False))  # shown with the failure
            self._podman("rm", "--force", "--time=0", *left, check=False)
        self._service.terminate()
        self._service.wait(20)
        self._podman("rmi", self.image, check=False)
        self._after.communicate(b"nothing\n", timeout=20)
        if not self._had_turns:
            self._podman("volume", "rm", VOLUME, check=False)


def _fill(tar: tarfile.TarFile) -> None:
    """Put the folders of this machine's root into an image, without what is in them."""

    def add(name: str, kind: bytes, *, mode: int = 0o755, data: bytes = b"", to: str = "") -> None:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.linkname, info.size = kind, mode, to, len(data)
        tar.addfile(info, io.BytesIO(data))

    for path in Path("/").iterdir():
        if path.is_symlink():
            add(path.name, tarfile.SYMTYPE, to=os.readlink(path))
        elif path.is_dir():
            add(path.name, tarfile.DIRTYPE, mode=0o1777 if path.name == "tmp" else 0o755)
    add("var/tmp", tarfile.DIRTYPE, mode=0o1777)
    add(TURNS, tarfile.DIRTYPE, mode=0o1777)
    for name in SETTINGS:
        if (path := Path("/") / name).exists():
            add(name, tarfile.REGTYPE, mode=0o644, data=path.read_bytes())
