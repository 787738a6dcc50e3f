"""Kernels under the supervisor behave as with the stock provisioner, and can be saved."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import AsyncKernelManager

from jupyter_gpu_ckpt.connection import is_own_address, own_address
from jupyter_gpu_ckpt.provisioner import GpuCkptProvisioner
from tests.harness.client import ApiError, KernelClient, wait_for
from tests.harness.server import Home, JupyterServer

Start = Callable[..., KernelClient]

SECRETS = {
    "JUPYTERHUB_API_TOKEN": "hub-secret",
    "JUPYTER_TOKEN": "server-secret",
    "CONFIGPROXY_AUTH_TOKEN": "proxy-secret",
    "MY_DATABASE": "harmless",
}


def connection(home: Home, kernel_id: str) -> dict[str, Any]:
    """What a second client reads to reach the kernel."""
    runtime = home.data / "runtime"
    return dict(json.loads((runtime / f"kernel-{kernel_id}.json").read_text()))


def gone(*pids: int) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def add_kernelspec(home: Home, name: str, **fields: Any) -> None:
    folder = home.data / "kernels" / name
    folder.mkdir(parents=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": name,
        "language": "python",
        **fields,
    }
    (folder / "kernel.json").write_text(json.dumps(spec))


def test_each_kernel_listens_on_an_address_of_its_own(start: Start, lasting_home: Home) -> None:
    first, second = start(), start()
    addresses = [connection(lasting_home, k.id)["ip"] for k in (first, second)]
    assert addresses == [own_address(first.id), own_address(second.id)]
    assert all(is_own_address(address) for address in addresses)
    assert len(set(addresses)) == 2


@pytest.mark.parametrize("number", range(200))
def test_addresses_keep_clear_of_other_programs(number: int) -> None:
    parts = [int(part) for part in own_address(f"kernel-{number}").split(".")]
    assert parts[0] == 127
    assert parts[1] not in (0, 255)
    assert parts[3] not in (0, 255)


def test_interrupt(server: JupyterServer, start: Start) -> None:
    kernel = start()
    cell = kernel.begin("import time\nprint('on')\ntime.sleep(60)").wait_text("on")
    server.client.post(f"api/kernels/{kernel.id}/interrupt")
    cell.finish(20)
    assert cell.error is not None
    assert "KeyboardInterrupt" in cell.error
    assert kernel.run("print(1 + 1)") == "2"


def test_interrupt_reaches_a_child_in_the_foreground(server: JupyterServer, start: Start) -> None:
    kernel = start()
    cell = kernel.begin("!echo on; sleep 60").wait_text("on")
    server.client.post(f"api/kernels/{kernel.id}/interrupt")
    cell.finish(20)
    assert kernel.run("print(2 + 2)") == "4"


def test_restart_gives_an_empty_kernel_on_the_same_ports(
    server: JupyterServer, start: Start, lasting_home: Home
) -> None:
    kernel = start()
    kernel.run("x = 1")
    pid, before = kernel.pid, connection(lasting_home, kernel.id)
    server.client.post(f"api/kernels/{kernel.id}/restart")
    assert connection(lasting_home, kernel.id) == before
    wait_for("the old process is gone", lambda: gone(pid), 10)
    cell = kernel.execute("x")
    assert cell.error is not None and "NameError" in cell.error
    assert server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}")["savable"]


def test_shutdown_ends_every_descendant(server: JupyterServer, start: Start) -> None:
    kernel = start()
    child = int(
        kernel.run("import subprocess; p = subprocess.Popen(['sleep', '999']); print(p.pid)")
    )
    daemon = int(
        kernel.run(
            "import os\nos.system('setsid sleep 998 & echo $! > pid')\nprint(open('pid').read())"
        )
    )
    pid = kernel.pid
    supervisor = psutil.Process(pid).ppid()
    assert supervisor != server.process.pid
    server.client.delete(f"api/kernels/{kernel.id}")
    wait_for("the tree is gone", lambda: gone(pid, child, daemon, supervisor), 15)


def test_exit_in_a_cell_gives_a_fresh_kernel(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("x = 1")
    server.client.save(kernel)  # its user's own wish counts for more
    pid = kernel.pid
    kernel.begin("exit()")
    wait_for("the process ends", lambda: gone(pid), 20)
    fresh = wait_for("another runs", lambda: _pid_of(server, kernel.id, pid), 30)
    assert fresh != pid
    cell = server.client.connect(kernel.id).execute("x")
    assert cell.error is not None and "NameError" in cell.error


def _pid_of(server: JupyterServer, kernel_id: str, not_pid: int) -> int | None:
    for process in server.process.children(recursive=True):
        try:
            if any(kernel_id in part for part in process.cmdline()) and process.pid != not_pid:
                name = Path(process.exe()).name
                if name.startswith("python"):
                    return int(process.pid)
        except psutil.NoSuchProcess:
            continue
    return None


def test_input_and_debug_magic(start: Start) -> None:
    kernel = start()
    cell = kernel.begin("name = input('who? ')\nprint('hello', name)")
    assert cell.wait_input()["content"]["prompt"] == "who? "
    cell.answer("you")
    assert "hello you" in cell.finish().text
    kernel.execute("def f(secret):\n    1 / 0\nf(41)")
    debug = kernel.begin("%debug")
    debug.answer("p secret + 1")
    kernel.wait(
        "a second prompt", lambda: len(kernel.answers(debug.msg_id, "input_request")) == 2, 20
    )
    debug.answer("q")
    debug.finish()


def test_the_debugger_attaches(start: Start) -> None:
    kernel = start()

    def ask(number: int, command: str, **arguments: Any) -> dict[str, Any]:
        content = {"type": "request", "seq": number, "command": command, "arguments": arguments}
        return dict(kernel.request("control", "debug_request", content)["content"])

    assert ask(1, "debugInfo")["body"]["isStarted"] is False
    ready = ask(2, "initialize", clientID="test", adapterID="", pathFormat="path")
    assert ready["success"]
    assert ask(3, "attach")["success"]
    assert ask(4, "debugInfo")["body"]["isStarted"] is True
    assert ask(5, "disconnect", restart=False, terminateDebuggee=True)["success"]


def test_a_console_joins_the_kernel(start: Start, lasting_home: Home) -> None:
    kernel = start()
    kernel.run("x = 41")
    file = lasting_home.data / "runtime" / f"kernel-{kernel.id}.json"
    console = subprocess.run(
        [sys.executable, "-m", "jupyter_console", "--existing", str(file), "--simple-prompt"],
        input="print('console says', x + 1)\nquit(keep_kernel=True)\n",
        capture_output=True, text=True, timeout=60, env=lasting_home.environment(),
    )  # fmt: skip
    assert "console says 42" in console.stdout, console.stderr
    assert kernel.run("print(x)") == "41"


def test_widgets(start: Start) -> None:
    kernel = start()
    cell = kernel.execute("import ipywidgets; slider = ipywidgets.IntSlider(7); slider")
    assert cell.error is None
    shown = [m["content"]["data"] for m in kernel.answers(cell.msg_id, "execute_result")] + [
        m["content"]["data"] for m in kernel.answers(cell.msg_id, "display_data")
    ]
    assert any("application/vnd.jupyter.widget-view+json" in data for data in shown)
    assert kernel.answers(cell.msg_id, "comm_open")


def test_what_the_process_prints_goes_to_a_private_log(start: Start, lasting_home: Home) -> None:
    kernel = start()
    kernel.run("import os; os.system('echo from-outside-of-the-cell >&2')")
    kernel.run("os.write(1, b'straight to the descriptor\\n')")
    log = lasting_home.data / "gpu-ckpt" / "logs" / f"{kernel.id}.log"
    wait_for("it is in the log", lambda: "straight to the descriptor" in log.read_text(), 10)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700


def test_the_log_goes_with_a_kernel_that_has_no_state(
    server: JupyterServer, start: Start, lasting_home: Home
) -> None:
    kernel = start()
    logs = lasting_home.data / "gpu-ckpt" / "logs"
    assert (logs / f"{kernel.id}.log").exists()
    server.client.delete(f"api/kernels/{kernel.id}")
    wait_for("the log is gone", lambda: not list(logs.glob(f"{kernel.id}*")), 10)


def test_secrets_of_the_server_stay_out_of_kernels(home: Home) -> None:
    add_kernelspec(home, "wants", env={"JUPYTER_TOKEN": "${JUPYTER_TOKEN}"})
    ask = f"import os; print([os.environ.get(n) for n in {list(SECRETS)!r}])"
    with JupyterServer(home, environment=SECRETS) as server:
        assert server.client.start().run(ask) == "[None, None, None, 'harmless']"
        # What a kernelspec names itself it gets.
        wants = server.client.start(kernel="wants").run(ask)
        assert wants == "[None, 'server-secret', None, 'harmless']"
        assert "JPY_PARENT_PID" not in server.client.start().run(
            "import os; print(dict(os.environ))"
        )
    config = {
        "GpuCkptProvisioner": {"scrub_environment": ["MY_*", "*TOKEN"]},
        "GpuCkpt": {"key_env": "STORE_KEY", "old_key_envs": ["OLD_STORE_KEY"]},
    }
    keys = {"STORE_KEY": "00" * 32, "OLD_STORE_KEY": "11" * 32}
    with JupyterServer(home, config=config, environment=SECRETS | keys) as server:
        assert server.client.start().run(ask) == "[None, None, None, None]"
        found = server.client.start(kernel="wants").run("import os; print(dict(os.environ))")
        assert "STORE_KEY" not in found and "00" * 32 not in found


@pytest.fixture
def runtime_dir() -> Iterator[str]:
    """A folder with a short name: the path of an ipc socket may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="jpy-") as folder:
        yield folder


