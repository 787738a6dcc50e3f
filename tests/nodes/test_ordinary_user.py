"""A user without root's rights, with and without what an administrator can grant."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capture.native import find_kernel_capture
from tests.harness.client import ApiError
from tests.harness.node import Node
from tests.harness.server import Home, JupyterServer
from tests.harness.user import User, privileged_copy

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@pytest.fixture
def program() -> Path:
    found = find_kernel_capture(None)
    assert found is not None, "kernel-capture was not built"
    return found


@pytest.fixture
def privileged(shared: Path, program: Path) -> Path:
    return privileged_copy(program, shared / "libexec")


@pytest.fixture
def plain(shared: Path, program: Path) -> Path:
    copy = shared / "plain" / "kernel-capture"
    copy.parent.mkdir()
    shutil.copy(program, copy)
    os.chmod(copy, 0o755)
    return copy


def test_with_three_capabilities_a_kernel_moves_to_another_node(
    shared: Path, user: User, users_home: Home, privileged: Path
) -> None:
    config = {"GpuCkptProvisioner": {"kernel_capture": str(privileged)}}
    with (
        Node("node-a", [shared], for_users=True) as node,
        JupyterServer(users_home, node=node, config=config) as server,
    ):
        client = server.client
        assert client.get("gpu-ckpt/api/doctor")["can_capture"] is True
        kernel = client.start(users_home.add_notebook("mine.ipynb"))
        assert kernel.run("import os; x = 41; print(os.getuid())") == str(user.uid)
        # The kernel itself gets none of the rights.
        rights = kernel.run("print(*[l for l in open('/proc/self/status') if l[:3] == 'Cap'])")
        granted = {line.split()[0]: int(line.split()[1], 16) for line in rights.splitlines()}
        assert granted["CapPrm:"] == granted["CapEff:"] == granted["CapAmb:"] == 0
        kernel.run("f = open('/tmp/mine.txt', 'w+'); f.write('abc'); f.flush()")
        pid = server.host_pid(kernel.pid)
        # In place first: the kernel dies alone ...
        client.save(kernel)
        events = client.events()
        os.kill(pid, 9)
        events.wait_for("kernel", action="restored", kernel_id=kernel.id)
        assert kernel.run("x += 1; print(x)") == "42"
        # ... then, from a state of the restored kernel, with its node.
        client.save(kernel)
        node.kill()
    with (
        Node("node-b", [shared], for_users=True, burn_pids=400) as node,
        JupyterServer(users_home, node=node, config=config) as server,
    ):
        client = server.client
        client.wait_lost(1)
        client.restore_lost(kernel.id)
        kernel = client.connect(kernel.id)
        assert kernel.run("print(x); f.seek(0); print(f.read())") == "42\nabc"
        assert kernel.execute("1/0").error is not None
        assert all(path.stat().st_uid == user.uid for path in users_home.store.rglob("*"))


def test_without_them_everything_but_saving_works_and_says_why(
    shared: Path, user: User, users_home: Home, plain: Path
) -> None:
    config = {"GpuCkptProvisioner": {"kernel_capture": str(plain)}}
    with (
        Node("node-a", [shared], for_users=True) as node,
        JupyterServer(users_home, node=node, config=config) as server,
    ):
        client = server.client
        kernel = client.start(users_home.add_notebook("mine.ipynb"))
        assert kernel.run("x = 41; print(x + 1)") == "42"

        description = client.get(f"gpu-ckpt/api/kernels/{kernel.id}")
        assert description["savable"] is False
        assert "cap_checkpoint_restore" in description["error"]["hint"]
        with pytest.raises(ApiError) as refused:
            client.begin_save(kernel)
        assert refused.value.status == 503
        assert refused.value.body["reason"] == "cannot_capture"

        doctor = node.run(
            ["jupyter", "gpu-ckpt", "doctor", "--json"],
            user=user,
            cwd=users_home.notebooks,
            env=users_home.environment(),
            check=False,
        )
        said = json.loads(doctor.stdout)
        assert said["can_capture"] is False
        hints = " ".join(check["hint"] or "" for check in said["checks"])
        assert "setcap" in hints and "cap_checkpoint_restore" in hints
        # The kernel is as good as any other meanwhile.
        assert kernel.run("x += 1; print(x)") == "42"
        client.post(f"api/kernels/{kernel.id}/restart")
        again = client.connect(kernel.id).execute("x")
        assert again.error is not None and again.error.startswith("NameError")
