"""In the notebook: magics that ask the server, and callbacks around saves and restores."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.harness.client import KernelClient, wait_for
from tests.harness.node import REPOSITORY
from tests.harness.s3 import KEY, SECRET, S3Server
from tests.harness.server import Home, JupyterServer

Start = Callable[..., KernelClient]


def ask(kernel: KernelClient, magic: str) -> str:
    """Run a magic; returns what the server's answer made of its output."""
    shown = kernel.execute(magic)
    assert shown.error is None, shown.error
    (first,) = shown.on_iopub("display_data")
    number = first["content"]["transient"]["display_id"]

    def answers() -> list[dict[str, Any]]:
        return [
            message["content"]
            for message in list(kernel.messages)
            if message["header"]["msg_type"] == "update_display_data"
            and message["content"]["transient"]["display_id"] == number
        ]

    kernel.wait(f"{magic} is answered", answers, 30)
    return str(answers()[0]["data"]["text/plain"])


def test_magics(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run("%load_ext jupyter_gpu_ckpt")
    assert "no states" in ask(kernel, "%states")
    said = ask(kernel, "%save_state epoch 3")
    (state,) = server.client.states(kernel=kernel.id)
    assert (state["label"], state["reason"]) == ("epoch 3", "user")
    assert state["execution_state"] == "idle"  # saved after the cell, not in it
    assert said.startswith(f"Saved state {state['id']} “epoch 3”")
    listed = ask(kernel, "%states")
    assert state["id"] in listed and "epoch 3" in listed
    assert "idle for 2 min" in ask(kernel, "%autosave_state idle=2m long_cell=off")
    policy = server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}/autosave")["policy"]
    assert (policy["idle"], policy["long_cell"]) == (120, 0)
    ask(kernel, "%autosave_state park=3m shutdown=off preemption=off cull=off")
    policy = server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}/autosave")["policy"]
    switched = {name for name, value in policy.items() if value is False}
    assert switched == {"before_shutdown", "before_preemption", "before_cull"}
    assert (policy["park"], policy["idle"]) == (180, 120), "what was chosen before stays"
    assert "hibernated when idle for 90 min" in ask(kernel, "%autosave_state hibernate=1.5h")
    assert "not saved automatically" in ask(kernel, "%autosave_state off")
    assert "idle for 10 min" in ask(kernel, "%autosave_state default")
    assert "shorter than the administrator allows" in ask(kernel, "%autosave_state idle=1s")
    assert "does not understand" in kernel.execute("%autosave_state idle=soon").stderr
    # What a kernel makes up itself is answered or ignored, and does no harm.
    kernel.run(
        "import comm; c = comm.create_comm(target_name='x', comm_id='jupyter-gpu-ckpt', "
        "primary=False)\n"
        "for data in (1, None, {}, {'ask': 'save', 'id': 3}, {'ask': 'rm -rf', 'id': 'a'}, "
        "{'ask': 'autosave', 'id': 'b', 'set': {'idle': 'x'}}): c.send(data)"
    )
    # Another kernel's are not its own.
    other = start()
    other.run("%load_ext jupyter_gpu_ckpt")
    assert "no states" in ask(other, "%states")
    # All of it still works in the kernel that comes out of the state.
    server.client.restore(state["id"])
    assert state["id"] in ask(kernel, "%states")


def test_callbacks(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run(
        """
%load_ext jupyter_gpu_ckpt
from jupyter_gpu_ckpt.hooks import after_restore, before_save
calls = []

@before_save
def first():
    calls.append("first")

@before_save
def flush():
    calls.append("flush")

@before_save
def fails():
    raise RuntimeError("no such file")

@after_restore
def reconnect():
    calls.append("reconnect")

@after_restore
def resume():
    calls.append("resume")
"""
    )
    kernel.run("@before_save\ndef flush():\n    calls.append('flush, as defined again')")
    operation = server.client.save(kernel)
    assert operation["result"]["warnings"] == []
    assert kernel.run("print(calls)") == "['first', 'flush, as defined again']"
    shown = kernel.execute("calls.append('a cell')")
    assert "no such file" in shown.stderr or any(
        "no such file" in m["content"].get("text", "")
        for m in kernel.messages
        if m["header"]["msg_type"] == "stream"
    )
    server.client.restore(operation["result"]["state_id"])
    called = "['first', 'flush, as defined again', 'reconnect', 'resume']"
    assert kernel.run("print(calls)") == called
    # In the middle of a cell there is no time for them, and the state says so.
    cell = kernel.begin("import time\nprint('on')\ntime.sleep(60)").wait_text("on")
    (warning,) = server.client.save(kernel)["result"]["warnings"]
    assert "callbacks were not called" in warning
    server.client.post(f"api/kernels/{kernel.id}/interrupt")
    cell.finish(20)
    wait_for("it is idle", lambda: server.client.execution_state(kernel.id) == "idle", 10)
    assert kernel.run("print(calls)") == called


def recipe(name: str) -> str:
    """The code that the documentation gives under a heading."""
    text = (REPOSITORY / "docs" / "kernel.md").read_text()
    (code,) = re.findall(rf"^#+ {name}$.*?^```python$(.*?)^```$", text, re.M | re.S)
    return str(code)


def test_the_recipe_for_sqlalchemy(server: JupyterServer, start: Start) -> None:
    kernel = start()
    kernel.run(recipe("Callbacks"))
    kernel.run(
        """
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
engine = create_engine("sqlite:///recipe.db")
session = Session(engine)
session.execute(text("create table numbers (n integer)"))
session.commit()
"""
    )
    kernel.run(recipe("SQLAlchemy"))
    kernel.run("session.execute(text('insert into numbers values (41)'))")  # not committed
    state = server.client.save(kernel)["state_id"]
    read = "print(session.execute(text('select n + 1 from numbers')).scalars().all())"
    assert kernel.run(read) == "[42]"
    server.client.restore(state)
    assert kernel.run(read) == "[42]"
    kernel.run("session.execute(text('insert into numbers values (1)')); session.commit()")
    assert kernel.run(read) == "[42, 2]"
    assert kernel.run("print(engine.pool.checkedin() + engine.pool.checkedout())") == "1"


def test_the_recipe_for_boto3(home: Home, s3_server: S3Server) -> None:
    def environment(key: str) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_server.port}",
        }  # fmt: skip

    bucket = s3_server.bucket
    config = {"GpuCkpt": {"refresh_environment": ["AWS_ACCESS_KEY_ID"]}}
    read = f"s3.get_object(Bucket={bucket!r}, Key='x')['Body'].read()"
    # The state comes from a server whose key is of no use.
    with JupyterServer(home, config=config, environment=environment("expired")) as server:
        kernel = server.client.start(home.add_notebook("book.ipynb"))
        kernel.run(recipe("Callbacks"))
        kernel.run("import boto3; s3 = boto3.client('s3')")
        kernel.run(recipe("boto3"))
        assert "InvalidAccessKeyId" in (kernel.execute(read).error or "")
        server.client.save(kernel)
        server.kill()
    with JupyterServer(home, config=config, environment=environment(KEY)) as server:
        server.client.wait_lost(1)
        server.client.restore_lost(kernel.id)
        kernel = server.client.connect(kernel.id)
        kernel.run(f"s3.put_object(Bucket={bucket!r}, Key='x', Body=b'41')")
        state = server.client.save(kernel)["state_id"]
        # Its connection is closed by a restore, and opened anew.
        (closed,) = server.client.restore(state)["result"]["warnings"]
        assert str(s3_server.port) in closed
        assert kernel.run(f"print({read})") == "b'41'"
