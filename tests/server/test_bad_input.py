"""Bad input: one clear error with its documented status each, and nothing is lost."""

from __future__ import annotations

import getpass
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from jupyter_gpu_ckpt.errors import STATUS
from jupyter_gpu_ckpt.store import StateStore
from tests.harness.client import KernelClient
from tests.harness.server import Home, JupyterServer
from tests.server.rest import Api
from tests.store.conftest import extract

Start = Callable[..., KernelClient]
NOBODY = "00000000-0000-4000-8000-000000000000"


class Saved:
    """A running kernel with one good state, and the store behind it."""

    def __init__(self, api: Api, home: Home, kernel: KernelClient) -> None:
        self.api = api
        self.kernel = kernel
        self.store = StateStore(home.store, getpass.getuser())
        self.folder = home.store / getpass.getuser()
        kernel.run("x = 'saved'")
        self.good = self.save()
        kernel.run("x = 'later'")

    def save(self) -> str:
        return str(self.api.done(f"/kernels/{self.kernel.id}/save")["state_id"])

    def manifest(self, state_id: str) -> Path:
        (path,) = self.folder.rglob(f"{state_id}.json")
        return path

    def packs(self) -> set[Path]:
        return {path for path in (self.folder / "packs").rglob("*") if path.is_file()}

    def rewrite(self, workspace: Path, **changes: object) -> str:
        """Write the good state once more with another description, as another node would."""
        images = workspace / "images"
        extract(self.store, self.good, images)
        meta = msgspec.structs.replace(self.store.state(self.good).meta, **changes)
        with self.store.begin(self.kernel.id) as writer:
            writer.add_tree(images)
            return writer.commit(meta).id

    def assert_nothing_lost(self) -> None:
        """The kernel runs on as it was, and its good state can still be restored."""
        assert self.kernel.run("print(x)") == "later"
        assert self.good in [s["id"] for s in self.api.get("/states", kernel=self.kernel.id)]
        self.api.done(f"/states/{self.good}/restore")
        assert self.kernel.run("print(x)") == "saved"


@pytest.fixture
def saved(api: Api, lasting_home: Home, start: Start) -> Saved:
    return Saved(api, lasting_home, start())


@pytest.fixture(scope="module")
def settled(api: Api, lasting_home: Home) -> Iterator[Saved]:
    """The same for tests that must not change anything."""
    kernel = api.server.client.start(lasting_home.add_notebook("settled.ipynb"))
    yield Saved(api, lasting_home, kernel)
    api.server.client.delete(f"api/kernels/{kernel.id}")


def assert_clear(error: dict[str, str | None], reason: str) -> None:
    """An error says what, for programs why, and what to do, and shows no traceback."""
    assert error["reason"] == reason, error
    assert error["hint"], error
    assert error["message"] and len(error["message"]) > 15
    assert "Traceback" not in str(error)


# --- ids ------------------------------------------------------------------------------------

UNKNOWN = [
    ("GET", "/kernels/{}", "unknown_kernel"),
    ("POST", "/kernels/{}/save", "unknown_kernel"),
    ("GET", "/states/{}", "unknown_state"),
    ("DELETE", "/states/{}", "unknown_state"),
    ("POST", "/states/{}/restore", "unknown_state"),
    ("POST", "/lost/{}/restore", "unknown_kernel"),
    ("POST", "/lost/{}/dismiss", "unknown_kernel"),
    ("GET", "/operations/{}", "unknown_operation"),
    ("DELETE", "/operations/{}", "unknown_operation"),
]


@pytest.mark.parametrize(("method", "path", "reason"), UNKNOWN)
def test_unknown_ids(api: Api, method: str, path: str, reason: str) -> None:
    assert_clear(api.error(method, path.format(NOBODY), 404), reason)
    assert_clear(api.error(method, path.format("20200101T000000Z-00000000"), 404), reason)


