"""A server in a Slurm job that reaches its time limit: the next job goes on where it was."""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import Any

import pytest
import requests

from tests.harness.client import Client, wait_for
from tests.harness.ports import free_port
from tests.harness.server import Home, extension_config
from tests.harness.slurm import Slurm, cluster

pytestmark = pytest.mark.root

TOKEN = "secret-of-the-tests"
#: Seconds before a job's limit at which its kernels are saved.
LEAD = 12.0


def submit(slurm: Slurm, home: Home, number: int) -> tuple[str, Client]:
    """Submit a job with a server, as docs/autosave.md has it, and wait until that answers."""
    port = free_port()
    config: dict[str, Any] = {
        "ServerApp": {
            "open_browser": False, "port": port, "port_retries": 0, "ip": "127.0.0.1",
            "allow_root": True, "root_dir": str(home.notebooks), "log_level": "INFO",
            "jpserver_extensions": {
                **dict.fromkeys(("jupyter_lsp", "jupyterlab", "notebook", "notebook_shim"), False),
                "jupyter_gpu_ckpt": True,
            },
        },
        "IdentityProvider": {"token": TOKEN},
        "GpuCkpt": {"restore_on_start": "always"},
        # Nothing but the limit is a reason to save.
        "AutoSave": {"idle": 0.0, "interval": 0.0, "long_cell": 0.0},
        "SlurmNotice": {"lead": LEAD, "poll": 1.0},
    }  # fmt: skip
    for name, traits in extension_config().items():
        config[name] = {**traits, **config.get(name, {})}
    path = home.config / f"job_{number}.json"
    path.write_text(json.dumps(config))
    argv = [sys.executable, "-m", "jupyter_server", f"--config={path}"]
    job = slurm.submit(
        f"#!/bin/bash\nexec {shlex.join(argv)}\n",
        "--time=3",
        environment=home.environment(),
        output=home.path / f"job-{number}.log",
    )
    client = Client(f"http://127.0.0.1:{port}/", TOKEN)

    def answers() -> bool:
        try:
            return client.get("api/status", timeout=5) is not None
        except requests.RequestException:
            return False

    wait_for("the job's server answers", answers, 40)
    return job, client


@pytest.mark.timeout(200)
def test_the_next_job_goes_on_where_the_last_one_was_killed(home: Home) -> None:
    with cluster() as slurm:
        job, client = submit(slurm, home, 1)
        kernel = client.start(home.add_notebook("train.ipynb"))
        mark = kernel.run("import os, time; epochs = []; mark = os.urandom(8).hex(); print(mark)")
        kernel.begin(
            "while True:\n  epochs.append(len(epochs)); print(len(epochs), flush=True)\n"
            "  time.sleep(.05)"
        )
        wait_for("it trains", lambda: client.execution_state(kernel.id) == "busy", 20)
        events = client.events()
        # The limit is some minutes. It is made shorter, as administrators do, so that the
        # controller, which looks every half minute, sees it right after it has passed.
        now = time.time()
        slurm.end_job_at(job, slurm.next_look(now + LEAD / 2) - 1)
        told = events.wait_for("server", action="ends", source="slurm", timeout=40)
        assert told["why"] == f"The Slurm job {job} reaches its time limit."
        saved = events.wait_for("server", action="saved", source="slurm")
        assert (saved["saved"], saved["not_saved"]) == (1, [])
        wait_for("the job is over its time", lambda: slurm.state(job) == "TIMEOUT", 60, 0.2)
        client.close()

        again, client = submit(slurm, home, 2)
        assert again != job
        wait_for(
            "the kernel is back",
            lambda: [s["kernel"]["id"] for s in client.get("api/sessions")] == [kernel.id],
            30,
        )
        # Nobody asked for it; the loop goes on, from where it was.
        wait_for("it trains again", lambda: client.execution_state(kernel.id) == "busy", 20)
        back = client.connect(kernel.id, channel="control")

        def counted() -> list[int]:
            said = [m for m in back.messages if m["header"]["msg_type"] == "stream"]
            return [int(number) for m in said for number in m["content"]["text"].split()]

        wait_for("it counts", lambda: len(counted()) > 2, 20)
        went_on = counted()
        assert went_on[0] > 20 and went_on == list(range(went_on[0], went_on[-1] + 1))
        client.post(f"api/kernels/{kernel.id}/interrupt")
        wait_for("it is idle", lambda: client.execution_state(kernel.id) == "idle", 20)
        assert back.run("print(mark)") == mark
        assert (
            back.run(f"print(len(epochs) >= {went_on[-1]}, epochs == list(range(len(epochs))))")
            == "True True"
        )
        states = client.states(kernel=kernel.id)
        assert "preemption" in [state["reason"] for state in states]
        client.close()
