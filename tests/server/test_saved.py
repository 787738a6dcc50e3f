"""What is in a state, whether it is whole, what it costs; pins and labels."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt import describe
from jupyter_gpu_ckpt.store import StateMeta, StateRecord
from tests.harness.client import KernelClient
from tests.harness.server import Home, JupyterServer
from tests.server.rest import Api
from tests.server.shell import Shell

MB = 1_000_000

SETUP = """
import mmap, os
data = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
data.write(os.urandom(16 << 20))
shared = mmap.mmap(-1, 4 << 20)
shared.write(os.urandom(4 << 20))
"""


@pytest.fixture
def shell(lasting_home: Home, server: JupyterServer) -> Shell:
    """A shell beside the running server."""
    return Shell(lasting_home)


@pytest.fixture
def two_states(
    api: Api, lasting_home: Home, start: Callable[..., KernelClient]
) -> Iterator[tuple[str, str]]:
    """A state with 20 MiB of data, and one after it in which a few MiB have changed."""
    kernel = start()
    kernel.run(SETUP)
    older = api.done(f"/kernels/{kernel.id}/save")["state_id"]
    kernel.run("data[4 << 20 : 6 << 20] = os.urandom(2 << 20)")
    newer = api.done(f"/kernels/{kernel.id}/save", {"label": "after"})["state_id"]
    yield older, newer
    for state in (older, newer):
        api.delete(f"/states/{state}", status=204)


def by_kind(contents: Any, what: str) -> dict[str, int]:
    return {kind["kind"]: kind[what] for kind in contents["kinds"]}


def packs(home: Home, state: str) -> list[Path]:
    return sorted(home.store.glob(f"*/packs/*/{state}-*.pack"))


def spoil(path: Path, keep: int = 0) -> None:
    """Overwrite the first blocks of a pack with zeros."""
    with path.open("r+b") as file:
        file.seek(keep)
        file.write(bytes(64))


def test_contents_and_cost(api: Api, two_states: tuple[str, str]) -> None:
    older, newer = two_states
    first, second = (api.get(f"/states/{state}/contents") for state in two_states)
    assert (first["parent"], second["parent"]) == (None, older)
    for contents in (first, second):
        sizes = by_kind(contents, "size")
        assert set(sizes) == {"anon", "python", "libraries", "shared", "gpu", "files", "other"}
        assert sum(sizes.values()) == contents["size"]
        assert sizes["anon"] > 16 * MB
        assert sizes["shared"] == 4 << 20
        assert sizes["python"] > 5 * MB
        assert sizes["gpu"] == 0
    new = by_kind(second, "new")
    assert new["shared"] == 0
    assert 2 * MB < new["anon"] < 6 * MB
    assert by_kind(first, "new")["shared"] == 4 << 20

    listed = {state["id"]: state for state in api.get("/states")}
    assert listed[newer]["parent"] == older
    assert 2 * MB < listed[newer]["cost"] < listed[newer]["size"]
    assert api.get(f"/states/{newer}")["size"] == second["size"]


def test_what_will_not_come_back(
    api: Api, shell: Shell, lasting_home: Home, start: Callable[..., KernelClient]
) -> None:
    kernel = start()
    plain = api.done(f"/kernels/{kernel.id}/save")["state_id"]
    nothing: dict[str, object] = {"connections": [], "devices": [], "files": [], "left_out": 0}
    assert api.get(f"/states/{plain}")["outside"] == nothing
    log = lasting_home.path / "epochs.log"
    with socket.create_server(("127.77.0.1", 5432)):
        kernel.run(
            "import socket; database = socket.create_connection(('127.77.0.1', 5432))\n"
            f"log = open({str(log)!r}, 'a'); messages = open('/dev/kmsg', 'rb', 0)\n"
            "for name in range(30): globals()[f'f{name}'] = open(f'part-{name:02}.bin', 'wb')"
        )
        state = api.done(f"/kernels/{kernel.id}/save")["state_id"]

    found = api.get(f"/states/{state}")["outside"]
    database = {
        "protocol": "tcp", "address": "127.77.0.1", "port": 5432, "service": "postgresql",
        "incoming": False, "count": 1,
    }  # fmt: skip
    assert found["connections"] == [database]
    assert found["devices"] == ["/dev/kmsg"]
    assert {"path": str(log), "mode": "append"} in found["files"]
    assert (len(found["files"]), found["left_out"]) == (24, 7)
    listed = {one["id"]: one for one in api.get("/states", kernel=kernel.id)}
    assert listed[state]["outside"] == found
    facts = shell.run("inspect", state).stdout
    gone = "connection to 127.77.0.1:5432 (postgresql)"
    assert f"Will not come back: {gone}\n" in facts
    assert "Not in the state: device /dev/kmsg\n" in facts
    assert f"Not in the state: file {log} (appended to)\n" in facts
    assert "... and 7 more" in facts

    # Without the file there would be no kernel: it is not ended for that.
    log.unlink()
    state_here = api.get(f"/states/{state}")
    assert state_here["restorable"] is False
    (missing,) = [d["message"] for d in state_here["differences"] if d["blocking"]]
    assert str(log) in missing
    assert api.failed(f"/states/{state}/restore")["reason"] == "not_restorable"
    assert kernel.run("print(messages.closed)") == "False"
    log.touch()

    # Who restores it is told what is gone now; the rest is there again.
    assert api.done(f"/states/{state}/restore")["warnings"] == [f"Did not come back: {gone}."]
    restored = api.get(f"/kernels/{kernel.id}")["restored_from"]
    assert restored["warnings"] == [f"Did not come back: {gone}."]
    kernel.run("log.write('went on'); log.flush(); messages.fileno()")
    assert log.read_text() == "went on"
    assert "OSError" in kernel.run("try: database.recv(1)\nexcept OSError: print('OSError')")
    assert api.done(f"/states/{plain}/restore")["warnings"] == []


def a_record(**meta: Any) -> StateRecord:
    return StateRecord(
        id="20200101T000000Z-00000000",
        created="2020-01-01T00:00:00Z",
        size=1,
        stored_size=1,
        meta=StateMeta(kernel_id="k", kernel_name="k", display_name="K", language="k", **meta),
    )


def test_states_that_say_nothing_or_in_later_words() -> None:
    said: dict[str, object] = {"files": [{"path": "/data", "mode": "write", "later": 1}]}
    for meta, known in ((None, None), (said, 1), ({"files": [{"path": "/x", "mode": "?"}]}, None)):
        outside = describe.state(a_record(outside=meta)).outside
        assert (None if outside is None else len(outside.files)) == known


def test_a_state_names_the_gpus_that_its_kernel_used() -> None:
    gpus = [{"uuid": f"GPU-{name}", "name": name, "memory_bytes": 9} for name in ("A", "B", "B")]
    processes = [{"pid": 1, "memory_bytes": 5, "visible": "0"}, {"pid": 2, "visible": "1"}]
    gpus[2]["uuid"] = "GPU-C"
    for use, known in (
        (None, None),
        ({"processes": [], "gpus": gpus}, None),
        ({"processes": processes, "gpus": gpus}, (["A", "B"], 5)),
        ({"processes": "later"}, None),
    ):
        gpu = describe.state(a_record(gpu=use)).gpu
        used = ([one.name for one in gpu.gpus if one.used], gpu.memory) if gpu else None
        assert used == known
    # Which driver it was is said once, of the node.
    node = {"driver": "580.95.05"}
    told = {"processes": processes, "gpus": gpus, "driver": "1.0"}
    gpu = describe.state(a_record(gpu=told, node=node)).gpu
    assert gpu is not None and gpu.driver == "580.95.05"


def test_pins_and_labels(api: Api, shell: Shell, two_states: tuple[str, str]) -> None:
    _, state = two_states
    marked = api.request("PATCH", f"/states/{state}", body={"pinned": True})
    assert (marked["pinned"], marked["label"]) == (True, "after")
    marked = api.request("PATCH", f"/states/{state}", body={"label": None})
    assert (marked["pinned"], marked["label"]) == (True, None)
    assert "pinned" in shell.run("states").stdout
    assert shell.json("unpin", state)[0]["pinned"] is False
    shell.run("pin", state)
    shell.run("label", state, "the good one")
    found = api.get(f"/states/{state}")
    assert (found["pinned"], found["label"]) == (True, "the good one")
    assert api.error("PATCH", f"/states/{state}", 400, {"pinned": None})["reason"] == "bad_request"
    unknown = "20200101T000000Z-00000000"
    assert api.error("PATCH", f"/states/{unknown}", 404, {})["reason"] == "unknown_state"


def test_a_whole_state(api: Api, shell: Shell, two_states: tuple[str, str]) -> None:
    _, state = two_states
    found = api.done(f"/states/{state}/verify")["verification"]
    assert found["intact"] is True
    assert api.get(f"/states/{state}")["verified"] is not None
    assert f"State {state} is whole" in shell.run("verify", state).stdout
    facts = shell.run("inspect", state).stdout
    assert "whole, just now" in facts
    assert "Python heap" in facts
    assert shell.json("inspect", state)["contents"]["parent"] == two_states[0]


def test_a_damaged_state_says_what_is_lost_and_which_is_whole(
    api: Api, shell: Shell, lasting_home: Home, two_states: tuple[str, str]
) -> None:
    older, newer = two_states
    spoil(packs(lasting_home, newer)[0], 64)

    found = api.done(f"/states/{newer}/verify")["verification"]

    assert found["intact"] is False
    assert found["older"] == older
    assert found["lost"] == sum(file["size"] for file in found["files"]) > 0
    assert sum(item["size"] for item in found["items"]) > 0
    listed = {state["id"]: state for state in api.get("/states")}
    assert "cannot be read back" in listed[newer]["damage"]
    assert listed[older]["damage"] is None
    assert api.get(f"/states/{newer}")["modes"] == []
    error = api.failed(f"/states/{newer}/restore")
    assert error["reason"] == "state_damaged"
    assert older in error["hint"]
    said = shell.run("verify", newer, code=1).stdout
    assert f"is whole: {older}" in said
    assert "damaged" in shell.run("states").stdout


def test_a_state_of_which_nothing_can_be_read_is_listed(
    api: Api, shell: Shell, lasting_home: Home, two_states: tuple[str, str]
) -> None:
    _, newer = two_states
    (manifest,) = lasting_home.store.glob(f"*/kernels/*/states/{newer}.json")
    manifest.write_bytes(manifest.read_bytes()[:-20])
    (listed,) = [state for state in api.get("/states") if state["id"] == newer]
    assert listed["damage"]
    assert listed["restorable"] is False
    assert newer in [state["id"] for state in api.get("/states", kernel=listed["kernel_id"])]
    assert api.error("POST", f"/states/{newer}/verify", 422)["reason"] == "state_damaged"
    assert "unreadable" in shell.run("states").stdout
    answers = shell.json("verify", "--all", code=1)
    assert [a["state_id"] for a in answers if a.get("error") and "id" not in a] == [newer]


def test_a_check_gets_in_nobodys_way(
    api: Api, server: JupyterServer, start: Callable[..., KernelClient]
) -> None:
    kernel = start()
    state = api.done(f"/kernels/{kernel.id}/save")["state_id"]
    check = api.begin(f"/states/{state}/verify")
    assert check["kind"] == "verify"
    assert api.get(f"/kernels/{kernel.id}")["operation"] is None
    api.done(f"/kernels/{kernel.id}/save")
    assert api.finish(check)["status"] == "done"


def test_new_key(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "key"
    made = shell.json("new-key", str(path))
    assert made["key_id"]
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    assert shell.json("new-key", str(path), code=1)["error"]["reason"] == "bad_request"
    assert path.read_bytes() == before
