"""What the administrator's page knows: many users, failing and hanging stores, sealed states."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine
from traitlets.config import Config

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.hub import GpuCkptHub, add_admin_page, service_census
from jupyter_gpu_ckpt.hub.keys import user_key
from jupyter_gpu_ckpt.hub.names import filled
from jupyter_gpu_ckpt.hub.service_access import address_of
from jupyter_gpu_ckpt.hub.service_actions import Actions
from jupyter_gpu_ckpt.hub.service_audit import Audit, Doer
from jupyter_gpu_ckpt.hub.service_census import Census
from jupyter_gpu_ckpt.hub.service_history import ALL, History, Sample
from jupyter_gpu_ckpt.hub.service_metrics import Metrics
from jupyter_gpu_ckpt.hub.service_places import UserPlaces
from jupyter_gpu_ckpt.hub.service_plot import usage_plot
from jupyter_gpu_ckpt.hub.service_reading import Person, UserStores
from jupyter_gpu_ckpt.hub.service_records import UserReport
from jupyter_gpu_ckpt.store import ServerStop, StateStore
from jupyter_gpu_ckpt.store.keys import KeyFile, KeyRing, new_key_file
from tests.harness.node import REPOSITORY
from tests.harness.user import User as Account
from tests.hub.generated import MIB, User, ago, crowd, iso

DAY = 86400.0


def census_of(
    hub: GpuCkptHub,
    folder: Path,
    names: list[str],
    people: Callable[[], Any] | None = None,
) -> Census:
    async def ask() -> list[Person]:
        return [Person(name) for name in names]

    return Census(
        hub, people or ask, folder, interval=60, on_round=lambda: None, log=logging.getLogger()
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "states"
    folder.mkdir(mode=0o700)
    return folder


def test_many_users_are_known_from_records_alone(root: Path, tmp_path: Path) -> None:
    names = crowd(root, users=200, kernels=5, states=1)
    census = census_of(GpuCkptHub(store_url=str(root), quota=1 << 30), tmp_path, names)
    asyncio.run(census.round())
    reports = census.known()
    assert [report.user for report in reports] == names
    assert not [report.problem for report in reports if report.problem]
    assert sum(len(report.states) for report in reports) == 1000
    assert sum(len(report.lost) for report in reports) == 100
    assert sum(len(report.failures) for report in reports) == 100
    assert {report.used for report in reports} == {50 * MIB}


def test_a_store_that_hangs_is_one_row_and_no_thread_is_sent_after_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("alice", "bob"):
        User(root, name).state("kernel-a", "a.ipynb", ago(hours=1))
    over, calls, read = threading.Event(), [], UserStores.read

    def slow(stores: UserStores) -> UserReport:
        if stores.person.name == "bob" and calls:
            calls.append("bob")
            over.wait(30)
        return read(stores)

    monkeypatch.setattr(UserStores, "read", slow)
    monkeypatch.setattr(service_census, "_DEADLINE", 0.5)
    census = census_of(GpuCkptHub(store_url=str(root)), tmp_path, ["alice", "bob"])

    async def rounds() -> None:
        await census.round()
        calls.append("from here on")
        for _ in range(3):
            await census.round()

    asyncio.run(rounds())
    alice, bob = census.known()
    assert alice.problem is None and len(alice.states) == 1
    assert "not answered for" in (bob.problem or "")
    assert len(bob.states) == 1, "what was known of him"
    assert calls == ["from here on", "bob"]
    over.set()


def test_nothing_is_done_after_what_hangs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = User(root, "alice").state("kernel-a", "a.ipynb", ago(hours=1))
    monkeypatch.setattr(service_census, "_DEADLINE", 0.5)
    census = census_of(GpuCkptHub(store_url=str(root)), tmp_path, ["alice"])
    over, begun = threading.Event(), []

    async def act() -> None:
        def hang(stores: UserStores) -> None:
            begun.append(stores)
            over.wait(30)

        for words in ("did not answer within", "has not answered for"):
            with pytest.raises(CkptError, match=words):
                await census.act(Person("alice"), hang)
        assert len(begun) == 1
        over.set()
        for _ in range(300):
            try:
                await census.act(Person("alice"), lambda stores: stores.pin(state, True))
                break
            except CkptError:
                await asyncio.sleep(0.1)

    asyncio.run(act())
    (alice,) = census.known()
    assert alice.states[0].pinned


@pytest.mark.parametrize(
    "made_up",
    [
        {"at": "<i>now"},
        {"at": "0001-01-01T00:00:00Z"},
        {"seconds": -1.0},
        {"seconds": 1e300},
        {"saved": -1},
        {"saved": 4},
        {"kernels": 10**12},
    ],
)
def test_a_stop_that_cannot_have_been_is_not_told(root: Path, made_up: dict[str, Any]) -> None:
    # Users write these records themselves.
    real: dict[str, Any] = {"at": iso(ago(hours=1)), "seconds": 2.0, "kernels": 3, "saved": 2}
    user = User(root, "alice")
    user.kernel("kernel-a", "a.ipynb", stop=ServerStop(**real))
    user.kernel("kernel-b", "b.ipynb", stop=ServerStop(**real))
    user.kernel("kernel-c", "c.ipynb", stop=ServerStop(**real | made_up))
    stores = UserStores(GpuCkptHub(store_url=str(root)), Person("alice"), root.parent / "tiers")
    (stop,) = stores.read().stops
    assert (stop.at, stop.seconds, stop.kernels, stop.saved) == tuple(real.values())


def test_a_hub_that_does_not_answer_leaves_what_is_known(root: Path, tmp_path: Path) -> None:
    User(root, "alice").state("kernel-a", "a.ipynb", ago(hours=1))
    answers: list[list[Person] | Exception] = [[Person("alice")], OSError("connection refused")]

    async def ask() -> list[Person]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    census = census_of(GpuCkptHub(store_url=str(root)), tmp_path, [], ask)

    async def rounds() -> None:
        await census.round()
        await census.round()

    asyncio.run(rounds())
    assert "connection refused" in (census.problem or "")
    assert [len(report.states) for report in census.known()] == [1]


def test_a_place_that_is_not_there_is_a_problem_and_no_empty_list(tmp_path: Path) -> None:
    for url, words in (
        (None, "home folders"),
        (str(tmp_path / "gone" / "{username}"), "is not there"),
        (f"file://{tmp_path}/gone", "is not there"),
    ):
        with pytest.raises(CkptError, match=words):
            UserStores(GpuCkptHub(store_url=url), Person("alice"), tmp_path).read()


def test_sealed_states_are_counted_without_the_key_and_described_with_it(
    root: Path, tmp_path: Path
) -> None:
    new_key_file(master := tmp_path / "master")
    mine = tmp_path / "alice.key"
    mine.write_text(user_key(master, "alice"))
    mine.chmod(0o600)
    user = User(root, "alice", KeyRing(KeyFile(mine)))
    state = user.state("kernel-a", "secret.ipynb", ago(hours=3), stored=30 * MIB)
    without = UserStores(GpuCkptHub(store_url=str(root)), Person("alice"), tmp_path)
    report = without.read()
    (row,) = report.states
    assert (row.cost, row.path, report.used) == (30 * MIB, None, 30 * MIB)
    assert "encrypted" in (row.problem or "")
    with pytest.raises(CkptError) as refused:
        without.pin(state, True)
    assert refused.value.reason in ("key_missing", "wrong_key")

    hub = GpuCkptHub(store_url=str(root), master_key_file=str(master))
    known = UserStores(hub, Person("alice"), tmp_path)
    known.pin(state, True)
    (row,) = known.read().states
    assert (row.path, row.encrypted, row.pinned) == ("secret.ipynb", True, True)
    without.delete(state)
    assert known.read().states == []


def test_each_named_server_may_have_a_store_of_its_own(root: Path, tmp_path: Path) -> None:
    url = f"{root}/{{username}}/{{servername}}"
    for folder, server in (("_", ""), ("gpu", "gpu")):
        (root / "alice" / folder).mkdir(parents=True, mode=0o700)
        User(root / "alice" / folder, "alice").state(f"kernel-{server}", "a.ipynb", ago(days=9))
    stores = UserStores(GpuCkptHub(store_url=url), Person("alice", (), ("gpu",)), tmp_path)
    report = stores.read()
    assert {state.server for state in report.states} == {"", "gpu"}
    of_gpu = next(state.id for state in report.states if state.server == "gpu")
    stores.delete(of_gpu)
    assert [state.server for state in stores.read().states] == [""]
    assert len(stores.expire(DAY, dry_run=True)) == len(stores.expire(DAY, dry_run=False)) == 1
    assert StateStore(root / "alice" / "_", "alice").states() == []


def test_states_of_a_server_that_the_hub_has_deleted_are_still_seen(
    root: Path, tmp_path: Path
) -> None:
    for server in ("_", "gpu", "%2E.", "not%2a one"):
        folder = root / "alice" / f"on-{server}"
        folder.mkdir(parents=True, mode=0o700)
        User(folder, "alice").state(f"kernel-{server[:3]}", "a.ipynb", ago(days=9))
    url = f"{root}/{{username}}/on-{{servername}}"
    stores = UserStores(GpuCkptHub(store_url=url), Person("alice"), tmp_path)
    found = {state.server: state.id for state in stores.read().states}
    assert set(found) == {"", "gpu", ".."}, "a folder that stands for no server is none"
    stores.delete(found["gpu"])
    assert {state.server for state in stores.read().states} == {"", ".."}
    # Where a folder holds servers of several users none is looked for.
    shared = GpuCkptHub(store_url=f"{root}/{{servername}}/{{username}}")
    assert UserStores(shared, Person("alice"), tmp_path).read().states == []


@pytest.mark.parametrize("below", ["", "/{username}", "/of-{username}/{servername}"])
def test_states_of_a_user_whom_the_hub_has_deleted_are_seen_and_deleted(
    root: Path, tmp_path: Path, below: str
) -> None:
    url = f"{root}{below}"
    hub = GpuCkptHub(store_url=url)
    names = ["alice", "bob@example.org", ".zoë / x"]
    for name in names:
        folder = Path(filled(url, name, ""))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        User(folder, name).state("kernel", "a.ipynb", ago(days=9))
    (root / "of-nobody").mkdir()
    (root / "lost+found").mkdir()
    (root / "of-link").symlink_to(next(root.iterdir()))
    census = census_of(hub, tmp_path, ["alice"])

    async def check() -> None:
        await census.round()
        found = {report.user: report.deleted for report in census.known()}
        assert found == {"alice": False, "bob@example.org": True, ".zoë / x": True}
        assert not [report.problem for report in census.known() if report.problem]
        person = census.person("bob@example.org")
        assert person is not None
        assert len(await census.act(person, lambda stores: stores.expire(DAY, dry_run=False))) == 1

    asyncio.run(check())
    # With the last state she is gone, and nobody else is.
    assert [report.user for report in census.known()] == [".zoë / x", "alice"]


def test_who_is_deleted_and_comes_back_is_known_also_where_her_store_cannot_be_read(
    root: Path, tmp_path: Path
) -> None:
    alice = User(root, "alice")
    alice.state("kernel", "a.ipynb", ago(days=9))
    names = ["alice"]
    census = census_of(GpuCkptHub(store_url=str(root)), tmp_path, names)

    async def check() -> None:
        await census.round()
        (alice.owner.folder / "store.json").write_text("{")
        for known in (False, True, False):
            names[:] = ["alice"] if known else []
            await census.round()
            (report,) = census.known()
            assert report.problem is not None and "damaged" in report.problem
            assert (report.deleted, len(report.states)) == (not known, 1)

    asyncio.run(check())


def test_who_has_states_on_a_remote_system_is_known_by_its_folders(root: Path) -> None:
    files = fsspec.filesystem("memory")
    for folder in ("alice", "b%2Fo", "not%2a one"):
        files.pipe(f"/{root.name}/of-{folder}/x/store.json", b"")
    url = f"memory://{root.name}/of-{{username}}"
    assert UserPlaces(url, {}, 10.0).find() == ["alice", "b/o"]
    assert UserPlaces(f"memory://{root.name}/not-there/{{username}}", {}, 10.0).find() == []
    assert UserPlaces(f"memory://{root.name}/{{servername}}/{{username}}", {}, 10.0).find() == []


def test_a_user_who_asks_for_much_at_once_has_one_thread(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    User(root, "alice")
    census = census_of(GpuCkptHub(store_url=str(root)), tmp_path, ["alice"])
    lock, at_once = threading.Lock(), []

    def work(stores: UserStores) -> int:
        assert lock.acquire(blocking=False), "another one is at it"
        at_once.append(stores.person.name)
        threading.Event().wait(0.01)
        lock.release()
        return len(at_once)

    async def ask() -> list[int]:
        return await asyncio.gather(*(census.act(Person("alice"), work) for _ in range(20)))

    assert sorted(asyncio.run(ask())) == [*range(1, 21)]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"X-Real-Ip": "6.6.6.6"}, "127.0.0.1"),
        ({"X-Forwarded-For": "6.6.6.6, ::ffff:10.0.0.7"}, "10.0.0.7"),
        ({"X-Forwarded-For": "6.6.6.6, 10.0.0.7, 10.0.0.1"}, "10.0.0.7"),
        ({"X-Forwarded-For": "6.6.6.6, made up, 10.0.0.1"}, "10.0.0.1"),
    ],
)
def test_an_address_is_the_proxys_word(headers: dict[str, str], expected: str) -> None:
    line = RequestStartLine("GET", "/", "HTTP/1.1")
    request = HTTPServerRequest(start_line=line, headers=HTTPHeaders({"Host": "hub", **headers}))
    request.remote_ip = "127.0.0.1"
    assert address_of(request, {"10.0.0.1"}) == expected


def test_usage_is_kept_by_the_hour_then_by_the_day(tmp_path: Path) -> None:
    history = History(tmp_path / "usage.sqlite")
    now = (time.time() // DAY) * DAY
    for hour in range(0, 24 * 20, 4):
        at = now - 20 * DAY + hour * 3600
        for minute in (0, 30):
            reports = [
                UserReport(user="alice", used=hour, read="then"),
                UserReport(user="bob", used=1, read="then"),
                UserReport(user="carol", used=7),  # never read
            ]
            history.add(reports, at + minute * 60)
    of_all, of_alice = history.of(ALL, 0.0), history.of("alice", 0.0)
    assert len(of_alice) == len(of_all)
    assert [sample.used for sample in of_all] == [sample.used + 1 for sample in of_alice]
    recent = [sample for sample in of_alice if sample.at > now - 13 * DAY]
    assert len(recent) == 13 * 6
    old = [sample for sample in of_alice if sample.at < now - 15 * DAY]
    assert [sample.at % DAY for sample in old] == [20.5 * 3600] * 5
    assert history.of("carol", 0.0) == []
    assert (tmp_path / "usage.sqlite").stat().st_mode & 0o777 == 0o600
    history.close()


def test_a_year_of_many_users_is_tidied_up_in_no_time(tmp_path: Path) -> None:
    history, hour = History(file := tmp_path / "usage.sqlite"), int(time.time() // 3600)
    rows = [
        (f"user-{user}", at, at * 3600.0, 1, 1, 1)
        for user in range(300)
        for day in range(399)
        for at in [hour // 24 * 24 - day * 24 - 1]
    ]
    with sqlite3.connect(file) as database:
        database.executemany("insert into usage values (?, ?, ?, ?, ?, ?)", rows)
    database.close()
    began = time.thread_time()
    history.add([UserReport(user="user-0", used=1, read="then")], hour * 3600.0)
    assert time.thread_time() - began < 1
    assert len(history.of("user-1", 0.0)) == 399
    history.close()


@pytest.mark.parametrize("used", [0, 1, 999, 5 * MIB, 1023 * MIB, 3 << 40])
def test_a_plot_is_well_formed_and_says_what_it_shows(used: int) -> None:
    samples = [Sample(at, used * share // 3, 0, 1) for at, share in ((0.0, 1), (9e5, 3), (2e6, 2))]
    drawing = usage_plot(samples, title="a < b", quota=used)
    tree = ElementTree.fromstring(drawing)
    assert tree.findtext("title") == "a < b"
    assert "At the end" in (tree.findtext("desc") or "")
    marks = [float(line.get("d", "").split()[1].partition("H")[0])
             for line in tree.iter("path") if line.get("class") == "grid"]  # fmt: skip
    assert 2 <= len(marks) <= 7 and marks == sorted(marks, reverse=True)


def test_what_the_administrator_has_set_is_added_to() -> None:
    c = Config()
    c.GpuCkptHub.store_url = "s3://states"
    c.JupyterHub.load_roles = [{"name": "user", "scopes": ["self", "shares!user"]}]
    c.JupyterHub.services = [{"name": "other"}]
    add_admin_page(c, name="states")
    user, service = c.JupyterHub.load_roles
    assert user["scopes"] == ["self", "shares!user", "access:services!service=states"]
    assert service["services"] == ["states"]
    assert [service["name"] for service in c.JupyterHub.services] == ["other", "states"]
    assert '"store_url":"s3://states"' in str(c.JupyterHub.services[1]["environment"])
    assert "s3://states" not in " ".join(c.JupyterHub.services[1]["command"])


def test_nothing_is_done_that_cannot_be_noted_before(root: Path, tmp_path: Path) -> None:
    state = User(root, "alice").state("kernel-a", "a.ipynb", ago(hours=1))
    census = census_of(GpuCkptHub(store_url=str(root)), tmp_path, ["alice"])
    (audit := tmp_path / "audit.jsonl").mkdir()
    log = logging.getLogger()

    async def delete() -> None:
        actions = Actions(census, Metrics(census), Audit(audit, log), log)
        by = Doer("admin", "user", "127.0.0.1")
        await actions.delete(by, Person("alice"), state)

    with pytest.raises(CkptError, match="nothing was done"):
        asyncio.run(delete())
    assert [found.id for found in StateStore(root, "alice").states()] == [state]
    audit.rmdir()
    asyncio.run(delete())
    assert StateStore(root, "alice").states() == []
    assert audit.read_text().count('"action":"delete"') == 2


@pytest.mark.parametrize(
    "size", [-1, 1 << 60, 1 << 63, 10**400], ids=["negative", "60", "63", "many digits"]
)
def test_a_size_that_no_state_has_is_damage_and_no_trap_for_others(
    size: int, root: Path, tmp_path: Path
) -> None:
    state = User(root, "alice").state("kernel-a", "a.ipynb", ago(hours=1), size=size)
    User(root, "bob").state("kernel-b", "b.ipynb", ago(hours=1), size=(1 << 60) - 1)
    census = census_of(GpuCkptHub(store_url=str(root)), tmp_path, ["alice", "bob"])
    asyncio.run(census.round())
    alice, bob = census.known()
    assert [row.id for row in alice.states] == [state] and alice.states[0].problem
    assert (alice.size, bob.size) == (0, (1 << 60) - 1)
    assert b'logical_bytes{user="bob"} 1.15' in Metrics(census).text()
    history = History(None)
    history.add([*([bob] * 9), UserReport(user="carol", size=10**400, read="then")], 9e9)
    assert history.of(ALL, 0.0)[0].size == 1 << 62
    history.close()


@pytest.mark.parametrize("trap", ["huge", "fifo", "writer", "deleted", "link", "deep", "elsewhere"])
def test_what_a_user_puts_into_her_folder_is_a_reason_and_no_trap(
    trap: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(root, "alice")
    state = user.state("kernel-a", "a.ipynb", ago(hours=1))
    stores = UserStores(GpuCkptHub(store_url=str(root)), Person("alice"), tmp_path)
    manifest = user.owner.manifest("kernel-a", state)
    match trap:
        case "huge":
            os.truncate(manifest, 1 << 40)
        case "fifo":
            os.mkfifo(user.owner.folder / "kernels" / "kernel-a" / "kernel.json")
        case "writer":
            (folder := user.owner.writers / state).mkdir()
            os.mkfifo(folder / "writer.json")
        case "deleted":
            os.mkfifo(user.owner.deleted / f"{state}.json")
        case "link":
            (user.owner.kernels / "kernel-b").symlink_to("/proc")
        case "deep":
            at = user.owner.kernels
            for _ in range(400):
                at.mkdir(exist_ok=True)
                at = at / "d"
        case _:
            monkeypatch.setattr(os, "geteuid", lambda: 1234)
    if trap == "deep":
        assert [row.id for row in stores.read().states] == [state]
        return
    words = {
        "huge": "more than 128 MiB", "fifo": "no file", "link": "no file", "writer": "no file",
        "deleted": "no file",
        "elsewhere": "another account",
    }  # fmt: skip
    with pytest.raises(CkptError, match=words[trap]):
        stores.read()


#: A fresh service that reads a user's store, and says which modules it looked for as her.
READS_AS_HER = """
import sys, logging
from pathlib import Path
import jupyter_gpu_ckpt.hub.service
from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.hub import GpuCkptHub
from jupyter_gpu_ckpt.hub.service_reading import Person, UserStores
from jupyter_gpu_ckpt.store.acting import file_user
root, uid = Path(sys.argv[1]), int(sys.argv[2])
loaded, acted = [], []
def hear(event, args):
    if event in ("import", "open") and file_user() == uid:
        (loaded if event == "import" else acted).append(args[0])
