"""DockerSpawner itself starts servers, in containers of an engine with Docker's interface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt.rights import NEEDED
from tests.harness.client import wait_for
from tests.harness.container import PODMAN
from tests.harness.docker import TURNS, Engine
from tests.harness.hub import Hub
from tests.harness.node import REPOSITORY
from tests.harness.server import Home, free_port
from tests.harness.user import User

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


def test_kernels_of_a_container_that_dies_or_is_stopped_are_in_the_next_one(
    shared: Path, user: User
) -> None:
    home, store = Home(shared / "home", user), shared / "states"
    (store / "alice").mkdir(parents=True)
    user.own(store / "alice")
    (store / "alice").chmod(0o700)
    with Engine(shared, [home.path]) as engine:
        config: dict[str, dict[str, Any]] = {
            "JupyterHub": {"spawner_class": "tests.harness.docker.HostDockerSpawner"},
            "Spawner": {"poll_interval": 1},
            "DockerSpawner": {
                "client_kwargs": {"base_url": engine.url}, "image": engine.image,
                "pull_policy": "never", "remove": True, "network_name": "host",
                "use_internal_ip": True,  # the machine's own network has no ports to map
                "port": free_port(), "ip": "127.0.0.1", "volumes": engine.volumes(),
                "extra_create_kwargs": {
                    "user": f"{user.uid}:{user.gid}", "working_dir": str(home.path),
                },
                # Nothing but what configure(c) adds.
                "extra_host_config": {
                    "cap_drop": ["ALL"],
                    "ulimits": [
                        {"name": "nproc", "soft": 4096, "hard": 4096},
                        {"name": "nofile", "soft": 1024, "hard": 4096},
                    ],
                },
            },
            "GpuCkptHub": {
                "store_url": str(store / "{username}"), "saves_per_node": 1, "idle": 0.0,
                "interval": 0.0, "long_cell": 0.0,
            },
        }  # fmt: skip
        with Hub(home, hub_config=config) as hub:
            client = hub.start("alice")
            told = engine.told("jupyter-alice")
            assert {*told["EffectiveCaps"]} == {f"CAP_{name}".upper() for name in NEEDED}
            assert client.get("gpu-ckpt/api/doctor")["rights"]["row"] == "minimal"
            kernel = client.start(home.add_notebook("work.ipynb"))
            said = kernel.run(
                "import os, socket; x = 41; here = socket.gethostname(); print(os.getuid())"
            )
            assert int(said) == user.uid != 0
            client.save(kernel)
            # It had its turn, in the volume that all containers of the machine have.
            assert kernel.run(f"print('0.lock' in os.listdir('/{TURNS}'))") == "True"
            client.close()
            engine.kill("jupyter-alice")
            hub.wait_stopped("alice")

            client = hub.start("alice")
            client.wait_lost(1)
            client.restore_lost(kernel.id)
            kernel = client.connect(kernel.id)
            assert kernel.run("x += 1; print(x)") == "42"

            # The engine waits for as long as saving takes, and not for Docker's own 10 s at most.
            assert engine.told("jupyter-alice")["Config"]["StopTimeout"] == 95
            client.close()
            hub.stop("alice")
            client = hub.start("alice")
            (lost,) = client.wait_lost(1)
            assert (lost["why"], lost["state"]["reason"]) == ("shutdown", "shutdown")
            client.restore_lost(kernel.id)
            assert client.connect(kernel.id).run("print(x)") == "42"


BEGINS = """
import subprocess, sys, time
from pathlib import Path
from tests.harness.container import PODMAN
from tests.harness.docker import Engine
engine = Engine(Path(sys.argv[1]), [])
options = [f"--volume={folder}:{folder}:ro" for folder in engine.volumes()]
options += ["--network=none", "--ulimit=nproc=4096:4096", "--ulimit=nofile=1024:4096"]
argv = [*PODMAN, "run", "--detach", *options, engine.image, "/usr/bin/sleep", "600"]
subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
print(engine.image, flush=True)
time.sleep(600)
"""


def test_containers_of_tests_that_were_killed_end_too(shared: Path) -> None:
    argv = [sys.executable, "-c", BEGINS, str(shared)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as tests:
        assert tests.stdout is not None
        image = tests.stdout.readline().strip()
        tests.kill()

    def told(*argv: str) -> str:
        argv = (*PODMAN, *argv)
        return subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout

    assert image
    ps = ("ps", "--all", "--quiet", f"--filter=ancestor={image}")
    wait_for("nothing is left", lambda: not told(*ps) and not told("images", "-q", image), 60, 0.3)
