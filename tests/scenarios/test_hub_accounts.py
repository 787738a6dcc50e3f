"""A hub on a machine where its users have accounts: servers are theirs, and so are the kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt.capture.native import find_kernel_capture
from tests.harness.client import Client, KernelClient
from tests.harness.hub import Hub
from tests.harness.node import Node
from tests.harness.server import Home
from tests.harness.user import User, privileged_copy

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

#: What another user's process gives away, if anything; each line is one attempt.
LOOK = """
import os, signal
def attempt(what, call):
    try:
        call()
    except PermissionError:
        print(what, "refused")
    except FileNotFoundError:
        print(what, "not there")
    else:
        print(what, "DONE")
attempt("states", lambda: os.listdir(STORE))
attempt("environment", lambda: open(f"/proc/{PID}/environ", "rb").read())
attempt("memory", lambda: open(f"/proc/{PID}/mem", "rb"))
attempt("signal", lambda: os.kill(PID, signal.SIGTERM))
"""


@pytest.fixture
def node(shared: Path) -> Iterator[Node]:
    with Node("gateway", [shared], for_users=True) as machine:
        yield machine


def account(node: Node, shared: Path, name: str) -> Home:
    """An account with a home folder where the system's list of users has it."""
    home = Home(shared / name, User(name))
    where = f"/home/{name}"
    node.run(["mkdir", "-p", where])
    node.run(["mount", "--bind", str(home.path), where])
    return home


def test_servers_that_sudo_starts_are_their_users_own(node: Node, shared: Path) -> None:
    store = shared / "states"
    store.mkdir()
    store.chmod(0o1777)
    node.run(["mount", "-t", "tmpfs", "tmpfs", "/home"])
    names = ["jupyter-tester", "jupyter-tester-b"]
    homes = {name: account(node, shared, name) for name in names}
    # The hub is nobody's administrator: it may start this one program, as these users.
    mediator = Path(sys.executable).with_name("sudospawner")
    hubs = Home(shared / "hub", User("jupyter-tester-hub"))
    rule = f"jupyter-tester-hub ALL=({','.join(names)}) NOPASSWD: {mediator}"
    node.run(["mount", "-t", "tmpfs", "-o", "mode=0750", "tmpfs", "/etc/sudoers.d"])
    node.run(["sh", "-c", f"umask 227; echo {rule!r} > /etc/sudoers.d/hub"])
    program = find_kernel_capture(None)
    assert program is not None, "kernel-capture was not built"
    capture = privileged_copy(program, shared / "libexec")
    key = hubs.path / "key"
    key.write_text("5" * 64)
    key.chmod(0o600)
    config: dict[str, dict[str, Any]] = {"GpuCkptProvisioner": {"kernel_capture": str(capture)}}
    hub_config: dict[str, dict[str, Any]] = {
        "JupyterHub": {"spawner_class": "sudospawner.SudoSpawner"},
        "SudoSpawner": {"sudospawner_path": str(mediator), "poll_interval": 1},
        "GpuCkptHub": {
            "store_url": str(store), "master_key_file": str(key),
            "idle": 0.0, "interval": 0.0, "long_cell": 0.0,
        },
    }  # fmt: skip
    with Hub(hubs, config=config, hub_config=hub_config, accounts=homes, node=node) as hub:
        alice, bob = names
        client, kernel = begin(hub, alice, homes[alice])
        state = client.save(kernel)["result"]["state_id"]
        server = kernel.run("print(os.getppid())")

        # Nothing of hers is for another user of the machine, nor for the hub's account.
        other, his = begin(hub, bob, homes[bob])
        assert [found["kernel_id"] for found in other.states()] == []
        his.run(f"PID, STORE = {server}, {str(store / alice)!r}")
        attempts = [line.split()[-1] for line in his.run(LOOK).splitlines()]
        assert attempts == ["refused"] * 4
        seen = node.run(["ls", "-A", str(store / alice)], user=hubs.user, check=False)
        assert "Permission denied" in seen.stdout

        # A kernel that dies comes back by itself, as hers.
        events = client.events()
        kernel.begin("os.kill(os.getpid(), 9)")
        events.wait_for("kernel", action="restored", kernel_id=kernel.id)
        assert client.connect(kernel.id).run("print(x, os.getuid())") == f"41 {uid(homes[alice])}"
        client.close()

        # Stopped from the hub's page by way of the mediator: saved first, and found again.
        hub.stop(alice)
        assert "Saved 1 of 1 kernels" in hub.log(400)
        client = hub.start(alice)
        (lost,) = client.wait_lost(1)
        assert (lost["kernel_id"], lost["why"]) == (kernel.id, "shutdown")
        assert state in {found["id"] for found in client.states()}
        client.restore_lost(kernel.id)
        again = client.connect(kernel.id).run("print(x + 1, os.getuid())")
        assert again == f"42 {uid(homes[alice])}"


def begin(hub: Hub, name: str, home: Home) -> tuple[Client, KernelClient]:
    """Start a user's server and a kernel in it, which runs as that user."""
    client = hub.start(name)
    assert client.get("gpu-ckpt/api/doctor")["rights"]["row"] == "minimal"
    kernel = client.start(home.add_notebook("work.ipynb"))
    said = kernel.run("import os; x = 41; print(os.getuid(), os.environ['HOME'])")
    assert said == f"{uid(home)} /home/{name}"
    return client, kernel


def uid(home: Home) -> int:
    """User id of whose home it is."""
    assert home.user is not None
    return home.user.uid
