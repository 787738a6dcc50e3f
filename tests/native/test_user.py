"""Ordinary users: file capabilities, and what they must not make possible."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.node import REPOSITORY
from tests.native.driver import Capture, Kernel, binary, empty, state, status, wait_until
from tests.native.gpu_node import HOLDER, GpuNode, held, intact

pytestmark = pytest.mark.root

NOBODY = 65534
CAPABILITIES = "cap_checkpoint_restore,cap_net_admin,cap_setpcap=p"

#: In sh, which every user can run wherever the tests' Python lives.
COUNTER = """
i=0
while :; do
    i=$((i + 1)); echo "tick $i"
    sleep 0.02
done
"""

Start = Callable[..., Kernel]


@pytest.fixture
def places() -> Iterator[Callable[..., Path]]:
    """Folders that an ordinary user reaches, which those of `tmp_path` are not."""
    made: list[Path] = []

    def make(owner: int, mode: int = 0o700) -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="kernel-capture-test-", dir="/usr/local")))
        os.chown(made[-1], owner, owner)
        made[-1].chmod(mode)
        return made[-1]

    yield make
    for path in made:
        shutil.rmtree(path)


@pytest.fixture
def program(places: Callable[..., Path]) -> Path:
    """The binary as an administrator installs it for ordinary users."""
    path = places(0, 0o755) / "kernel-capture"
    shutil.copy(binary(), path)
    subprocess.run(["setcap", CAPABILITIES, path], check=True)
    return path


@pytest.fixture
def plain(places: Callable[..., Path]) -> Path:
    """The binary without any capabilities."""
    return Path(shutil.copy(binary(), places(0, 0o755)))


@pytest.fixture
def nobody() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


@pytest.fixture
def kernel(places: Callable[..., Path], program: Path, nobody: dict[str, Any]) -> Iterator[Start]:
    kernels: list[Kernel] = []

    def start(**kwargs: Any) -> Kernel:
        folder = places(NOBODY)
        one = Kernel(
            folder,
            COUNTER,
            **{"program": program, "command": ["/bin/sh"], **nobody, **kwargs},
        )
        os.chown(one.images, NOBODY, NOBODY)
        kernels.append(one)
        return one

    yield start
    for one in kernels:
        one.close()


def capabilities(pid: int) -> list[int]:
    fields = status(pid)
    return [int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")]


def test_an_ordinary_user_saves_and_restores(kernel: Start) -> None:
    one = kernel()
    one.wait_line("tick")
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert one.pid >= pid_max // 4
    assert capabilities(one.pid) == [0, 0, 0, 0]
    for _ in range(2):
        one.save()
        one.runs_on()
        one.kill()
        restored = one.restore("--hold", "--hold-timeout", "0.1").expect("restored")
        assert (restored["pid"], restored["time_namespace"]) == (one.pid, False)
        one.supervisor.expect("released")
        one.runs_on()
        assert capabilities(one.pid) == [0, 0, 0, 0]
        assert status(one.pid)["Uid"].split() == [str(NOBODY)] * 4
        owners = {path.stat().st_uid for path in one.images.iterdir()}
        assert owners == {NOBODY}
        empty(one.images)
        os.chown(one.images, NOBODY, NOBODY)
    one.supervisor.hang_up()
    assert one.supervisor.wait() == 128 + signal.SIGTERM


def test_undo_as_an_ordinary_user(kernel: Start) -> None:
    one = kernel()
    one.wait_line("tick")
    capture = one.dump("--window-dir", one.folder)
    capture.expect("window")
    assert state(one.pid) == "T"
    capture.process.kill()
    one.runs_on()


def test_without_capabilities(kernel: Start, plain: Path, nobody: dict[str, Any]) -> None:
    one = kernel(program=plain)
    one.wait_line("tick")
    last = one.dump().finish()
    assert last["reason"] == "no_capability"
    one.runs_on()
    probe = Capture("probe", program=plain, **nobody)
    said = probe.finish()
    probe.close()
    assert said["can_capture"] is False
    assert [problem["reason"] for problem in said["problems"]] == ["no_capability"]
    hint = said["problems"][0]["hint"]
    assert f"setcap {CAPABILITIES} '{plain}'" in hint, "it can be pasted"


def test_another_users_process_is_refused(kernel: Start, program: Path) -> None:
    one = kernel(user=None, group=None, extra_groups=None)
    assert status(one.pid)["Uid"].split() == ["0"] * 4
    os.chown(one.folder, NOBODY, NOBODY)
    capture = Capture(
        "dump",
        "--pid",
        str(one.pid),
        "--images-dir",
        one.images,
        program=program,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    last = capture.finish()
    capture.close()
    assert last["reason"] == "not_yours"
    one.runs_on()


def saved_with(one: Kernel, plain: Path, *rights: str) -> dict[str, str]:
    """Run and save the program anew with other rights, then kill it; its status in /proc."""
    one.wait_line("tick")
    one.kill()
    raised = Capture(
        *(f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *rights),
        *(plain, "run", "--log", one.log, "--", "/bin/sh", one.folder / "program.py"),
        program=Path("/usr/bin/setpriv"),
        cwd=one.folder,
    )
    one.captures.append(raised)
    one.pid = raised.expect("started")["pid"]
    one.runs_on()
    found = status(one.pid)
    one.save()
    raised.send("kill")
    raised.wait()
    return found


@pytest.mark.parametrize(
    ("rights", "field"),
    [
        (("--inh-caps=+net_admin", "--ambient-caps=+net_admin"), "CapPrm"),
        (("--inh-caps=+chown",), "CapInh"),
        # Set-user-ID programs would find themselves unable to give up root.
        (("--bounding-set=-setuid",), "CapBnd"),
    ],
    ids=["permitted", "inheritable", "bounding"],
)
def test_a_state_cannot_bring_other_rights(
    kernel: Start, plain: Path, rights: tuple[str, ...], field: str
) -> None:
    """Images may be made of a process that had them, or be written by hand."""
    one = kernel()
    usual = status(one.pid)
    assert saved_with(one, plain, *rights)[field] != usual[field]
    count = len(one.lines())
    last = one.restore().finish()
    assert (last["event"], last["reason"]) == ("error", "not_yours")
    assert not Path(f"/proc/{one.pid}").exists()
    assert len(one.lines()) == count


def test_fewer_rights_are_no_matter_without_new_ones(kernel: Start, plain: Path) -> None:
    one = kernel()
    saved_with(one, plain, "--bounding-set=-setuid", "--no-new-privs")
    one.restore().expect("restored")
    one.runs_on()
    assert status(one.pid)["NoNewPrivs"] == "1"


#: A thread keeps the rights that the main thread, which is the process's face in /proc, gives up.
KEEPS_RIGHTS_IN_A_THREAD = """
#include <linux/capability.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

