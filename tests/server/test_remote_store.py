"""Servers whose states are elsewhere: the disk of one is lost, another brings its kernel back."""

from __future__ import annotations

import secrets
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt.store.objects import Objects
from tests.harness.client import wait_for
from tests.harness.s3 import ObjectServer, Proxy, S3Server, options
from tests.harness.server import Home, JupyterServer
from tests.server.race import one_gets_it

pytestmark = pytest.mark.root


def config(url: str, port: int, disk: Path, **more: Any) -> dict[str, Any]:
    """Configuration of a server on a node with this disk, whose states are on S3."""
    given = {
        "store_url": url,
        "store_options": options(port),
        "owner": "ada",
        "local_tier_dir": str(disk),
        "store_timeout": 3.0,
        **more,
    }
    return {"GpuCkpt": given}


@pytest.fixture
def url(s3_server: S3Server) -> str:
    return f"s3://{s3_server.bucket}/{secrets.token_hex(4)}/{{username}}"


def uploaded(url: str, system: ObjectServer) -> list[str]:
    """Names of the states' manifests that have arrived."""
    objects = Objects(url.replace("{username}", "ada/ada"), system.options(system.port))
    try:
        return [name for name in objects.list("kernels") if "/states/" in name]
    finally:
        objects.close()


@pytest.mark.parametrize("system", ["s3", "gcs", "azure"], indirect=True)
def test_a_lost_disk(home: Home, shared: Path, system: ObjectServer) -> None:
    url = f"{system.protocol}://{system.bucket}/{secrets.token_hex(4)}/{{username}}"
    there = system.options(system.port)

    def given(disk: str) -> dict[str, Any]:
        return config(url, system.port, shared / disk, store_options=there)

    with JupyterServer(home, config=given("disk-a")) as server:
        kernel = server.client.start(home.add_notebook("book.ipynb"))
        kernel.run("import os; data = os.urandom(5 << 20); import hashlib; x = 41")
        digest = kernel.run("print(hashlib.sha256(data).hexdigest())")
        events = server.client.events()
        state = server.client.save(kernel)["state_id"]
        events.wait_for("kernel", action="state_durable", kernel_id=kernel.id, state_id=state)
        (listed,) = server.client.states()
        assert listed["durable"] and uploaded(url, system)
        server.kill()
    shutil.rmtree(shared / "disk-a")
    with JupyterServer(home, config=given("disk-b")) as server:
        (lost,) = server.client.wait_lost(1)
        assert (lost["kernel_id"], lost["state"]["id"]) == (kernel.id, state)
        server.client.restore_lost(kernel.id)
        again = server.client.connect(kernel.id)
        assert again.run("print(x + 1)") == "42"
        assert again.run("print(hashlib.sha256(data).hexdigest())") == digest


def test_a_system_that_is_away(home: Home, shared: Path, url: str, s3_server: S3Server) -> None:
    proxy = Proxy(s3_server.port)
    given = config(url, proxy.port, shared / "disk", upload_timeout=20.0)
    try:
        with JupyterServer(home, config=given) as server:
            kernel = server.client.start(home.add_notebook("book.ipynb"))
            kernel.run("x = 41")
            wait_for("its record arrives", lambda: proxy.count("PUT", "/kernel.json"), 20)
            proxy.down()
            state = server.client.save(kernel)["state_id"]
            assert len(server.client.states()) == 1

            def warned() -> bool:
                checks = server.client.get("gpu-ckpt/api/doctor")["checks"]
                return "remote store" in [c["name"] for c in checks if c["status"] == "warning"]

            wait_for("the doctor tells", warned, 20)
            assert kernel.run("print(x + 1)") == "42"
            proxy.heal()
            server.process.terminate()
            server.process.wait(60)
        # That state, and what was saved at the end.
        assert state in "".join(uploaded(url, s3_server))
        assert "Not uploaded" not in server.log()
    finally:
        proxy.stop()


