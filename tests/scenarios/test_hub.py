"""JupyterHub stops a server that nobody uses: its user finds the kernels at the next start."""

from __future__ import annotations

from tests.harness.client import KernelClient
from tests.harness.hub import Hub
from tests.harness.server import Home

SLOW_TO_SAVE = """
import time
x = 41
%load_ext jupyter_gpu_ckpt
from jupyter_gpu_ckpt.hooks import before_save
before_save(lambda: time.sleep(3))
"""


def environment_of(kernel: KernelClient) -> dict[str, str]:
    said = kernel.run("import os\nfor pair in os.environ.items(): print(*pair, sep='=')")
    return dict(line.partition("=")[::2] for line in said.splitlines())


def test_a_server_that_the_hub_culls_saves_its_kernels_first(home: Home) -> None:
    # The hub sends SIGINT, and where that takes longer SIGTERM; here in the middle of a save.
    impatient = {"LocalProcessSpawner": {"interrupt_timeout": 1}}
    with Hub(home, hub_config=impatient) as hub:
        client = hub.start("alice")
        server = hub.server_environment("alice")
        kernel = client.start(home.add_notebook("book.ipynb"))
        kernel.run(SLOW_TO_SAVE)
        before = environment_of(kernel)
        client.close()
        with hub.culling(1):
            hub.wait_stopped("alice")
        assert "its kernels are saved first" in hub.log()

        client = hub.start("alice")
        (lost,) = client.wait_lost(1)
        assert (lost["kernel_id"], lost["why"]) == (kernel.id, "shutdown")
        assert lost["state"]["reason"] == "shutdown"
        client.restore_lost(kernel.id)
        kernel = client.connect(kernel.id)
        assert kernel.run("print(x + 1)") == "42"

        # No token of the hub is in a kernel, or its state; places are those of the new server.
        restarted, after = hub.server_environment("alice"), environment_of(kernel)
        assert restarted["JUPYTERHUB_API_TOKEN"] != server["JUPYTERHUB_API_TOKEN"]
        tokens = {server["JUPYTERHUB_API_TOKEN"], restarted["JUPYTERHUB_API_TOKEN"]}
        assert not tokens & {*before.values(), *after.values()}
        assert before["JUPYTERHUB_SERVICE_URL"] == server["JUPYTERHUB_SERVICE_URL"]
        assert after["JUPYTERHUB_SERVICE_URL"] == restarted["JUPYTERHUB_SERVICE_URL"]