sys.addaudithook(hear)
stores = UserStores(GpuCkptHub(store_url=str(root)), Person("alice"), root.parent / "tiers")
report = stores.read()
pinned, other, *_ = (state.id for state in report.states if state.problem is None)
stores.pin(pinned, True)
stores.expire(1.0, dry_run=True)
stores.expire(1.0, dry_run=False)
stores.delete(pinned)
for wrong in ("20260101T000000Z-00000000", "20269999T000000Z-00000000"):
    try:
        stores.delete(wrong)
    except CkptError:
        pass
stores.collect()
stores.read()
stores.close()
print(len(acted) > 10, loaded)
"""


@pytest.mark.root
def test_a_service_that_reads_as_a_user_needs_no_more_of_its_own_files(shared: Path) -> None:
    # Where the interpreter is may be closed to her: what it has not loaded by then is not found.
    root, account = shared / "states", Account()
    root.mkdir()
    root.chmod(0o1777)
    user = User(root, "alice")
    for number in range(4):
        user.kernel("kernel-a", "a.ipynb", status="lost")
        user.state("kernel-a", "a.ipynb", ago(days=number + 1))
    user.kernel("kernel-b", "b.ipynb", status="running", stop=ServerStop(
        at=iso(ago(hours=1)), seconds=1.0, kernels=1, saved=1,
    ))  # fmt: skip
    damaged = user.state("kernel-b", "b.ipynb", ago(days=9))
    user.owner.manifest("kernel-b", damaged).write_text("{")
    user.failure("kernel-b", "b.ipynb", "Too large.", ago(hours=1))
    user.give_to(account.uid, account.gid)
    argv = [sys.executable, "-c", READS_AS_HER, str(root), str(account.uid)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert result.stdout.strip() == "True []", result.stderr