def test_a_network_that_fails(home: Home, shared: Path, url: str, s3_server: S3Server) -> None:
    """Whatever fails on the way, the kernel goes on, and its last good state comes back."""
    proxy = Proxy(s3_server.port)
    try:
        with JupyterServer(home, config=config(url, proxy.port, shared / "disk-a")) as server:
            kernel = server.client.start(home.add_notebook("book.ipynb"))
            kernel.run("import os; data = os.urandom(20 << 20); import hashlib; done = []")
            digest = kernel.run("print(hashlib.sha256(data).hexdigest())")
            states: list[str] = []
            for kind in ("503", "cut request", "lost put", "hang", "slow"):
                kernel.run(f"done.append({kind!r})")
                events, before = server.client.events(), proxy.count("PUT", ".pack")
                if kind == "slow":
                    proxy.rate = 8 << 20
                else:
                    proxy.fault(kind, "PUT", ".pack")  # type: ignore[arg-type]
                states.append(server.client.save(kernel)["state_id"])
                assert kernel.run("print(done[-1])") == kind
                events.wait_for(
                    "kernel", action="state_durable", kernel_id=kernel.id, state_id=states[-1],
                    timeout=60,
                )  # fmt: skip
                if kind != "slow":
                    assert proxy.count("PUT", ".pack") >= before + 2, "it was not tried again"
                proxy.rate = None
            assert server.client.states(kernel=kernel.id)[0]["id"] == states[-1]
            server.kill()
        shutil.rmtree(shared / "disk-a")
        # Of the newest state a pack never has its length; those before it come after a while.
        proxy.fault("short response", "GET", f"{states[-1]}-0", times=9999)
        for state, failure in (
            (states[0], "503"), (states[0], "cut response"),
            (states[-2], "short response"), (states[-2], "hang"),
        ):  # fmt: skip
            proxy.fault(failure, "GET", f"{state}-0")  # type: ignore[arg-type]
        with JupyterServer(home, config=config(url, proxy.port, shared / "disk-b")) as server:
            (lost,) = server.client.wait_lost(1)
            assert lost["state"]["id"] == states[-1]
            begun = server.client.post(f"gpu-ckpt/api/lost/{kernel.id}/restore")
            failed = server.client.finished(begun)
            assert (failed["status"], failed["error"]["reason"]) == ("failed", "state_damaged")
            (lost,) = server.client.wait_lost(1)
            assert lost["state"]["id"] == states[-2]
            server.client.restore_lost(kernel.id)
            for state in (states[0], states[-2]):
                assert proxy.count("GET", f"{state}-0") >= 3, "it was not tried again"
            again = server.client.connect(kernel.id)
            assert again.run("print(done[-1])") == "hang"
            assert again.run("print(hashlib.sha256(data).hexdigest())") == digest
    finally:
        proxy.stop()


def test_states_are_uploaded_before_an_end_that_is_foretold(
    home: Home, shared: Path, url: str, s3_server: S3Server
) -> None:
    proxy = Proxy(s3_server.port)
    try:
        with JupyterServer(home, config=config(url, proxy.port, shared / "disk")) as server:

            def foretold(seconds: float) -> dict[str, Any]:
                """Foretell an end and wait until all is done for it."""
                server.client.post("gpu-ckpt/api/endings", {"seconds": seconds})

                def done() -> dict[str, Any] | None:
                    ending = server.client.get("gpu-ckpt/api/endings")[0]
                    return ending if ending["phase"] == "done" else None

                return dict(wait_for("what can be done is done", done, seconds + 5))

            kernel = server.client.start(home.add_notebook("book.ipynb"))
            kernel.run("x = 41")
            ending = foretold(60)
            assert ([k["saved"] for k in ending["kernels"]], ending["not_uploaded"]) == ([True], [])
            (first,) = server.client.states(kernel=kernel.id)
            assert first["id"] in "".join(uploaded(url, s3_server))
            # What does not arrive in time is named.
            proxy.down()
            kernel.run("x = 42")
            ending = foretold(6)
            newest = server.client.states(kernel=kernel.id)[0]
            assert newest["id"] != first["id"]
            assert ending["not_uploaded"] == [newest["id"]]
            server.kill()
    finally:
        proxy.stop()


def test_of_two_servers_that_share_only_a_remote_store_one_gets_a_lost_kernel(
    home: Home, shared: Path, url: str, s3_server: S3Server
) -> None:
    def given(disk: str) -> dict[str, Any]:
        return config(url, s3_server.port, shared / disk)

    with JupyterServer(home, config=given("disk-a")) as server:
        kernel = server.client.start(home.add_notebook("book.ipynb"))
        kernel.run("x = 41")
        events = server.client.events()
        state = server.client.save(kernel)["state_id"]
        events.wait_for("kernel", action="state_durable", kernel_id=kernel.id, state_id=state)
        server.kill()
    with (
        JupyterServer(home, config=given("disk-b")) as one,
        JupyterServer(home, config=given("disk-c")) as other,
    ):
        both = (one, other)
        for server in both:
            server.client.wait_lost(1)
        start = threading.Barrier(2, timeout=30)

        def bring_back(server: JupyterServer) -> dict[str, Any]:
            start.wait()
            begun = server.client.post(f"gpu-ckpt/api/lost/{kernel.id}/restore")
            return server.client.finished(begun)

        winner, loser, said = one_gets_it(both, bring_back)
        assert "still runs, in another Jupyter server" in said
        assert loser.client.lost() == []
        assert winner.client.connect(kernel.id).run("print(x + 1)") == "42"