static void *count(void *unused)
{
    for (int i = 0;; i++, usleep(20000))
        printf("tick %d\\n", i), fflush(stdout);
    return unused;
}

int main(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    pthread_t thread;
    pthread_create(&thread, NULL, count, NULL);
    syscall(SYS_capset, &header, none);
    pthread_join(thread, NULL);
    return 0;
}
"""


def test_a_state_cannot_bring_capabilities_in_a_thread(
    kernel: Start, plain: Path, places: Callable[..., Path]
) -> None:
    one = kernel()
    one.wait_line("tick")
    one.kill()
    program = places(0, 0o755) / "threads"
    subprocess.run(
        ["cc", "-pthread", "-x", "c", "-", "-o", program],
        input=KEEPS_RIGHTS_IN_A_THREAD.encode(),
        check=True,
    )
    raised = Capture(
        *(f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
        *("--inh-caps=+net_admin", "--ambient-caps=+net_admin"),
        *(plain, "run", "--log", one.log, "--", program),
        program=Path("/usr/bin/setpriv"),
        cwd=one.folder,
    )
    one.captures.append(raised)
    one.pid = raised.expect("started")["pid"]
    one.runs_on()
    assert capabilities(one.pid)[1] == 0
    one.save()
    raised.send("kill")
    raised.wait()
    count = len(one.lines())
    last = one.restore().finish()
    assert (last["event"], last["reason"]) == ("error", "not_yours")
    assert not Path(f"/proc/{one.pid}").exists()
    assert len(one.lines()) == count


def test_a_users_criu_is_not_run(
    places: Callable[..., Path], program: Path, nobody: dict[str, Any]
) -> None:
    """A CRIU that the user can replace would get the capabilities."""
    shutil.copy("/bin/true", program.parent / "criu")
    os.chown(program.parent / "criu", NOBODY, NOBODY)
    probe = Capture("probe", program=program, **nobody)
    found = probe.finish()["criu"]
    probe.close()
    assert found is None or not found["path"].startswith(str(program.parent))


def test_a_criu_in_a_folder_that_others_write_is_not_run(
    program: Path, nobody: dict[str, Any]
) -> None:
    script = program.parent / "criu"
    script.write_text("#!/bin/sh\necho Version: 9.9\n")
    script.chmod(0o755)
    probe = Capture("probe", program=program, **nobody)
    assert probe.finish()["criu"]["version"] == "9.9"
    probe.close()
    program.parent.chmod(0o777)
    probe = Capture("probe", program=program, **nobody)
    assert probe.finish()["criu"]["version"] != "9.9"
    probe.close()


def test_set_user_id_is_refused(program: Path, nobody: dict[str, Any]) -> None:
    program.chmod(0o4755)
    probe = Capture("probe", program=program, **nobody)
    assert probe.finish()["reason"] == "usage"
    probe.close()
    wait_until(lambda: probe.process.poll() is not None, "the end")


def test_root_of_a_container(kernel: Start, plain: Path) -> None:
    """Root with a container's usual capabilities and the two that capture takes beside them."""
    usual = "chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw"
    usual += " sys_chroot mknod audit_write setfcap checkpoint_restore net_admin"
    wrapper = plain.parent / "wrapper"
    bounds = ",".join(["-all", *(f"+{name}" for name in usual.split())])
    wrapper.write_text(f'#!/bin/sh\nexec setpriv --bounding-set {bounds} {plain} "$@"\n')
    wrapper.chmod(0o755)
    one = kernel(program=wrapper, user=0, group=0)
    one.wait_line("tick")
    os.chown(one.images, 0, 0)
    one.save()
    one.kill()
    one.restore().expect("restored")
    one.runs_on()


