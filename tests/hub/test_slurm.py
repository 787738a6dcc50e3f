"""A hub with batchspawner on a real Slurm: kernels of a job that it stops are in the next one."""

from __future__ import annotations

import asyncio
import getpass
import sys
from pathlib import Path

import pytest

from tests.harness.client import wait_for
from tests.harness.hub import Hub
from tests.harness.server import Home
from tests.harness.slurm import PATH, cluster
from tests.hub.test_spawners import job, told

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


def test_kernels_of_a_job_that_the_hub_stops_are_in_the_next_one(
    home: Home, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, programs = getpass.getuser(), Path(sys.prefix) / "bin"
    with cluster() as slurm:
        conf = slurm.environment()["SLURM_CONF"]
        environment = {**home.environment(), "SLURM_CONF": conf}
        environment["PATH"] = f"{environment['PATH']}:{PATH}"
        hub_config = {
            "JupyterHub": {"spawner_class": "batchspawner.SlurmSpawner"},
            "Spawner": {
                "cmd": [str(programs / "jupyterhub-singleuser")],
                "environment": environment,
            },
            "SlurmSpawner": {
                "exec_prefix": "",
                "batchspawner_singleuser_cmd": str(programs / "batchspawner-singleuser"),
                "req_options": f"--output={shared}/job-%j.log",
                "state_exechost_exp": "127.0.0.1",
            },
            "GpuCkptHub": {"store_url": str(shared / "states")},
        }
        more = f"import os; os.environ.update(SLURM_CONF={conf!r}, PATH={environment['PATH']!r})"
        with Hub(home, hub_config=hub_config, more=more) as hub:
            client = hub.start(me)
            kernel = client.start(home.add_notebook("book.ipynb"))
            kernel.run("x = 41; import os; job = os.environ['SLURM_JOB_ID']; print(job)")
            (first,) = slurm.ask("squeue", "-h", "-o", "%i").split()
            hub.stop(me)
            wait_for("the job ends", lambda: slurm.state(first) == "COMPLETED", 60)

            client = hub.start(me)
            (lost,) = client.wait_lost(1)
            assert (lost["kernel_id"], lost["why"]) == (kernel.id, "shutdown")
            client.restore_lost(kernel.id)
            kernel = client.connect(kernel.id)
            after = kernel.run("print(x + 1, job == os.environ['SLURM_JOB_ID'])")
            assert after == "42 False"

        # A job that waits, which hears no signal, is cancelled.
        for name, value in slurm.environment().items():
            monkeypatch.setenv(name, value)
        made, script = job(told("batchspawner.SlurmSpawner", SlurmSpawner={"exec_prefix": ""}))
        made.job_id = slurm.submit(
            script, "--begin=now+1hour", environment=made.get_env(), output=shared / "waits"
        )
        assert slurm.state(made.job_id) == "PENDING"
        asyncio.run(made.cancel_batch_job())
        wait_for("the job is gone", lambda: slurm.state(made.job_id) == "CANCELLED", 30)