@pytest.mark.parametrize(
    ("config", "kernel", "word"),
    [
        ({"GpuCkptProvisioner": {"enabled": False}}, "python3", "switched off"),
        ({"KernelManager": {"transport": "ipc"}}, "python3", "ipc"),
        ({"GpuCkptProvisioner": {"kernel_capture": "/nonexistent"}}, "python3", "not installed"),
        (
            {"KernelProvisionerFactory": {"default_provisioner_name": "local-provisioner"}},
            "python3",
            "was not started so",
        ),
        ({}, "opted-out", "was not started so"),
        ({}, "switched-off", "switched off"),
    ],
    ids=["trait", "ipc", "no program", "factory", "kernelspec", "kernelspec's config"],
)
def test_opting_out_gives_a_stock_kernel_and_says_why(
    home: Home, config: dict[str, dict[str, Any]], kernel: str, word: str, runtime_dir: str
) -> None:
    local = {"provisioner_name": "local-provisioner", "config": {}}
    ours = {"provisioner_name": "gpu-ckpt-provisioner", "config": {"enabled": False}}
    add_kernelspec(home, "opted-out", metadata={"kernel_provisioner": local})
    add_kernelspec(home, "switched-off", metadata={"kernel_provisioner": ours})
    environment = {"JUPYTER_RUNTIME_DIR": runtime_dir}
    with JupyterServer(home, config=config, environment=environment) as server:
        client = server.client.start(kernel=kernel)
        # As with the stock provisioner: a child of the server itself.
        assert psutil.Process(client.pid).ppid() == server.process.pid
        told = server.client.get(f"gpu-ckpt/api/kernels/{client.id}")
        assert told["savable"] is False
        assert told["error"]["reason"] == "not_savable"
        assert word in told["error"]["message"]
        with pytest.raises(ApiError) as refused:
            server.client.begin_save(client)
        assert refused.value.status == 422
        assert word in refused.value.body["message"]


