"""``configure(c)``: what servers of a hub are given, and what a wrong setting says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.spawner import LocalProcessSpawner
from traitlets import TraitError
from traitlets.config import Config

from jupyter_gpu_ckpt import limits
from jupyter_gpu_ckpt.autosave import AutoSave
from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.hub import GpuCkptHub, configure
from jupyter_gpu_ckpt.hub.keys import VARIABLE as KEY
from jupyter_gpu_ckpt.hub.names import filled
from jupyter_gpu_ckpt.settings import GpuCkpt


@pytest.fixture(autouse=True)
def no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILE", tmp_path / "limits.json")


def user(name: str, *groups: str) -> Any:
    return SimpleNamespace(
        name=name, groups=[SimpleNamespace(name=group) for group in groups], url=f"/user/{name}/"
    )


def environment(c: Config, owner: Any, server: str = "") -> dict[str, str]:
    """What of us is in the environment that a spawner makes."""
    orm = SimpleNamespace(name=server, server=None, oauth_client=None, state=None)
    spawner = LocalProcessSpawner(
        config=c, user=owner, orm_spawner=orm, _deprecated_db_session=None
    )
    return {
        name: value(spawner) if callable(value) else value
        for name, value in spawner.environment.items()
    }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Be the server of a user; ``mine`` is the user's own configuration."""

    def be(c: Config, owner: Any, name: str = "", mine: Config | None = None) -> GpuCkpt:
        for variable, value in environment(c, owner, name).items():
            monkeypatch.setenv(variable, value)
        return GpuCkpt(config=mine or Config())

    return be


