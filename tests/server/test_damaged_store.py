"""A server starts on whatever lies in its store: what cannot be read is told once, and in words."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.store import KernelRecord, Lease, StateMeta, StateStore
from tests.harness.client import wait_for
from tests.harness.server import Home, JupyterServer
from tests.server.rest import Api

#: Often, so that what is said at every try is said often.
CONFIG = {"GpuCkpt": {"lease_interval": 0.2, "lease_ttl": 1.0}}
ENDED = Lease(
    node_id="n", hostname="node-a", boot_id="b", server_pid=1, server_start=1, renewed=1, ttl=0
)


def lost(home: Home, kernel_id: str, **meta: object) -> str:
    """Have a lost kernel in the store, with a state of which only its description matters here."""
    store = StateStore(home.store, getpass.getuser())
    store.put_kernel(
        KernelRecord(kernel_id=kernel_id, kernel_name="python3", display_name="P", lease=ENDED)
    )
    image = home.path / "image"
    image.mkdir(exist_ok=True)
    (image / "pages-1.img").write_bytes(b"page")
    with store.begin(kernel_id) as writer:
        writer.add_tree(image)
        return writer.commit(
            StateMeta(
                kernel_id=kernel_id, kernel_name="python3", display_name="P", language="python",
                path=f"{kernel_id}.ipynb", **meta,  # type: ignore[arg-type]
            )
        ).id  # fmt: skip


def warnings(server: JupyterServer) -> list[str]:
    """The extension's warnings in the server's log, in which there is nothing worse."""
    log = server.log_path.read_text(errors="replace")
    assert "Traceback" not in log, log
    ours = [line for line in log.splitlines() if "GpuCkptApp]" in line]
    assert not [line for line in ours if line.startswith(("[E ", "[C "))], ours
    return [line for line in ours if line.startswith("[W ")]


def test_what_is_damaged_is_named_and_the_rest_is_offered(home: Home) -> None:
    good = lost(home, "good")
    kernels = home.store / getpass.getuser() / "kernels"
    # A record of another version, one cut off, and a folder in the place of one.
    for name in ("other", "cut", "folder"):
        lost(home, name)
    record = json.loads((kernels / "other/kernel.json").read_text())
    (kernels / "other/kernel.json").write_text(json.dumps(record | {"lease": {"until": 5}}))
    (kernels / "cut/kernel.json").write_text('{"kernel_id"')
    (kernels / "folder/kernel.json").unlink()
    (kernels / "folder/kernel.json").mkdir()
    # The manifest of a state cut off, and one of a version that is to come.
    cut = lost(home, "states")
    path = kernels / f"states/states/{cut}.json"
    path.write_bytes(path.read_bytes()[:100])
    # A state and a choice in words that nobody knows.
    later = lost(home, "later", node={"hostname": "x", "gpus": ["A"], "criu": 5})
    record = json.loads((kernels / "later/kernel.json").read_text())
    (kernels / "later/kernel.json").write_text(json.dumps(record | {"autosave": {"idle": "x"}}))
    # And what never was one.
    (kernels / "notes.txt").write_text("?")
    (kernels / "an old one").mkdir()
    (kernels / "an old one/kernel.json").write_text('{"kernel_id": "an old one"}')
    (home.data / "gpu-ckpt/autosave.json").write_text("{")
    (home.data / "gpu-ckpt/spool").mkdir(mode=0o700)
    (home.data / "gpu-ckpt/spool/a file").touch()

    with JupyterServer(home, config=CONFIG) as server:
        api = Api(server)
        offered = server.client.wait_lost(2)
        assert {one["kernel_id"] for one in offered} == {"good", "later"}
        assert good in [one["state"]["id"] for one in offered]
        kernel = server.client.start(home.add_notebook("n.ipynb"))
        assert kernel.run("print(6 * 7)") == "42"
        told = wait_for("it is told", lambda: warnings(server), 20)
        assert len(told) == 1, told
        (warning,) = told
        assert "4 things in the state store cannot be read" in warning
        assert "jupyter gpu-ckpt doctor" in warning
        for name in ("other", "cut", "folder", cut):
            assert name in warning
        # The same by the doctor, each with what to do.
        told = [check for check in api.get("/doctor")["checks"] if "damaged" in check["name"]]
        assert len(told) == 4
        assert all("jupyter gpu-ckpt" in check["hint"] for check in told)
        # What is understood only in part is shown, and says why it cannot be restored.
        described = api.get(f"/states/{later}")
        assert described["restorable"] is False
        assert "another version" in described["differences"][0]["message"]
        assert api.failed(f"/states/{later}/restore")["reason"] == "not_restorable"
        assert len(warnings(server)) == 2  # the restore's own


def other_format(number: int) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.write_text(json.dumps({"format": number, "key": "00" * 32, "key_check": "x"}))

    return write


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (other_format(1), "mv "),
        (other_format(99), "Upgrade jupyter-gpu-ckpt"),
        (lambda path: path.write_text("{"), "backup"),
        (lambda path: path.unlink(), "backup"),
        (lambda path: path.parent.parent.chmod(0o777), "chmod go-w"),
    ],
    ids=["older", "newer", "damaged", "gone", "open to others"],
)
def test_a_store_that_cannot_be_used_is_one_warning(
    home: Home, harm: Callable[[Path], object], words: str
) -> None:
    lost(home, "good")
    harm(home.store / getpass.getuser() / "store.json")
    with JupyterServer(home, config=CONFIG) as server:
        kernel = server.client.start(home.add_notebook("n.ipynb"))
        assert kernel.run("x = 41; print(x + 1)") == "42"
        time.sleep(1)  # five more tries, all of which say the same
        server.client.delete(f"api/kernels/{kernel.id}")
        (warning,) = warnings(server)
        assert words in warning
        server.stop()
        assert len(warnings(server)) == 1