def test_a_kernel_that_was_there_before_the_server_says_why_it_cannot_be_saved(
    home: Home,
) -> None:
    folder = home.path / "running"
    folder.mkdir(mode=0o700)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", str(folder / "kernel-a.json")]
    kernel = subprocess.Popen(argv, env=home.environment(), stdout=subprocess.DEVNULL)
    external = {"allow_external_kernels": True, "external_connection_dir": str(folder)}
    try:
        wait_for("the kernel runs", lambda: list(folder.iterdir()), 30)
        with JupyterServer(home, config={"ServerApp": external}) as server:
            told = wait_for("it is listed", lambda: server.client.get("gpu-ckpt/api/kernels"), 20)
            assert [(one["savable"], one["error"]["reason"]) for one in told] == [
                (False, "not_savable")
            ]
            assert "started before this server" in told[0]["error"]["message"]
            with pytest.raises(ApiError, match="not_savable"):
                server.client.post(f"gpu-ckpt/api/kernels/{told[0]['id']}/save")
            own = server.client.start(home.add_notebook("n.ipynb"))
            server.client.save(own)
    finally:
        kernel.kill()
        kernel.wait(20)


def test_where_nothing_can_be_written_kernels_run_as_ever(home: Home) -> None:
    """A home folder may be read-only, or full of quota; for root a file stands for that."""
    (home.data / "gpu-ckpt").touch()
    with JupyterServer(home) as server:
        kernel = server.client.start(home.add_notebook("n.ipynb"))
        assert kernel.run("print(6 * 7)") == "42"
        (told,) = server.client.get("gpu-ckpt/api/kernels")
        assert not told["savable"]
        assert "cannot be written" in json.dumps(told)
        with pytest.raises(ApiError, match="not_savable"):
            server.client.begin_save(kernel)
        server.client.post(f"api/kernels/{kernel.id}/restart")
        assert server.client.connect(kernel.id).run("print(6 * 7)") == "42"


