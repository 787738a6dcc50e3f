"""The README's set-up by an ordinary user, in a fresh clone: it completes, and says what is needed.

The system's packages are there, as on any machine that runs the tests; where they are not,
`tests/setup/bare.sh` tries the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.node import REPOSITORY
from tests.harness.server import Home
from tests.harness.user import CAPABILITIES, User


@pytest.fixture
def clone(users_home: Home, user: User) -> Path:
    """The last commit, cloned by the user."""
    path = users_home.path / "jupyter-gpu-ckpt"
    # Without --no-hardlinks the repository's own objects would change hands with the clone.
    subprocess.run(
        ["git", "clone", "--quiet", "--no-hardlinks", str(REPOSITORY), str(path)],
        check=True,
        timeout=60,
    )
    user.own(path)
    return path


@pytest.fixture
def login(users_home: Home, user: User) -> dict[str, str]:
    """The user's environment: how this machine reaches the package registries, and a home."""
    own = Path(sys.prefix) / "bin"
    ours = ("CI", "JUPYTER", "MAKE", "PYTEST", "SKIP_", "VIRTUAL_ENV", "XDG_")
    environment = {key: os.environ[key] for key in os.environ if not key.startswith(ours)}
    path = [part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != own]
    # What Yarn has fetched before spares a minute; the set-up works without.
    yarn = Path(os.environ.get("YARN_GLOBAL_FOLDER") or Path.home() / ".yarn/berry")
    if yarn.is_dir():
        shutil.copytree(yarn, users_home.path / ".yarn/berry")
        user.own(users_home.path / ".yarn")
    environment.pop("YARN_GLOBAL_FOLDER", None)
    return {
        **environment,
        **user.environment(),
        "HOME": str(users_home.path),
        "PATH": os.pathsep.join(path),
    }


@pytest.mark.root
@pytest.mark.timeout(600)
def test_the_set_up_completes_and_says_what_capture_needs(
    clone: Path, login: dict[str, str], user: User
) -> None:
    def run(*argv: str, timeout: float) -> tuple[int, str]:
        # Without a bounding set there is no way back to any right, not even by sudo.
        result = subprocess.run(
            user.command(["setpriv", "--bounding-set=-all", "--", *argv]),
            cwd=clone,
            env=login,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return result.returncode, result.stdout

    status, said = run("make", "dev", timeout=540)
    assert status == 0, said
    assert "Kernels can be captured" not in said
    assert (
        "kernels cannot be captured here yet:\n  * The right to capture processes is missing"
        in said
    )
    program = clone / "jupyter_gpu_ckpt/bin/kernel-capture"
    assert f"sudo setcap {CAPABILITIES} {program} " in said
    assert "Ready: 'make lab' starts JupyterLab" in said
    assert not [path for path in clone.rglob("*") if path.lstat().st_uid != user.uid]

    jupyter = str(clone / ".venv/bin/jupyter")
    status, said = run(jupyter, "gpu-ckpt", "doctor", timeout=60)
    assert status == 1, said
    assert "Ask the administrator to run: setcap cap_checkpoint_restore" in said
    assert said.rstrip().endswith("Kernels cannot be saved on this node.")
    status, said = run(jupyter, "gpu-ckpt", "doctor", "--json", timeout=60)
    assert status == 1 and json.loads(said)["can_capture"] is False

    # What is made stays, and a second time is quick because nothing is made again.
    status, said = run("make", "dev", timeout=60)
    assert status == 0 and "== " not in said, said