TRICKS = [
    "..%2F..%2F..%2Fetc%2Fpasswd",
    "%2e%2e",
    "..%2fkernels",
    ".hidden",
    "%00",
    "a%00b",
    "a%0Ab",
    "%20",
    "x" * 300,
    "%C3%A9",
    "%FF",
    "*",
    "%2Fetc%2Fpasswd",
]


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize(("method", "path", "reason"), UNKNOWN)
def test_ids_that_play_tricks(api: Api, method: str, path: str, reason: str, trick: str) -> None:
    status, body = api.raw(method, path.format(trick), b"{}" if method == "POST" else None)
    # A byte that is no text at all is refused before anybody looks for an id.
    assert status == (400 if trick == "%FF" else 404), body
    assert_clear(body, "bad_request" if trick == "%FF" else reason)


def test_an_id_cannot_lead_out_of_the_store(saved: Saved, lasting_home: Home) -> None:
    precious = lasting_home.path / "precious.json"
    precious.write_text("{}")
    up = "..%2F" * 12
    for target in (f"{up}{str(precious)[1:-5].replace('/', '%2F')}", f"{up}precious"):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/restore")):
            status, body = saved.api.raw(method, f"/states/{target}{path}")
            assert (status, body["reason"]) == (404, "unknown_state")
    assert precious.read_text() == "{}"


# --- bodies and parameters ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/kernels/{kernel}/save", b"not json"),
        ("/kernels/{kernel}/save", b"\xff\xfe"),
        ("/kernels/{kernel}/save", b"[]"),
        ("/kernels/{kernel}/save", b'{"label": 3}'),
        ("/kernels/{kernel}/save", b'{"lable": "mistyped"}'),
        ("/kernels/{kernel}/save", b'{"label": "%s"}' % (b"x" * 201)),
        ("/kernels/{kernel}/save", b'{"label": "%s"}' % (b"x" * 100_000)),
        ("/states/{state}/restore", b'{"mode": "sideways"}'),
        ("/states/{state}/restore", b'{"mode": "new", "path": "../../outside.ipynb"}'),
        ("/states/{state}/restore", b'{"mode": "new", "path": ""}'),
        ("/states/{state}/restore", b'{"path": "a\\u0000b"}'),
        ("/states/{state}/restore", b'{"force": true}'),
        ("/lost/{kernel}/restore", b'{"x": 1}'),
        ("/gc", b'{"dry_run": "yes"}'),
    ],
)
def test_bodies(settled: Saved, path: str, body: bytes) -> None:
    path = path.format(kernel=settled.kernel.id, state=settled.good)
    begun = settled.api.get("/operations")
    status, error = settled.api.raw("POST", path, body)
    assert status == 400
    assert_clear(error, "bad_request")
    assert settled.api.get("/operations") == begun


def test_parameters(api: Api) -> None:
    assert_clear(api.error("GET", "/states", 400, None, path="../x.ipynb"), "bad_request")
    assert_clear(api.error("GET", "/states", 404, None, kernel="../../x"), "unknown_kernel")
    assert api.get("/states", kernel=NOBODY) == []


# --- kernels --------------------------------------------------------------------------------


def test_a_kernel_of_the_stock_provisioner(api: Api, stock_kernelspec: str, start: Start) -> None:
    kernel = start(kernel=stock_kernelspec)
    error = api.error("POST", f"/kernels/{kernel.id}/save", 422, {})
    assert_clear(error, "not_savable")
    assert error["hint"]
    described = api.get(f"/kernels/{kernel.id}")
    assert (described["savable"], described["error"]["reason"]) == (False, "not_savable")
    assert kernel.run("print('alive')") == "alive"


def test_a_kernel_that_is_being_saved(saved: Saved) -> None:
    saved.kernel.run("import os; data = os.urandom(400_000_000)")
    operation = saved.api.begin(f"/kernels/{saved.kernel.id}/save")
    for path in (f"/kernels/{saved.kernel.id}/save", f"/states/{saved.good}/restore"):
        assert_clear(saved.api.error("POST", path, 409, {}), "busy")
    assert saved.api.finish(operation)["status"] == "done"
    saved.kernel.run("del data")
    saved.assert_nothing_lost()


# --- states ---------------------------------------------------------------------------------


