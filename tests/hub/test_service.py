"""The page of all users' saved states, in a real JupyterHub: who sees and does what."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import sqlite3
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import requests
from playwright.sync_api import expect
from prometheus_client.parser import text_string_to_metric_families

from jupyter_gpu_ckpt.store import ServerStop, StateStore
from tests.conftest import EVIDENCE
from tests.harness.browser import chromium
from tests.harness.client import wait_for
from tests.harness.contrast import contrasts
from tests.harness.hub import PASSWORD, Hub
from tests.harness.node import REPOSITORY
from tests.harness.server import Home, free_port, shared_folder
from tests.harness.user import User as Account
from tests.hub.generated import MIB, User, ago, crowd, iso

GRAFANA = REPOSITORY / "docs" / "jupyterhub" / "grafana.json"

#: Who may see all, who may manage all, who may have metrics: besides the hub's administrators.
ROLES = """
c.JupyterHub.load_roles += [
    {"name": "readers", "scopes": ["custom:gpu-ckpt:read"], "users": ["reader"]},
    {
        "name": "operators", "services": ["operator"],
        "scopes": ["custom:gpu-ckpt:manage", "access:services!service=gpu-ckpt"],
    },
    {"name": "managers", "scopes": ["custom:gpu-ckpt:manage"], "users": ["manager"]},
    {
        "name": "prometheus", "services": ["prometheus"],
        "scopes": ["custom:gpu-ckpt:metrics", "access:services!service=gpu-ckpt"],
    },
]
c.JupyterHub.services += [
    {"name": "prometheus", "api_token": "token-of-prometheus"},
    {"name": "operator", "api_token": "token-of-operator"},
]
from jupyter_gpu_ckpt.hub import add_admin_page
"""


@dataclass
class World:
    """The hub, its users' states by what they are there for, and the service's folder."""

    hub: Hub
    store: Path
    folder: Path
    states: dict[str, str]

    def page(self, path: str = "") -> str:
        return f"{self.hub.url}/services/gpu-ckpt/{path}"

    def get(self, path: str, token: str) -> requests.Response:
        return self.call("GET", path, token)

    def call(self, method: str, path: str, token: str, body: object = None) -> requests.Response:
        headers = {"Authorization": f"token {token}"}
        return requests.request(
            method, self.page(path), headers=headers, json=body, timeout=30, allow_redirects=False
        )

    def report(self, user: str, token: str) -> dict[str, Any]:
        answer = self.get(f"api/users/{user}", token)
        answer.raise_for_status()
        return dict(answer.json())


class Browser(requests.Session):
    """Somebody who has logged in, without JavaScript."""

    def __init__(self, hub: Hub, user: str) -> None:
        super().__init__()
        self.headers["Sec-Fetch-Mode"] = "navigate"
        page = self.get(f"{hub.url}/hub/login", timeout=30)
        form = {"username": user, "password": PASSWORD, "_xsrf": self.cookies["_xsrf"]}
        where = f"{hub.url}/hub/login?next=/hub/home"
        page = self.post(where, data=form, timeout=30)
        assert page.ok and page.url.endswith("/hub/home"), page.text

    def post_form(self, url: str, page: str, **fields: str) -> requests.Response:
        """Post a form as it is on a page, with the token against forgery that the page has."""
        token = re.search(r'name="_xsrf" value="([^"]+)"', page)
        assert token is not None
        return self.post(url, data={**fields, "_xsrf": token[1]}, timeout=30)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with shared_folder("hub-page") as shared:
        store, folder = shared / "states", shared / "service"
        store.mkdir()
        store.chmod(0o1777)
        states = {}
        alice = User(store, "alice")
        alice.kernel("kernel-a", "work.ipynb", status="lost")
        alice.kernel("kernel-b", "<b>bold</b>.ipynb", status="running")
        states["old"] = alice.state("kernel-a", "work.ipynb", ago(days=50))
        states["new"] = alice.state("kernel-a", "work.ipynb", ago(hours=2), shares=[states["old"]])
        states["busy"] = alice.state("kernel-b", "<b>bold</b>.ipynb", ago(days=60), stored=70 * MIB)
        states["ended"] = alice.state("kernel-c", "=1+1.ipynb", ago(days=40), reason="user")
        alice.failure("kernel-b", "<b>bold</b>.ipynb", "Too <large> for the quota.", ago(hours=1))
        # As with a spawner that gives each user an account of the system.
        account = Account()
        alice.give_to(account.uid, account.gid)
        bob = User(store, "bob")
        stop = ServerStop(at=iso(ago(hours=3)), seconds=7.25, kernels=3, saved=2)
        for number in range(2):  # both say so
            bob.kernel(f"kernel-{number}", "of bob.ipynb", stop=stop)
        made_up = ServerStop(at="<i>now", seconds=1e300, kernels=-1, saved=5)
        bob.kernel("kernel-x", "made up.ipynb", stop=made_up)
        states["bob"] = bob.state(
            "kernel-d", "secret plans.ipynb", ago(hours=3), reason="shutdown", frozen=2.54
        )
        broken = User(store, "carol@example.org")
        (broken.owner.folder / "store.json").write_text("{")
        more = f"{ROLES}\nadd_admin_page(c, url='http://127.0.0.1:{free_port()}', "
        more += f"folder={str(folder)!r}, interval=1)"
        config: dict[str, dict[str, Any]] = {
            "GpuCkptHub": {"store_url": str(store), "user_quotas": {"alice": 100 * MIB}},
            "Authenticator": {"admin_users": {"admin"}},
        }
        with Hub(Home(shared / "hub"), hub_config=config, more=more) as hub:
            for name in ("alice", "bob", "carol@example.org", "dora"):
                hub.add_user(name)
            yield World(hub, store, folder, states)


@pytest.fixture(scope="module")
def admin(world: World) -> Browser:
    return Browser(world.hub, "admin")


def test_an_administrator_sees_all_users(world: World, admin: Browser) -> None:
    wait_for(
        "all are read",
        lambda: "been read yet" not in (page := admin.get(world.page()).text) and "dora" in page,
        30,
    )
    page = admin.get(world.page()).text
    rows = {
        re.findall(r"users/[^\"]*\">([^<]*)<", row)[0]: re.findall(r"<td[^>]*>([^<]*)<", row)
        for row in re.findall(r"<tr>(.*?)</tr>", page.split('id="failures"')[0], re.DOTALL)
        if "users/" in row
    }
    assert rows["alice"][:5] == ["4", "400 MiB", "100 MiB", "100 MiB", "100%"]
    assert rows["alice"][7:] == ["1", "1"]
    assert rows["bob"][:3] == ["1", "100 MiB", "10.0 MiB"]
    assert rows["dora"][0] == "0"
    # What was saved as servers were stopped, and how long their kernels stood still for it.
    (saved,) = re.findall(r"<tr>(.*?)</tr>", page.split('id="ends"')[1].split("<tbody>")[1], re.S)
    assert "secret plans.ipynb" in saved and "before a shutdown" in saved and "2.5 s" in saved
    # How long the stop of a server took, and what of it was saved.
    stops = page.split('id="stops"')[1].split('id="ends"')[0].split("<tbody>")[1]
    (stop,) = re.findall(r"<tr>(.*?)</tr>", stops, re.S)
    assert ">bob<" in stop and "2 of 3" in stop and "7.2 s" in stop and ">3 h<" in stop
    # One whose store is damaged is a row with the reason, for people.
    assert "store.json is damaged" in rows["carol@example.org"][0]
    # What users have made up is text.
    assert "Too &lt;large&gt; for the quota." in page and "<b>bold" not in page
    assert "Content-Security-Policy" in admin.get(world.page()).headers


def test_a_user_sees_her_own_only(world: World) -> None:
    bob = Browser(world.hub, "bob")
    page = bob.get(world.page(), timeout=30)
    assert page.url == world.page("users/bob")
    assert "secret plans.ipynb" in page.text and "alice" not in page.text
    token = world.hub.token_of("bob")
    alices = ["users/alice", "users/alice/states.csv", "users/alice/expire"]
    for path in [*alices, f"users/alice/states/{world.states['new']}/delete", "users/nobody"]:
        assert bob.get(world.page(path), timeout=30).status_code == 404
    assert world.get("api/users/alice", token).status_code == 404
    for method in ("PATCH", "DELETE"):
        state = f"api/users/alice/states/{world.states['new']}"
        assert world.call(method, state, token, {"pinned": True}).status_code == 404
        mine = f"api/users/bob/states/{world.states['new']}"  # hers, by way of his own
        assert world.call(method, mine, token, {"pinned": True}).status_code == 404
    for path in ("api/users", "users.csv"):
        assert "alice" not in (answer := world.get(path, token)).text and "bob" in answer.text
    assert world.get("metrics", token).status_code == 403
    assert requests.get(world.page("api/users/bob"), timeout=30).status_code == 403
    assert world.report("alice", world.hub.token_of("admin"))["states"]


def test_scopes_say_who_sees_and_who_changes(world: World) -> None:
    state = f"api/users/alice/states/{world.states['ended']}"
    reader, manager = world.hub.token_of("reader"), world.hub.token_of("manager")
    assert {state["id"] for state in world.report("alice", reader)["states"]} >= {
        world.states["new"], world.states["busy"],
    }  # fmt: skip
    refused = world.call("PATCH", state, reader, {"pinned": True})
    assert refused.status_code == 403 and "not change" in refused.json()["message"]
    assert world.call("PATCH", state, manager, {"pinned": True}).status_code == 204
    pinned = {row["id"]: row["pinned"] for row in world.report("alice", reader)["states"]}
    assert [id for id, is_pinned in pinned.items() if is_pinned] == [world.states["ended"]]
    assert world.call("PATCH", state, manager, {"pinned": "x"}).json()["reason"] == "bad_request"
    assert world.call("PATCH", state, manager, {"pinned": False}).status_code == 204


def test_what_is_done_needs_the_pages_own_form_and_is_in_the_audit_log(
    world: World, admin: Browser
) -> None:
    here, url = world.states["bob"], world.page(f"users/bob/states/{world.states['bob']}")
    # From another site there is the cookie, and no token.
    for fields in ({"pinned": "yes"}, {"pinned": "yes", "_xsrf": "made-up"}):
        assert admin.post(f"{url}/pin", data=fields, timeout=30).status_code == 403
    page = admin.get(world.page("users/bob"), timeout=30).text
    assert "Pin<" in page and "pinned<" not in page
    done = admin.post_form(f"{url}/pin", page, pinned="yes")
    assert done.url.endswith("users/bob?done=pinned")
    assert "stays whatever the rules say" in done.text and "Unpin<" in done.text

    asked = admin.get(f"{url}/delete", timeout=30).text
    assert "It is pinned" in asked and "frees 10.0 MiB" in asked
    gone = admin.post_form(f"{url}/delete", asked)
    assert "The state is deleted" in gone.text and "secret plans" not in gone.text
    assert StateStore(world.store, "bob").states() == []
    assert admin.post_form(f"{url}/delete", asked).status_code == 404

    # Anybody can write a header; what the hub's proxy adds to another one counts.
    alices = f"api/users/alice/states/{world.states['new']}"
    forged = {"X-Real-Ip": "6.6.6.6", "X-Forwarded-For": "6.6.6.6"}
    headers = {"Authorization": "token token-of-operator", **forged}
    answer = requests.patch(world.page(alices), headers=headers, json={"pinned": False}, timeout=30)
    assert answer.status_code == 204

    audit = world.folder / "audit.jsonl"
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    about_bob = [line for line in lines if line["user"] == "bob" and line["state"] == here]
    assert [(line["action"], line["result"]) for line in about_bob] == [
        ("pin", "begun"), ("pin", "done"), ("delete", "begun"), ("delete", "done"),
        ("delete", "begun"), ("delete", "unknown_state"),
    ]  # fmt: skip
    assert {(line["by"], line["by_kind"]) for line in about_bob} == {("admin", "user")}
    assert (lines[-1]["by"], lines[-1]["by_kind"]) == ("operator", "service")
    assert {line["from_address"] for line in lines} == {"127.0.0.1"}
    assert stat.S_IMODE(audit.stat().st_mode) == 0o600
    assert stat.S_IMODE(world.folder.stat().st_mode) == 0o700


def test_old_states_expire_but_not_what_a_kernel_may_come_back_from(
    world: World, admin: Browser
) -> None:
    page = admin.get(world.page("users/alice/expire?days=30"), timeout=30).text
    assert "work.ipynb" in page and "=1+1.ipynb" in page and "bold" not in page
    assert "Delete 2 states" in page
    done = admin.post_form(world.page("users/alice/expire"), page, days="30")
    assert "The states are deleted" in done.text
    left = {row["id"] for row in world.report("alice", world.hub.token_of("alice"))["states"]}
    assert left == {world.states["new"], world.states["busy"]}
    # What is left is the user's own, as before.
    account = Account()
    kernels = world.store / "alice" / "kernels"
    assert {path.stat().st_uid for path in kernels.rglob("*")} == {account.uid}
    wrong = admin.get(world.page("users/alice/expire?days=never"), timeout=30)
    assert wrong.status_code == 400 and "Days are a number" in wrong.text


def test_a_link_in_a_users_store_leads_nowhere(world: World, admin: Browser) -> None:
    dora = User(world.store, "dora")
    dora.kernel("kernel-e", "e.ipynb")
    mine = dora.state("kernel-e", "e.ipynb", ago(hours=1))
    account = Account()
    dora.give_to(account.uid, account.gid)
    other = User(world.store, "roots")
    target = other.state("kernel-f", "f.ipynb", ago(hours=5))
    (dora.owner.kernels / "kernel-f").symlink_to(other.owner.kernels / "kernel-f")
    token = world.hub.token_of("admin")

    def read() -> bool:
        return not world.report("dora", token)["problem"]

    wait_for("it is read", lambda: not read() or world.report("dora", token)["states"], 30)
    report = world.report("dora", token)
    assert target not in [row["id"] for row in report["states"]]
    world.call("DELETE", f"api/users/dora/states/{target}", token)
    assert [state.id for state in StateStore(world.store, "roots").states()] == [target]
    (dora.owner.kernels / "kernel-f").unlink()
    wait_for("it is read again", read, 30)
    assert [row["id"] for row in world.report("dora", token)["states"]] == [mine]


def test_states_of_a_deleted_user_are_shown_and_can_be_deleted(
    world: World, admin: Browser
) -> None:
    world.hub.add_user("erin")
    erin = User(world.store, "erin")
    state = erin.state("kernel-g", "left behind.ipynb", ago(days=3))
    token = world.hub.token_of("admin")

    def row() -> dict[str, Any] | None:
        users = world.get("api/users", token).json()["users"]
        return next((user for user in users if user["user"] == "erin"), None)

    wait_for("it is read", lambda: (found := row()) and found["states"] == 1, 30)
    world.hub.delete_user("erin")
    wait_for("she is gone", lambda: (found := row()) and found["deleted"], 30)
    assert re.search(r"erin</a> <span class=\"tag\">deleted user", admin.get(world.page()).text)
    page = admin.get(world.page("users/erin"), timeout=30).text
    assert "The hub has deleted this user" in page and "left behind.ipynb" in page
    assert "erin" not in world.get("users.csv", world.hub.token_of("bob")).text
    asked = world.page(f"users/erin/states/{state}/delete")
    done = admin.post_form(asked, admin.get(asked, timeout=30).text)
    assert "The state is deleted" in done.text
    wait_for("nothing is left of her", lambda: row() is None, 30)


def test_tables_for_spreadsheets_and_programs(world: World) -> None:
    token = world.hub.token_of("reader")
    rows = list(csv.DictReader(io.StringIO(world.get("users.csv", token).text)))
    alice = next(row for row in rows if row["user"] == "alice")
    assert int(alice["used"]) > 0 and alice["failed"] == "1"
    states = world.get("users/alice/states.csv", token)
    assert states.headers["Content-Type"].startswith("text/csv")
    assert "'=1+1.ipynb" in states.text or "=1+1.ipynb" not in states.text
    everybody = world.get("api/users", token).json()
    assert everybody["problem"] is None
    assert {user["user"] for user in everybody["users"]} >= {"alice", "bob", "carol@example.org"}
    assert world.get("api/nothing", token).json()["reason"] == "unknown_path"


def test_prometheus_reads_what_the_dashboard_shows(world: World) -> None:
    text = world.get("metrics", "token-of-prometheus").text
    found = {sample.name for family in text_string_to_metric_families(text)
             for sample in family.samples}  # fmt: skip
    assert world.get("api/users/alice", "token-of-prometheus").status_code == 404
    assert 'gpu_ckpt_hub_store_readable{user="carol@example.org"} 0.0' in text
    assert 'gpu_ckpt_hub_quota_bytes{user="alice"} 1.048576e+08' in text
    assert 'gpu_ckpt_hub_kernels{status="lost",user="alice"} 1.0' in text
    assert 'gpu_ckpt_hub_last_stop_seconds{user="bob"} 7.25' in text
    assert 'gpu_ckpt_hub_last_stop_kernels{result="not_saved",user="bob"} 1.0' in text
    dashboard = json.loads(GRAFANA.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"gpu_ckpt_\w+", query)}
    assert asked and asked <= found
    assert found - asked <= {"gpu_ckpt_hub_actions_created"}, "what the dashboard does not show"


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_read_and_used_without_scripts_and_by_keyboard(
    world: World, scheme: Literal["light", "dark"]
) -> None:
    samples = [(at, (200 + at % 60) * MIB, 700 * MIB, 4) for at in range(0, 720, 6)]
    with contextlib.closing(sqlite3.connect(world.folder / "usage.sqlite", timeout=10)) as usage:
        usage.executemany(
            "insert or replace into usage values (?, ?, ?, ?, ?, ?)",
            [
                (user, int(time.time() // 3600) - ago, time.time() - ago * 3600, used, size, states)
                for ago, used, size, states in samples if ago
                for user in ("", "alice")
            ],
        )  # fmt: skip
        usage.commit()
    with chromium() as running:
        context = running.new_context(color_scheme=scheme)
        page = context.new_page()
        page.route("**/*.js", lambda route: route.abort())
        page.goto(f"{world.hub.url}/hub/login?next=/services/gpu-ckpt/")
        page.locator("#username_input").fill("manager")
        page.locator("#password_input").fill(PASSWORD)
        page.locator("#login_submit").click()
        users = page.get_by_role("table", name="Users and what their saved states take")
        expect(users).to_be_visible(timeout=30_000)
        expect(page.get_by_role("img", name="Bytes in the store, last 30 days")).to_be_visible()
        dull = {text: ratio for text, ratio in contrasts(page, "body").items() if ratio < 4.5}
        assert not dull
        page.screenshot(path=EVIDENCE / f"hub-page-users-{scheme}.png", full_page=True)
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        page.get_by_role("link", name="alice").first.press("Enter")
        states = page.get_by_role("table", name="Saved states, newest first")
        expect(states).to_be_visible()
        assert not {text for text, ratio in contrasts(page, "body").items() if ratio < 4.5}
        pin = states.get_by_role("button", name=re.compile("^(Pin|Unpin) work.ipynb")).first
        word = (pin.text_content() or "").strip()
        pin.press("Enter")
        expect(page.get_by_role("status")).to_contain_text("pinned")
        after = {"Pin": "Unpin", "Unpin": "Pin"}[word]
        name = re.compile(f"^{after} work.ipynb")
        expect(states.get_by_role("button", name=name).first).to_be_visible()
        page.screenshot(path=EVIDENCE / f"hub-page-user-{scheme}.png", full_page=True)
        context.close()


def test_with_many_users_the_page_answers_within_a_second(world: World) -> None:
    # Last, as they stay. How long it takes is measured in benchmarks/hub.py: much less.
    names = crowd(world.store, users=200, kernels=5, states=1)
    world.hub.add_users(names)
    known = re.compile(r"[^2-9]2\d\d users[^,]*, 1,?\d\d\d states")
    headers = {"Authorization": "token token-of-operator"}
    with requests.Session() as client:
        client.headers.update(headers)

        def get(path: str) -> tuple[float, str]:
            began = time.monotonic()
            answer = client.get(world.page(path), timeout=60)
            answer.raise_for_status()
            return time.monotonic() - began, answer.text

        wait_for("all are read", lambda: known.search(get("")[1]), 90, 0.5)
        for path in ("", f"users/{names[7]}", "api/users", "metrics"):
            wait_for(f"{path!r} is quick", lambda path=path: get(path)[0] < 1, 30)
