"""What works with which capability for an ordinary user in a container: install.md's table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import ApiError
from tests.harness.container import Container
from tests.harness.server import Home, JupyterServer
from tests.harness.user import User

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

#: A process with a seccomp filter of its own, as sandboxes have: one that allows everything.
FILTERED = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import ctypes, signal
libc = ctypes.CDLL(None)
code = ctypes.create_string_buffer(bytes([6, 0, 0, 0]) + (0x7FFF0000).to_bytes(4, "little"))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc.prctl(38, 1, 0, 0, 0)
program = Program(1, ctypes.addressof(code))
assert libc.prctl(22, 2, ctypes.byref(program)) == 0
print("ready", flush=True)
signal.pause()
'''], stdout=subprocess.PIPE)
child.stdout.readline()
print(open(f"/proc/{child.pid}/status").read())
"""
MINIMAL = ("CHECKPOINT_RESTORE", "NET_ADMIN", "SETPCAP")


@contextmanager
def server_in(
    home: Home, capabilities: tuple[str, ...], seccomp: Path | str | None = "unconfined"
) -> Iterator[tuple[Container, JupyterServer]]:
    """A server of an ordinary user in a container with these capabilities."""
    with (
        Container("container", [home.path.parent], capabilities=capabilities, seccomp=seccomp) as c,
        JupyterServer(home, node=c) as server,
    ):
        yield c, server


def rights(server: JupyterServer) -> dict[str, Any]:
    """The row that the server is in, and whether it can capture."""
    found: dict[str, Any] = server.client.get("gpu-ckpt/api/doctor")
    return {**found["rights"], "can_capture": found["can_capture"]}


def restores_after_a_death(container: Container, server: JupyterServer, home: Home) -> str:
    """Save a kernel, let it die, and see it come back; its state."""
    client = server.client
    kernel = client.start(home.add_notebook("mine.ipynb"))
    kernel.run("x = 41; f = open('/tmp/mine.txt', 'w+'); f.write('abc'); f.flush()")
    state = str(client.save(kernel)["result"]["state_id"])
    events = client.events()
    container.inside(["kill", "-9", str(kernel.pid)], home.environment())
    events.wait_for("kernel", action="restored", kernel_id=kernel.id)
    assert kernel.run("x += 1; print(x); f.seek(0); print(f.read())") == "42\nabc"
    return state


def second_kernel(server: JupyterServer, state: str) -> str:
    """What a second kernel of a state says beside the first."""
    result = server.client.restore(state, mode="new")["result"]
    return server.client.connect(result["kernel_id"]).run("print(x)")


def test_without_capabilities_kernels_run_and_none_is_saved(users_home: Home) -> None:
    with server_in(users_home, ()) as (_, server):
        found = rights(server)
        assert (found["row"], found["can_capture"]) == ("none", False)
        assert found["missing"] == [*MINIMAL]
        assert found["adds"] == "kernels can be saved and restored"
        kernel = server.client.start()
        assert kernel.run("print(6 * 7)") == "42"
        with pytest.raises(ApiError) as refused:
            server.client.begin_save(kernel)
        assert refused.value.body["reason"] == "cannot_capture"


def test_three_capabilities_save_and_restore_also_in_another_container(
    users_home: Home, user: User
) -> None:
    with server_in(users_home, MINIMAL) as (container, server):
        found = rights(server)
        assert (found["row"], found["can_capture"]) == ("minimal", True)
        assert found["missing"] == ["SYS_PTRACE"]
        assert "ptrace_scope" in found["adds"]
        said = container.inside(["jupyter", "gpu-ckpt", "doctor"], users_home.environment())
        said = " ".join(said.split())
        assert f"Rights: minimal. {found['works']}" in said
        assert f"SYS_PTRACE would add: {found['adds']}." in said
        state = restores_after_a_death(container, server, users_home)
        with pytest.raises(AssertionError, match="PID namespace"):
            second_kernel(server, state)
        kernel_id = server.client.states()[0]["kernel_id"]
        server.client.save(kernel_id)
        container.kill()
    with server_in(users_home, MINIMAL) as (_, server):
        server.client.wait_lost(1)
        server.client.restore_lost(kernel_id)
        kernel = server.client.connect(kernel_id)
        assert kernel.run("import os; print(x, os.getuid())") == f"42 {user.uid}"


def test_a_seccomp_filter_takes_all_capabilities_their_use(users_home: Home) -> None:
    # Whatever it allows: who is under one may not suspend another process's for the save.
    row = (*MINIMAL, "SYS_ADMIN")
    container = Container("container", [users_home.path.parent], capabilities=row, seccomp=None)
    argv = ["jupyter", "gpu-ckpt", "doctor", "--local", "--json"]
    said = container.run(
        argv, user=users_home.user, env=users_home.environment(), check=False
    ).stdout
    found = json.loads(said)
    assert (found["rights"]["row"], found["can_capture"]) == ("sys_admin", False)
    (problem,) = [check for check in found["checks"] if check["status"] == "problem"]
    assert "run under a seccomp filter" in problem["message"]
    assert "seccomp unconfined" in problem["hint"]


def test_sys_ptrace_takes_nothing_away(users_home: Home) -> None:
    # What it adds shows only where kernel.yama.ptrace_scope is 1.
    with server_in(users_home, (*MINIMAL, "SYS_PTRACE")) as (container, server):
        found = rights(server)
        assert (found["row"], found["can_capture"]) == ("sys_ptrace", True)
        assert found["missing"] == ["SYS_ADMIN"]
        assert "seccomp" in found["adds"] and "PID namespaces" in found["adds"]
        restores_after_a_death(container, server, users_home)


def test_sys_admin_adds_second_kernels_and_filters_of_a_kernels_own(users_home: Home) -> None:
    with server_in(users_home, (*MINIMAL, "SYS_ADMIN")) as (container, server):
        found = rights(server)
        assert (found["row"], found["can_capture"]) == ("sys_admin", True)
        assert found["missing"] == [] and found["adds"] is None
        state = restores_after_a_death(container, server, users_home)
        assert second_kernel(server, state) == "41"
        kernel = server.client.connect(server.client.states()[0]["kernel_id"])
        assert "Seccomp:\t2" in kernel.run(FILTERED)
        server.client.save(kernel)
        events = server.client.events()
        container.inside(["kill", "-9", str(kernel.pid)], users_home.environment())
        events.wait_for("kernel", action="restored", kernel_id=kernel.id)
        said = kernel.run("print(open(f'/proc/{child.pid}/status').read())")
        assert "Seccomp:\t2" in said