def test_a_state_of_another_user(saved: Saved, lasting_home: Home, tmp_path: Path) -> None:
    images = tmp_path / "images"
    extract(saved.store, saved.good, images)
    somebody = StateStore(lasting_home.store, "somebody-else")
    with somebody.begin(saved.kernel.id) as writer:
        writer.add_tree(images)
        theirs = writer.commit(saved.store.state(saved.good).meta).id
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/restore")):
        error = saved.api.error(method, f"/states/{theirs}{path}", 404)
        assert_clear(error, "unknown_state")
    assert theirs not in [s["id"] for s in saved.api.get("/states")]
    assert somebody.state(theirs).id == theirs
    # Collecting garbage is each owner's own matter, too.
    saved.api.post("/gc")
    extract(somebody, theirs, tmp_path / "again")
    saved.assert_nothing_lost()


def altered(data: bytes) -> bytes:
    assert b"saved" not in data[:5]
    return data.replace(b'"path"', b'"hath"', 1)


@pytest.mark.parametrize(
    "harm",
    [lambda data: altered(data), lambda data: data[: len(data) // 2], lambda data: b""],
    ids=["altered", "truncated", "empty"],
)
def test_a_damaged_manifest(saved: Saved, harm: Callable[[bytes], bytes]) -> None:
    bad = saved.save()
    manifest = saved.manifest(bad)
    intact = manifest.read_bytes()
    manifest.write_bytes(harm(intact))
    assert manifest.read_bytes() != intact
    (listed,) = [s for s in saved.api.get("/states") if s["id"] == bad]
    assert "damaged" in listed["damage"]
    for method, path in (("GET", ""), ("POST", "/restore")):
        assert_clear(saved.api.error(method, f"/states/{bad}{path}", 422), "state_damaged")
    assert manifest.exists()
    checks = saved.api.get("/doctor")["checks"]
    (warning,) = [check for check in checks if bad in check["message"]]
    assert warning["status"] == "warning" and bad in warning["hint"]
    saved.assert_nothing_lost()
    # It can be got rid of.
    saved.api.delete(f"/states/{bad}", status=204)
    assert not manifest.exists()


def altered_in_the_middle(data: bytes) -> bytes:
    return data[: len(data) // 2 - 1] + bytes(16) + data[len(data) // 2 + 15 :]


def harmed_pack(saved: Saved, harm: Callable[[bytes], bytes]) -> str:
    """Save once more, and harm a block that only this state has."""
    before = saved.packs()
    saved.kernel.run("import os; ballast = os.urandom(3_000_000)")
    bad = saved.save()
    saved.kernel.run("del ballast")
    pack = max(saved.packs() - before, key=lambda path: path.stat().st_size)
    pack.chmod(0o600)
    pack.write_bytes(harm(pack.read_bytes()))
    return bad


@pytest.mark.parametrize(
    "harm",
    [
        altered_in_the_middle,
        lambda data: data[: len(data) // 2],
        lambda data: b"",
    ],
    ids=["altered", "truncated", "empty"],
)
def test_a_damaged_pack(saved: Saved, harm: Callable[[bytes], bytes]) -> None:
    bad = harmed_pack(saved, harm)
    error = saved.api.failed(f"/states/{bad}/restore")
    assert_clear(error, "state_damaged")
    saved.assert_nothing_lost()


def test_a_damaged_pack_of_a_kernel_that_is_gone(saved: Saved) -> None:
    """It is found while the process is being built up, of which nothing stays."""
    bad = harmed_pack(saved, altered_in_the_middle)
    client = saved.api.server.client
    client.delete(f"api/kernels/{saved.kernel.id}")
    error = saved.api.failed(f"/states/{bad}/restore")
    assert_clear(error, "state_damaged")
    assert "pages-" in str(error["message"])
    assert saved.kernel.id not in [kernel["id"] for kernel in client.get("api/kernels")]
    assert not any(Path(f"/proc/{pid}").exists() for pid in saved.store.state(bad).meta.pids)
    assert {bad, saved.good} <= {state["id"] for state in saved.api.get("/states")}
    saved.api.done(f"/states/{saved.good}/restore")
    assert client.connect(saved.kernel.id).run("print(x)") == "saved"
    client.delete(f"api/kernels/{saved.kernel.id}")


def test_a_state_from_another_kind_of_processor(saved: Saved, tmp_path: Path) -> None:
    node = saved.store.state(saved.good).meta.node
    flags = [*node["cpu_flags"], "avx10_9"]
    bad = saved.rewrite(tmp_path, node={**node, "cpu_flags": flags, "cpu_model": "Imaginary 9000"})
    described = saved.api.get(f"/states/{bad}")
    assert described["restorable"] is False
    (difference,) = [d for d in described["differences"] if d["blocking"]]
    assert difference["what"] == "cpu"
    assert "avx10_9" in difference["message"]
    assert difference["saved"] == "Imaginary 9000"
    error = saved.api.failed(f"/states/{bad}/restore")
    assert_clear(error, "not_restorable")
    assert "avx10_9" in str(error["message"])
    assert saved.store.state(bad).id == bad
    saved.assert_nothing_lost()


def test_a_state_from_another_architecture(saved: Saved, tmp_path: Path) -> None:
    node = saved.store.state(saved.good).meta.node
    bad = saved.rewrite(tmp_path, node={**node, "machine": "riscv64"})
    assert saved.api.get(f"/states/{bad}")["restorable"] is False
    assert_clear(saved.api.failed(f"/states/{bad}/restore"), "not_restorable")
    saved.assert_nothing_lost()


def use_library(saved: Saved, lasting_home: Home) -> Path:
    """Have the kernel load a library from a shared folder, and save it."""
    source = next(Path(sys.prefix).rglob("_blake3*.so"), None) or next(
        Path(sys.prefix).rglob("blake3*.so")
    )
    library = lasting_home.notebooks / "library.so"
    shutil.copy(source, library)
    saved.kernel.run(
        "import mmap\n"
        f"file = open({str(library)!r}, 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "file.close()"
    )
    return library


@pytest.mark.parametrize("harm", ["missing", "changed"])
def test_a_mapped_file_that_is_not_as_it_was(saved: Saved, lasting_home: Home, harm: str) -> None:
    library = use_library(saved, lasting_home)
    bad = saved.save()
    saved.kernel.run("mapped.close()")
    if harm == "missing":
        library.unlink()
    else:
        replacement = library.with_suffix(".new")
        replacement.write_bytes(library.read_bytes() + b"more")
        replacement.rename(library)
    described = saved.api.get(f"/states/{bad}")
    assert described["restorable"] is False
    (difference,) = [d for d in described["differences"] if d["blocking"]]
    assert str(library) in difference["message"]
    error = saved.api.failed(f"/states/{bad}/restore")
    assert_clear(error, "not_restorable")
    assert str(library) in str(error["message"])
    saved.assert_nothing_lost()


# --- the store ------------------------------------------------------------------------------


@pytest.fixture
def no_store(home: Home) -> Iterator[Api]:
    """A server whose store cannot be: its path leads through a file."""
    (home.path / "a-file").write_text("in the way")
    config = {"GpuCkpt": {"store_url": str(home.path / "a-file" / "store")}}
    with JupyterServer(home, config=config) as server:
        yield Api(server)


def test_a_store_that_cannot_be_written(no_store: Api, home: Home) -> None:
    kernel = no_store.server.client.start(home.add_notebook("a.ipynb"))
    kernel.run("x = 41")
    error = no_store.failed(f"/kernels/{kernel.id}/save")
    assert_clear(error, "store_unavailable")
    assert "a-file" in f"{error['message']} {error['details']}"
    assert kernel.run("print(x + 1)") == "42"
    doctor = no_store.get("/doctor")
    assert "store" in [c["name"] for c in doctor["checks"] if c["status"] == "problem"]
    # A page that only looks at its kernel hears it as the reason why it cannot be saved.
    described = no_store.get(f"/kernels/{kernel.id}")
    assert (described["savable"], described["error"]["reason"]) == (False, "store_unavailable")
    assert described in no_store.get("/kernels")
    for path in ("/states", "/lost"):
        assert_clear(no_store.error("GET", path, 503), "store_unavailable")


def test_every_reason_has_a_documented_status() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rest.md").read_text()
    for reason, status in STATUS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {status} |")]
        assert f"`{reason}`" in row