def test_a_kernel_whose_program_is_missing_fails_as_ever(home: Home) -> None:
    add_kernelspec(home, "broken", argv=["no-such-program", "{connection_file}"])
    with JupyterServer(home) as server:
        with pytest.raises(ApiError) as failed:
            server.client.start(kernel="broken")
        assert failed.value.status == 500
        assert "No such file or directory: 'no-such-program'" in server.log()
        assert server.client.start().run("print(1)") == "1"


def test_kernels_end_with_a_killed_server(home: Home) -> None:
    with JupyterServer(home) as server:
        pid = server.client.start().pid
        supervisor = psutil.Process(pid).ppid()
        server.kill(kernels=False)
        wait_for("the kernel ends too", lambda: gone(pid, supervisor), 15)


def test_without_a_server_it_is_a_provisioner_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nbclient and others use kernels: no keeper anywhere."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()

    async def live() -> None:
        km = AsyncKernelManager()
        km.provisioner = GpuCkptProvisioner(
            kernel_id="0" * 32, kernel_spec=km.kernel_spec, parent=km
        )
        await km.start_kernel(kernel_id="0" * 32)
        client = km.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=60)
            assert km.provisioner.has_process
            assert await km.is_alive()
            info = json.loads(json.dumps(await km.provisioner.get_provisioner_info(), default=str))
            assert psutil.Process(info["pid"]).ppid() == info["supervisor_pid"]
            assert Path(info["log"]).exists()
            other = GpuCkptProvisioner(kernel_spec=km.kernel_spec, parent=km)
            await other.load_provisioner_info(info)
            assert (other.kernel_id, other.pid) == (km.kernel_id, info["pid"])
            os.kill(info["pid"], signal.SIGKILL)
            for _ in range(200):
                if not await km.is_alive():
                    break
                await asyncio.sleep(0.05)
            assert await km.provisioner.poll() == -signal.SIGKILL
            await km.restart_kernel()
            await client.wait_for_ready(timeout=60)
        finally:
            client.stop_channels()
            await km.shutdown_kernel()
        assert not km.provisioner.has_process

    asyncio.run(asyncio.wait_for(live(), 100))
