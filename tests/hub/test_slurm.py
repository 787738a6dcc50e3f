"""A hub with batchspawner on a real Slurm: kernels of a job that ends are in the next one."""

from __future__ import annotations

import asyncio
import getpass
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.client import Message, wait_for
from tests.harness.hub import Hub
from tests.harness.server import Home, shared_folder
from tests.harness.slurm import PATH, Slurm, cluster
from tests.hub.test_spawners import job, told

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

ME = getpass.getuser()
#: Seconds before a job's limit at which its kernels are saved.
LEAD = 12.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with cluster() as running:
        yield running


@pytest.fixture(scope="module")
def hub(slurm: Slurm) -> Iterator[Hub]:
    programs = Path(sys.prefix) / "bin"
    with shared_folder("hub-slurm") as shared:
        home = Home(shared / "home")
        conf = slurm.environment()["SLURM_CONF"]
        environment = {**home.environment(), "SLURM_CONF": conf}
        environment["PATH"] = f"{environment['PATH']}:{PATH}"
        config: dict[str, dict[str, Any]] = {
            # Nothing but the limit is a reason to save.
            "AutoSave": {"idle": 0.0, "interval": 0.0, "long_cell": 0.0},
            "SlurmNotice": {"lead": LEAD, "poll": 1.0},
        }
        hub_config: dict[str, dict[str, Any]] = {
            "JupyterHub": {"spawner_class": "batchspawner.SlurmSpawner"},
            "Spawner": {
                "cmd": [str(programs / "jupyterhub-singleuser")],
                "environment": environment, "poll_interval": 1,
            },
            "SlurmSpawner": {
                "exec_prefix": "",
                "batchspawner_singleuser_cmd": str(programs / "batchspawner-singleuser"),
                "req_options": f"--output={shared}/job-%j.log", "req_runtime": "10",
                "state_exechost_exp": "127.0.0.1",
            },
            "GpuCkptHub": {"store_url": str(shared / "states")},
        }  # fmt: skip
        more = f"import os; os.environ.update(SLURM_CONF={conf!r}, PATH={environment['PATH']!r})"
        with Hub(home, config=config, hub_config=hub_config, more=more) as running:
            yield running


def test_kernels_of_a_job_that_the_hub_stops_are_in_the_next_one(slurm: Slurm, hub: Hub) -> None:
    client = hub.start(ME)
    kernel = client.start(hub.home.add_notebook("book.ipynb"))
    kernel.run("x = 41; import os; job = os.environ['SLURM_JOB_ID']; print(job)")
    (first,) = slurm.ask("squeue", "-h", "-o", "%i").split()
    hub.stop(ME)
    wait_for("the job ends", lambda: slurm.state(first) == "COMPLETED", 60)

    client = hub.start(ME)
    (lost,) = client.wait_lost(1)
    assert (lost["kernel_id"], lost["why"]) == (kernel.id, "shutdown")
    client.restore_lost(kernel.id)
    kernel = client.connect(kernel.id)
    after = kernel.run("print(x + 1, job == os.environ['SLURM_JOB_ID'])")
    assert after == "42 False"


def test_kernels_of_a_job_that_is_over_its_time_are_in_the_next_one(slurm: Slurm, hub: Hub) -> None:
    client = hub.client(ME) if hub.server(ME) else hub.start(ME)
    kernel = client.start(hub.home.add_notebook("train.ipynb"))
    mark = kernel.run("import os; mark = os.urandom(8).hex(); print(mark)")
    (first,) = slurm.ask("squeue", "-h", "-o", "%i").split()
    events = client.events()
    # Its limit is made shorter, as administrators do: right before the controller's next look.
    slurm.end_job_at(first, slurm.next_look(time.time() + LEAD / 2) - 1)
    # By Slurm's signal or by what its controller says of the limit, whichever is first.
    told_so = events.wait_for("server", action="ends", timeout=60)
    assert told_so["source"] in ("signal", "slurm")
    saved = events.wait_for("server", action="saved")
    assert saved["saved"] > 0 and saved["not_saved"] == []
    wait_for("the job is over its time", lambda: slurm.state(first) == "TIMEOUT", 60, 0.2)
    client.close()

    # The hub notices; its user clicks on Start again, and finds her kernel as it was.
    hub.wait_stopped(ME)
    client = hub.start(ME)
    assert first not in slurm.ask("squeue", "-h", "-o", "%i").split()

    def offered() -> list[Message]:
        return [lost for lost in client.lost() if lost["kernel_id"] == kernel.id]

    (lost,) = wait_for("it is offered", offered, 60)
    assert lost["state"]["reason"] == "preemption"
    client.restore_lost(kernel.id)
    back = client.connect(kernel.id)
    assert back.run("print(mark)") == mark
    hub.stop(ME)


def test_a_job_that_waits_which_hears_no_signal_is_cancelled(
    slurm: Slurm, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    made, script = job(told("batchspawner.SlurmSpawner", SlurmSpawner={"exec_prefix": ""}))
    made.job_id = slurm.submit(
        script, "--begin=now+1hour", environment=made.get_env(), output=shared / "waits"
    )
    assert slurm.state(made.job_id) == "PENDING"
    asyncio.run(made.cancel_batch_job())
    wait_for("the job is gone", lambda: slurm.state(made.job_id) == "CANCELLED", 30)
