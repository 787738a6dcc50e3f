"""SystemdSpawner starts servers as units of a real systemd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt.capture.native import find_kernel_capture
from tests.harness.hub import Hub
from tests.harness.server import Home
from tests.harness.systemd import SystemdMachine
from tests.harness.user import privileged_copy
from tests.scenarios.test_hub_accounts import account, begin, uid

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

NAME = "jupyter-tester"
UNIT = f"jupyter-{NAME}-singleuser"


def test_kernels_of_a_unit_that_dies_or_is_stopped_are_in_the_next_one(shared: Path) -> None:
    program = find_kernel_capture(None)
    assert program is not None, "kernel-capture was not built"
    capture = privileged_copy(program, shared / "libexec")
    store = shared / "states"
    store.mkdir()
    store.chmod(0o1777)
    config: dict[str, dict[str, Any]] = {"GpuCkptProvisioner": {"kernel_capture": str(capture)}}
    hub_config: dict[str, dict[str, Any]] = {
        "JupyterHub": {"spawner_class": "systemdspawner.SystemdSpawner"},
        # As many set it; a unit that has it could save nothing.
        "SystemdSpawner": {"poll_interval": 1, "disable_user_sudo": True},
        "GpuCkptHub": {"store_url": str(store), "idle": 0.0, "interval": 0.0, "long_cell": 0.0},
    }
    with SystemdMachine("systemd", [shared]) as machine:
        machine.run(["mount", "-t", "tmpfs", "tmpfs", "/home"])
        home = account(machine, shared, NAME)
        with Hub(
            Home(shared / "hub"), config=config, hub_config=hub_config, accounts={NAME: home},
            node=machine,
        ) as hub:  # fmt: skip
            client, kernel = begin(hub, NAME, home)
            client.save(kernel)
            client.close()
            machine.run(["systemctl", "kill", "--signal=KILL", UNIT])
            hub.wait_stopped(NAME)

            client = hub.start(NAME)
            client.wait_lost(1)
            client.restore_lost(kernel.id)
            kernel = client.connect(kernel.id)
            assert kernel.run("x += 1; print(x, os.getuid())") == f"42 {uid(home)}"

            # systemd signals the server alone, and waits until it has saved.
            client.close()
            hub.stop(NAME)
            client = hub.start(NAME)
            (lost,) = client.wait_lost(1)
            assert (lost["why"], lost["state"]["reason"]) == ("shutdown", "shutdown")
            client.restore_lost(kernel.id)
            assert client.connect(kernel.id).run("print(x)") == "42"
