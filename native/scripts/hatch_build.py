"""Hatch build hook: builds ``kernel-capture`` with Meson and puts it into the package.

Hatch calls it for a wheel and for an editable install. The wheel then holds a
program, so it gets a Linux platform tag instead of ``any``. With ``SKIP_KERNEL_CAPTURE=1`` in
the environment nothing is built, and the package can do everything but save and restore.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILER_HINT = (
    "a C compiler is needed to build kernel-capture: on Debian and Ubuntu 'apt-get install "
    "gcc libc6-dev', on Fedora 'dnf install gcc glibc-devel', with conda 'conda install gcc'"
)


class KernelCaptureHook(BuildHookInterface[Any]):
    """Builds ``native/`` in a temporary folder and installs the one program from it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the program; hatch calls this before it collects the files of a wheel.

        Raises
        ------
        RuntimeError
            Not Linux, no C compiler, no Meson, or the build failed.
        """
        if not sys.platform.startswith("linux"):
            raise RuntimeError("jupyter-gpu-ckpt runs on Linux only: CRIU needs a Linux kernel")
        if os.environ.get("SKIP_KERNEL_CAPTURE") == "1":
            return
        if not (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")):
            raise RuntimeError(COMPILER_HINT)
        root = Path(self.root)
        with tempfile.TemporaryDirectory(prefix="kernel-capture-build-") as build:
            self._meson(
                "setup", build, str(root / "native"), "--buildtype=release", "-Dwerror=false"
            )
            self._meson("compile", "-C", build, "kernel-capture")
            _install(Path(build) / "kernel-capture", root / "jupyter_gpu_ckpt/bin/kernel-capture")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def clean(self, versions: list[str]) -> None:
        """Remove the built program; ``hatch clean`` calls this."""
        shutil.rmtree(Path(self.root) / "jupyter_gpu_ckpt/bin", ignore_errors=True)

    def _meson(self, *arguments: str) -> None:
        # The Meson of the build requirements; the system's where isolation is off and it is absent.
        own = subprocess.run(
            [sys.executable, "-c", "import mesonbuild"], capture_output=True, check=False
        )
        meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
        if own.returncode != 0:
            found = shutil.which("meson")
            if found is None:
                raise RuntimeError("Meson is needed to build kernel-capture: pip install meson")
            meson = [found]
        # Ninja lies beside the interpreter, which nobody needs to have on the PATH.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        result = subprocess.run(
            [*meson, *arguments],
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            check=False,
        )
        if result.returncode != 0:
            raise RuntimeError(f"kernel-capture did not build:\n{result.stdout}\n{COMPILER_HINT}")
        self.app.display_debug(result.stdout)


def _install(built: Path, target: Path) -> None:
    """Put the program in place atomically; an identical one stays, with its file capabilities."""
    if target.exists() and filecmp.cmp(built, target, shallow=False):
        return
    target.parent.mkdir(exist_ok=True)
    new = target.with_name(target.name + ".new")
    shutil.copyfile(built, new)
    new.chmod(0o755)
    new.replace(target)