def test_an_ordinary_user_saves_and_parks_a_kernel_with_device_memory(
    places: Callable[..., Path], program: Path, tmp_path: Path
) -> None:
    modules, folder = places(0, 0o755), places(NOBODY)
    shutil.copy(REPOSITORY / "tests" / "simgpu" / "api.py", modules / "simgpu.py")
    node = GpuNode(tmp_path / "node")
    node.machine.folder.chmod(0o755)
    become = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups {program}"
    node.program.write_text(node.program.read_text().replace(str(binary()), become))
    one = Kernel(
        folder,
        "import os, time\nfrom simgpu import Gpu\n" + HOLDER,
        command=["/usr/bin/python3", "-u"],  # which every user can run
        env={"PYTHONPATH": str(modules)},
        program=node.program,
    )
    try:
        os.chown(one.images, NOBODY, NOBODY)
        sums = held(one)
        assert one.save()["gpu"]["problem"] is None
        intact(one, sums)
        one.kill()
        one.restore().expect("restored")
        intact(one, sums)
        for what in ("park", "unpark"):
            capture = node.capture(what, "--pid", str(one.pid))
            assert capture.finish()["event"] == "done"
            capture.close()
            assert (node.machine.used() == 0) == (what == "park")
        intact(one, sums)
    finally:
        one.close()
        node.stop()