def test_two_lines_turn_it_on(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c = Config()
    c.GpuCkptHub.store_url = "s3://states/{username}"
    configure(c)
    settings = server(c, user("anna@example.org"), mine=Config({"GpuCkpt": {"owner": "bert"}}))
    assert settings.store_url == "s3://states/anna@example.org"
    assert settings.owner_name() == "anna@example.org"


def test_what_is_already_in_the_environment_of_servers_stays() -> None:
    c = Config()
    c.Spawner.environment = {"LANG": "C.UTF-8"}
    c.LocalProcessSpawner.environment = {"TERM": "dumb"}
    configure(c)
    assert set(environment(c, user("anna"))) == {"TERM", limits.VARIABLE}


@pytest.mark.parametrize(
    ("name", "server_name", "expected"),
    [
        ("anna", "", "/states/anna/_"),
        ("anna", "gpu", "/states/anna/gpu"),
        ("..", "..", "/states/%2E./%2E."),
        ("a/../b", "_", "/states/a%2F..%2Fb/%5F"),
        ("{username}", "", "/states/%7Busername%7D/_"),
    ],
)
def test_no_name_leads_out_of_the_users_place(name: str, server_name: str, expected: str) -> None:
    assert filled("/states/{username}/{servername}", name, server_name) == expected


def test_only_those_who_are_named_may_save(server: Any) -> None:
    c = Config()
    c.GpuCkptHub.allowed_users = ["anna"]
    c.GpuCkptHub.allowed_groups = ["gpu"]
    configure(c)
    for owner in (user("anna"), user("bert", "gpu")):
        server(c, owner)
        assert limits.denial() is None
    server(c, user("carl", "cpu"))
    assert (denied := limits.denial()) is not None
    assert denied.message == "This JupyterHub does not let your kernels be saved."


def test_the_largest_quota_of_a_users_groups_counts_and_a_users_own_first(server: Any) -> None:
    c = Config()
    c.GpuCkptHub.quota = 10
    c.GpuCkptHub.group_quotas = {"some": 20, "more": 30}
    c.GpuCkptHub.user_quotas = {"carl": 5}
    configure(c)
    greedy = Config({"GpuCkpt": {"quota": None}})
    assert server(c, user("anna"), mine=greedy).quota == 10
    assert server(c, user("bert", "some", "more"), mine=greedy).quota == 30
    assert server(c, user("carl", "more"), mine=greedy).quota == 5


def test_users_change_what_they_may_and_nothing_else(server: Any) -> None:
    c = Config()
    c.GpuCkptHub.idle = 300.0
    c.GpuCkptHub.shortest = 120.0
    c.GpuCkptHub.before_shutdown = True
    c.GpuCkptHub.users_may_change = ["idle", "keep_last"]
    c.GpuCkptHub.most_keep_last = 3
    mine = Config()
    mine.AutoSave.update(idle=10.0, interval=5.0, before_shutdown=False, shortest=1.0, locked=[])
    mine.GpuCkpt.update(keep_last=20, restore_on_start="always")
    configure(c)
    settings, policy = server(c, user("anna"), mine=mine), AutoSave(config=mine)
    assert (settings.keep_last, settings.restore_on_start) == (3, "prompt")
    assert (policy.idle, policy.interval, policy.before_shutdown) == (120.0, 1800.0, True)
    assert policy.shortest == 120.0
    assert "interval" in policy.locked and "idle" not in policy.locked


def test_what_all_of_a_node_share_no_user_changes(server: Any) -> None:
    mine = Config({"GpuCkpt": {"upload_bandwidth_per_node": 0.0, "node_turns_dir": "/tmp/mine"}})
    c = Config({"GpuCkptHub": {"upload_bandwidth_per_node": 5e6, "upload_bandwidth": 2e6}})
    configure(c)
    mine.GpuCkpt.upload_bandwidth = 9e6
    found = server(c, user("anna"), mine=mine)
    assert (found.upload_bandwidth_per_node, found.upload_bandwidth) == (5e6, 2e6)
    assert found.node_turns_dir == GpuCkpt.class_traits()["node_turns_dir"].default_value


def test_no_other_setting_keeps_more_than_the_most(server: Any) -> None:
    c = Config({"GpuCkptHub": {"most_keep_last": 3, "keep_daily": 5}})
    configure(c)
    for mine, counts in (
        ({"keep_last": 0, "keep_hourly": 0, "keep_daily": 0}, (1, 0, 0)),
        ({"keep_last": 99, "keep_hourly": 10**9, "keep_daily": 10**9}, (3, 24, 5)),
        ({"keep_last": 2, "keep_hourly": 7, "keep_daily": 1}, (2, 7, 1)),
        ({}, (3, 24, 5)),
    ):
        found = server(c, user("anna"), mine=Config({"GpuCkpt": mine}))
        assert (found.keep_last, found.keep_hourly, found.keep_daily) == counts


def test_each_user_gets_a_key_of_her_own_and_it_is_in_no_setting(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = tmp_path / "master"
    master.write_text("7" * 64)
    master.chmod(0o600)
    c = Config()
    c.GpuCkptHub.master_key_file = str(master)
    configure(c)
    ids = {}
    for name in ("anna", "bert", "anna"):
        ring = server(c, user(name), mine=Config({"GpuCkpt": {"key_env": "MINE"}})).key_ring()
        assert ring is not None and (key := ring.current()) is not None
        assert ids.setdefault(name, key.id) == key.id
        assert key.secret != bytes.fromhex("7" * 64)
    assert len(set(ids.values())) == 2
    some = Config({"GpuCkptHub": {"master_key_file": str(master), "allowed_users": ["anna"]}})
    configure(some)
    assert environment(some, user("anna"))[KEY] and not environment(some, user("bert"))[KEY]
    master.chmod(0o644)
    with pytest.raises(CkptError, match="read"):
        configure(c)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"allow_all": True, "allowed_users": ["anna"]}, "set one of them"),
        ({"key_file": "/k", "key_env": "K"}, "Only one of"),
        ({"store_url": "s3://b/{user}"}, "{user} stands for nothing"),
        ({"server_config": {"SlurmNotice": {"lead": 60}}}, "SlurmNotice is none of"),
        ({"server_config": {"GpuCkpt": {"spooldir": "/s"}}}, "there is no GpuCkpt.spooldir"),
        ({"users_may_change": ["quota"]}, "cannot be changed: quota"),
    ],
)
def test_a_wrong_setting_keeps_the_hub_from_starting(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TraitError, match=message.replace("{", r"\{")):
        configure(Config({"GpuCkptHub": values}))


def test_every_setting_says_what_it_does() -> None:
    assert [
        name for name, trait in GpuCkptHub.class_own_traits(config=True).items() if not trait.help
    ] == []


def test_the_hub_loads_neither_a_server_nor_jupyterhub_for_it() -> None:
    code = (
        "import sys; from jupyter_gpu_ckpt.hub import configure\n"
        "print([m for m in ('jupyter_server', 'jupyterhub', 'jupyter_client') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stderr
