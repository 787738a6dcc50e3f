"""``jupyter gpu-ckpt`` against a real server with real kernels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pexpect
import pytest
import requests
from jupyter_server.serverapp import list_running_servers

from jupyter_gpu_ckpt.cli.main import cli
from jupyter_gpu_ckpt.cli.running import running_servers
from tests.harness.client import KernelClient, wait_for
from tests.harness.node import REPOSITORY
from tests.harness.server import Home, JupyterServer, extension_config
from tests.server.rest import Api
from tests.server.shell import Shell
from tests.server.test_api import BIG

Start = Callable[..., KernelClient]


@pytest.fixture(scope="module")
def shell(lasting_home: Home, server: JupyterServer) -> Shell:
    """A shell beside the running server."""
    return Shell(lasting_home)


def test_save_list_inspect_restore_and_delete(shell: Shell, start: Start) -> None:
    kernel = start("daily.ipynb")
    kernel.run("x = 41")
    saved = shell.run("save", "daily.ipynb", "--label", "before lunch")
    assert re.fullmatch(
        r"Saved daily\.ipynb as state \S+: [\d.]+ MB in [\d.]+ s, "
        r"the kernel stood still for [\d.]+ s\.\n",
        saved.stdout,
    )
    (state,) = shell.json("states", "--kernel", kernel.id)
    assert (state["label"], state["path"]) == ("before lunch", "daily.ipynb")

    listed = shell.run("states", "--path", "daily.ipynb").stdout.splitlines()
    columns = ["State", "Notebook", "Kernel", "Saved", "Why", "Size", "Frees", "Marks", "Node"]
    assert listed[0].split() == columns
    # In a pipe a state is one line, whole.
    assert len(listed) == 2
    assert listed[1].startswith(state["id"]) and "before lunch" in listed[1]

    facts = shell.run("inspect", state["id"]).stdout
    for fact in (state["id"], kernel.id, "daily.ipynb", "before lunch", state["node"]["cpu"]):
        assert fact in facts
    assert re.search(r"Restorable here +yes", facts)
    assert shell.json("inspect", state["id"][:-1])["id"] == state["id"]

    kernel.run("x = 0")
    assert "Restored daily.ipynb" in shell.run("restore", state["id"]).stdout
    assert kernel.run("print(x + 1)") == "42"

    assert shell.run("rm", state["id"]).stdout == f"Deleted {state['id']}.\n"
    assert shell.json("states", "--kernel", kernel.id) == []
    assert "Removed" in shell.run("gc").stdout
    assert shell.json("gc", "--dry-run")["dry_run"] is True


def test_restore_as_a_new_kernel(
    shell: Shell, server: JupyterServer, lasting_home: Home, start: Start
) -> None:
    kernel = start()
    kernel.run("x = 'saved'")
    state = shell.json("save", kernel.id)["result"]["state_id"]
    kernel.run("x = 'later'")
    copy = lasting_home.add_notebook("beside.ipynb")
    result = shell.json("restore", state, "--new", "--path", f"./{copy}")["result"]
    assert server.client.connect(result["kernel_id"]).run("print(x)") == "saved"
    assert kernel.run("print(x)") == "later"
    assert [k["path"] for k in shell.json("kernels") if k["id"] == result["kernel_id"]] == [copy]
    server.client.delete(f"api/kernels/{result['kernel_id']}")


def test_a_kernel_can_be_named_in_many_ways(shell: Shell, start: Start) -> None:
    (shell.home.notebooks / "folder").mkdir()
    kernel = start("folder/named.ipynb")
    names = [
        kernel.id,
        kernel.id[:13],
        "folder/named.ipynb",
        "./folder/named.ipynb",
        str(shell.home.notebooks / "folder" / "named.ipynb"),
    ]
    for name in names:
        assert shell.json("save", name)["kernel_id"] == kernel.id
    assert len(shell.json("states", "--kernel", kernel.id[:13])) == len(names)


def test_kernels_says_which_cannot_be_saved_and_why(
    shell: Shell, stock_kernelspec: str, start: Start
) -> None:
    good, bad = start("good.ipynb"), start("bad.ipynb", stock_kernelspec)
    lines = {line.split()[0]: line for line in shell.run("kernels").stdout.splitlines()}
    assert "good.ipynb" in lines[good.id] and lines[good.id].rstrip().endswith("yes")
    assert "bad.ipynb" in lines[bad.id] and "no: The kernel" in lines[bad.id]
    said = shell.error("save", bad.id)
    assert said.startswith("Error: ") and "Hint: " in said
    assert shell.json("save", bad.id, code=1)["error"]["reason"] == "not_savable"


def test_a_terminal_shows_progress_and_ctrl_c_cancels(shell: Shell, start: Start) -> None:
    kernel = start("big.ipynb")
    kernel.run(BIG)
    terminal = shell.terminal("save", "big.ipynb")
    terminal.expect("Capturing the kernel|Storing")
    terminal.sendintr()
    terminal.expect("Cancelling")
    terminal.expect("Error: Cancelled. Nothing has changed.")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 1
    assert shell.json("states", "--kernel", kernel.id) == []
    assert kernel.run("print(mark)") == "kept"

    terminal = shell.terminal("save", "big.ipynb")
    terminal.expect(r"\d+%")
    terminal.expect("Saved big.ipynb as state")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


def test_an_id_is_never_folded_in_a_narrow_terminal(shell: Shell, start: Start) -> None:
    kernel = start()
    state = shell.json("save", kernel.id)["result"]["state_id"]
    terminal = shell.terminal("states", "--kernel", kernel.id, columns=80)
    terminal.expect(pexpect.EOF)
    assert state in str(terminal.before)
    terminal.close()


def test_no_wait_returns_at_once(shell: Shell, api: Api, start: Start) -> None:
    kernel = start()
    operation = shell.json("save", kernel.id, "--no-wait")
    assert operation["status"] in ("pending", "running")
    assert api.finish(operation)["status"] == "done"
    assert "has begun, as operation" in shell.run("save", kernel.id, "--no-wait").stdout
    wait_for("both are stored", lambda: len(api.get("/states", kernel=kernel.id)) == 2, 60)


def test_a_deadline_leaves_the_operation_going(shell: Shell, api: Api, start: Start) -> None:
    kernel = start()
    kernel.run(BIG)
    said = shell.error("save", kernel.id, "--timeout", "0.1")
    assert "goes on in the server" in said
    operation = re.search(r"operation id is (\w+)", said)
    assert operation is not None
    ended = api.finish({"id": operation[1], "kind": "save"})
    assert ended["status"] == "done"


def test_lost_kernels_are_listed_brought_back_and_dismissed(home: Home) -> None:
    shell = Shell(home)
    with JupyterServer(home, environment={"JUPYTERHUB_SERVER_NAME": "train"}) as first:
        kept = first.client.start(home.add_notebook("kept.ipynb"))
        kept.run("x = 41")
        dropped = first.client.start(home.add_notebook("dropped.ipynb"))
        for kernel in (kept, dropped):
            shell.run("save", kernel.id)
        first.kill()
    with JupyterServer(home) as second:
        second.client.wait_lost(2)
        listed = shell.run("lost").stdout
        assert "kept.ipynb" in listed and "dropped.ipynb" in listed
        assert re.search(r"Name +Server +Node", listed)
        assert [lost["server"] for lost in shell.json("lost")] == ["train", "train"]
        assert shell.run("lost", "--restore", "kept.ipynb").stdout.startswith("Restored kept.ipynb")
        assert second.client.connect(kept.id).run("print(x + 1)") == "42"
        assert "Its states stay" in shell.run("lost", "--dismiss", dropped.id[:13]).stdout
        assert shell.json("lost") == []
        assert len(shell.json("states", "--path", "dropped.ipynb")) == 1
        assert shell.run("lost").stdout == "No kernel was lost.\n"


def test_automatic_saves_are_shown_and_chosen(shell: Shell, start: Start) -> None:
    start("chosen.ipynb")
    said = shell.run("autosave", "chosen.ipynb", "--idle", "90s", "--interval", "1.5h").stdout
    assert re.search(r"^when idle for +90 s +chosen *$", said, re.MULTILINE)
    assert re.search(r"^after work of +90 min +chosen *$", said, re.MULTILINE)
    # What is not given stays.
    found = shell.json("autosave", "chosen.ipynb", "--long-cell", "off", "--no-before-cull")
    assert {name: value for name, value in found["own"].items() if value is not None} == {
        "idle": 90, "interval": 5400, "long_cell": 0, "before_cull": False,
    }  # fmt: skip
    assert "Switched off" in shell.run("autosave", "chosen.ipynb", "--off").stdout
    assert shell.json("autosave", "chosen.ipynb", "--on")["policy"]["enabled"] is True
    found = shell.json("autosave", "chosen.ipynb", "--default")
    assert set(found["own"].values()) == {None}
    assert shell.json("autosave", "--idle", "20m")["policy"]["idle"] == 1200
    assert shell.json("autosave", "chosen.ipynb")["policy"]["idle"] == 1200
    assert shell.json("autosave", "--default")["policy"]["idle"] == 600
    # Within the administrator's limits.
    said = shell.error("autosave", "chosen.ipynb", "--idle", "1s")
    assert "shorter than the administrator allows" in said
    assert "not a duration" in shell.error("autosave", "--idle", "soon", code=2)


def test_several_servers(home: Home) -> None:
    shell = Shell(home)
    config = {"GpuCkpt": {"lease_interval": 0.5}}
    with JupyterServer(home, config=config) as one, JupyterServer(home, config=config) as two:
        kernels = [s.client.start(home.add_notebook(f"{s.port}.ipynb")) for s in (one, two)]
        # A kernel says which server is meant.
        for kernel in kernels:
            assert shell.json("save", kernel.id)["kernel_id"] == kernel.id
        # Nothing else does.
        said = shell.error("kernels", code=2)
        assert one.base_url in said and two.base_url in said and "--url" in said
        (listed,) = shell.json("kernels", "--url", f"{two.base_url}lab?token={two.token}")
        assert listed["id"] == kernels[1].id
        # In a server's own terminal it is that server.
        (listed,) = Shell(home, JUPYTER_SERVER_URL=one.base_url).json("kernels")
        assert listed["id"] == kernels[0].id
        # A roll-back goes to the server that runs the kernel.
        kernels[1].run("x = 1")
        (state,) = shell.json("states", "--kernel", kernels[1].id, "--url", one.base_url)
        shell.run("restore", state["id"])
        assert "NameError" in str(kernels[1].execute("x").error)
        # Another one gets it only where that is said, and then it is gone from the first.
        there = ("--url", one.base_url)
        assert "still runs, in another" in shell.error("restore", state["id"], *there)
        told = two.client.events()
        shell.run("restore", state["id"], "--take-over", *there)
        told.wait_for("kernel", action="fenced", kernel_id=kernels[1].id)
        assert kernels[1].id in {k["id"] for k in one.client.get("api/kernels")}
        wait_for("two let go", lambda: not two.client.get("api/kernels"), 20)


def test_tokens(home: Home) -> None:
    with JupyterServer(home, token="the-right-one") as server:
        stranger = Shell(Home(home.path.parent / "stranger"))
        said = stranger.error("kernels", "--url", server.base_url)
        assert "does not let this command in" in said and "JUPYTER_TOKEN" in said
        assert stranger.json("kernels", "--url", server.base_url, code=1)["error"]["reason"] == (
            "forbidden"
        )
        assert stranger.json("kernels", "--url", server.base_url, "--token", server.token) == []
        knowing = Shell(stranger.home, JUPYTER_TOKEN=server.token)
        assert knowing.json("kernels", "--url", server.base_url) == []


def test_a_server_without_authentication(home: Home) -> None:
    config = {"ServerApp": {"disable_check_xsrf": False}}
    with JupyterServer(home, token="", config=config) as server:
        # Its XSRF check wants a cookie and a header that agree.
        answer = requests.post(
            f"{server.base_url}api/kernels",
            json={"name": "python3"},
            cookies={"_xsrf": "0" * 32},
            headers={"X-XSRFToken": "0" * 32},
            timeout=30,
        )
        kernel_id = answer.json()["id"]
        assert Shell(home).json("save", kernel_id)["status"] == "done"


def test_finds_the_servers_that_jupyter_server_list_finds(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(shell.home.data / "runtime"))
    ended = shell.home.data / "runtime" / "jpserver-0.json"
    ended.write_text(json.dumps({"url": "http://localhost:1/", "pid": 2**22 + 1}))
    found = [(server.url, server.token, server.root_dir) for server in running_servers()]
    assert found
    assert found == [(s["url"], s["token"], s["root_dir"]) for s in list_running_servers()]


def test_a_server_on_a_unix_socket(home: Home) -> None:
    (home.config / "jupyter_server_config.json").write_text(json.dumps(extension_config()))
    shell = Shell(home)
    options = ["--no-browser", "--allow-root", f"--sock={home.path / 'server.sock'}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyter_server", "--ServerApp.base_url=/user/me/", *options],
        env=shell.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for("the server listens", (home.path / "server.sock").exists, 60)
        assert wait_for("it is found", lambda: shell.attempt("kernels"), 60).stdout == (
            "No kernel is running.\n"
        )
    finally:
        process.terminate()
        process.wait(30)


def test_a_server_without_the_extension(home: Home) -> None:
    with JupyterServer(home, extension=False):
        said = Shell(home).error("kernels")
        assert "does not have jupyter-gpu-ckpt enabled" in said


def test_without_a_server(home: Home) -> None:
    shell = Shell(home)
    for command in (["kernels"], ["save", "x"], ["states"], ["inspect", "x"], ["lost"], ["gc"]):
        said = shell.error(*command)
        assert said.startswith("Error: No Jupyter server is running here.\nHint: ")
    assert shell.json("kernels", code=1)["error"]["reason"] == "no_server"
    # The doctor comes to the house.
    assert shell.json("doctor")["can_capture"] is True
    assert shell.run("doctor").stdout.endswith("Kernels can be saved on this node.\n")
    said = shell.error("kernels", "--url", "http://127.0.0.1:9/")
    assert "cannot be reached" in said
    assert "not the URL of a server" in shell.error("kernels", "--url", "lab", code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["save"],
        ["restore"],
        ["rm"],
        ["frobnicate"],
        ["states", "--colour"],
        ["restore", "x", "--path", "a.ipynb"],
        ["restore", "x", "--new", "--take-over"],
        ["lost", "--restore", "a", "--dismiss", "b"],
        ["save", "x", "--timeout", "-1"],
    ],
)
def test_a_wrong_command_line_ends_with_2(home: Home, arguments: list[str]) -> None:
    assert "Error: " in Shell(home).error(*arguments, code=2)


def test_unknown_things(shell: Shell, start: Start) -> None:
    start()
    said = shell.error("save", "nobody.ipynb")
    assert "No running kernel has the id or notebook path nobody.ipynb" in said
    for command in ("inspect", "restore", "rm"):
        assert shell.json(command, "nothing", code=1)["error"]["reason"] == "unknown_state"
    assert shell.json("inspect", "../../store", code=1)["error"]["reason"] == "unknown_state"
    assert shell.json("lost", "--restore", "nobody", code=1)["error"]["reason"] == "unknown_kernel"


def test_one_mistyped_state_keeps_rm_from_deleting_any(shell: Shell, start: Start) -> None:
    kernel = start()
    state = shell.json("save", kernel.id)["result"]["state_id"]
    assert "Error: " in shell.error("rm", state, "mistyped")
    assert [s["id"] for s in shell.json("states", "--kernel", kernel.id)] == [state]


def test_a_prefix_of_two_states_is_ambiguous(shell: Shell, start: Start) -> None:
    kernel = start()
    states = [shell.json("save", kernel.id)["result"]["state_id"] for _ in range(2)]
    prefix = states[0][: next(i for i in range(99) if states[0][i] != states[1][i])]
    said = shell.error("inspect", prefix, code=2)
    assert all(state in said for state in states)


def test_a_label_cannot_steer_the_terminal(shell: Shell, start: Start) -> None:
    kernel = start()
    shell.run("save", kernel.id, "--label", "[red]nice[/red] \x1b[2Jtry")
    listed = shell.run("states", "--kernel", kernel.id).stdout
    assert "[red]nice[/red] ?[2Jtry" in listed


def test_output_ends_quietly_when_the_reader_has_enough(shell: Shell, start: Start) -> None:
    start()
    assert shell.into("true", "kernels").stderr == ""


def test_the_documentation_names_every_command_and_option() -> None:
    text = (REPOSITORY / "docs" / "cli.md").read_text()
    for name, command in cli.commands.items():
        assert f"`{name}" in text, name
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    assert option in text, f"{name} {option}"
