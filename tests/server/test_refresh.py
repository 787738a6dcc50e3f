"""A kernel that another server restores gets that server's tokens, before anything else runs."""

from __future__ import annotations

from tests.harness.server import Home, JupyterServer

SETUP = """
%load_ext jupyter_gpu_ckpt
import os
from jupyter_gpu_ckpt.hooks import after_restore
os.environ["AWS_PROFILE"] = "mine"

@after_restore
def reconnect():
    global seen
    seen = os.environ["AWS_SESSION_TOKEN"]
"""
NAMES = ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "OTHER", "JUPYTERHUB_API_TOKEN")
CONFIG = {"GpuCkpt": {"refresh_environment": ["AWS_*", "JUPYTERHUB_API_TOKEN"]}}


def test_another_servers_tokens(home: Home) -> None:
    old = {"AWS_SESSION_TOKEN": "old-token", "AWS_PROFILE": "old", "OTHER": "old"}
    new = {"AWS_SESSION_TOKEN": "it's a new-token", "AWS_PROFILE": "new", "OTHER": "new"}
    with JupyterServer(home, config=CONFIG, environment=old) as server:
        path = home.add_notebook("work.ipynb")
        kernel = server.client.start(path)
        kernel.run(SETUP)
        server.client.save(kernel)
        server.kill()
    new |= {"AWS_REGION": "here", "JUPYTERHUB_API_TOKEN": "hub-token"}
    with JupyterServer(home, config=CONFIG, environment=new) as server:
        (lost,) = server.client.wait_lost(1)
        server.client.restore_lost(lost["kernel_id"])
        kernel = server.client.connect(lost["kernel_id"])
        shown = kernel.run(f"print(seen, *(os.environ.get(name) for name in {NAMES}), sep='|')")
        assert shown == "it's a new-token|it's a new-token|mine|here|old|None"
        assert kernel.run("print([n for n in dir() if 'given' in n or n == 'new'])") == "[]"
        # A state saved by the first server, in the place of the kernel of the second.
        server.client.restore(lost["state"]["id"])
        assert kernel.run("print(seen)") == "it's a new-token"
        assert server.client.get(f"gpu-ckpt/api/kernels/{kernel.id}")["restored_from"] is not None
        for text in (server.log(10_000), server.client.states()):
            assert "new-token" not in str(text)
    for file in (*home.data.rglob("*.json"), *home.data.rglob("*.log")):
        assert "new-token" not in file.read_text()
