"""What an administrator fixes or bounds counts, whatever else configures a server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from traitlets import TraitError
from traitlets.config import Config

from jupyter_gpu_ckpt import limits
from jupyter_gpu_ckpt.autosave import AutoSave
from jupyter_gpu_ckpt.limits import VARIABLE, Limits, Rule
from jupyter_gpu_ckpt.provisioner import GpuCkptProvisioner
from jupyter_gpu_ckpt.settings import GpuCkpt


@pytest.fixture(autouse=True)
def no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an administrator's file would be."""
    monkeypatch.setattr(limits, "FILE", tmp_path / "limits.json")
    return tmp_path / "limits.json"


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set rules, as a hub does."""

    def set_rules(**rules: dict[str, Rule]) -> None:
        monkeypatch.setenv(VARIABLE, Limits(rules=rules).encoded())

    return set_rules


def test_a_user_who_asks_for_more_is_cut_to_the_limit_and_told(
    limit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limit(
        GpuCkpt={"quota": Rule(value=100, most=100), "store_url": Rule(value="/s", fixed=True)},
        AutoSave={"idle": Rule(least=120)},
    )
    config = Config({"StoreSettings": {"quota": 500}})  # as good a section as GpuCkpt
    config.GpuCkpt.store_url = "/tmp/mine"
    config.AutoSave.idle = 1.0
    with caplog.at_level(logging.WARNING):
        settings = GpuCkpt(config=config, log=logging.getLogger("server"))
        policy = AutoSave(config=config, log=logging.getLogger("server"))
    assert (settings.quota, settings.store_url, policy.idle) == (100, "/s", 120.0)
    assert caplog.messages == [
        "gpu-ckpt: GpuCkpt.quota is 100 and not 500, as configured. "
        "The administrator allows no more than that.",
        "gpu-ckpt: GpuCkpt.store_url is '/s' and not '/tmp/mine', as configured. "
        "The administrator has fixed it.",
        "gpu-ckpt: AutoSave.idle is 120.0 and not 1.0, as configured. "
        "The administrator allows no less than that.",
    ]
    settings.config = Config({"GpuCkpt": {"quota": None}})  # no limit is more than any
    assert settings.quota == 100


def test_less_than_the_limit_is_the_users_choice(limit: Any) -> None:
    limit(GpuCkpt={"quota": Rule(value=100, most=100), "keep_last": Rule(value=5)})
    assert GpuCkpt().quota == 100
    settings = GpuCkpt(config=Config({"GpuCkpt": {"quota": 50, "keep_last": 7}}))
    assert (settings.quota, settings.keep_last) == (50, 7)
    settings.update_config(Config({"GpuCkpt": {"keep_last": 8}}))
    assert (settings.quota, settings.keep_last) == (50, 8)


def test_what_is_fixed_without_a_value_is_the_packages_default(limit: Any) -> None:
    limit(GpuCkpt={"keep_last": Rule(fixed=True)}, AutoSave={"idle": Rule(most=300)})
    assert GpuCkpt(config=Config({"GpuCkpt": {"keep_last": 99}})).keep_last == 10
    assert AutoSave(config=Config({"AutoSave": {"idle": 0}})).idle == 300  # 0 is never


def test_a_kernelspec_cannot_undo_it_either(limit: Any) -> None:
    limit(GpuCkptProvisioner={"enabled": Rule(value=False, fixed=True)})
    assert not GpuCkptProvisioner(enabled=True).enabled


@pytest.mark.root  # whose file it must be
def test_the_administrators_file_wins_over_the_variable(
    limit: Any, no_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(GpuCkpt={"quota": Rule(value=10**9)})
    no_file.write_text('{"rules": {"GpuCkpt": {"quota": {"value": 7, "most": 7}}}}')
    assert GpuCkpt(config=Config({"GpuCkpt": {"quota": 10**9}})).quota == 7
    no_file.chmod(0o666)
    with pytest.raises(TraitError, match="nobody else may write it"):
        GpuCkpt()


@pytest.mark.parametrize("text", ["no base64", "bm8=", "eyJ2ZXJzaW9uIjoyfQ==", "eyJ4IjoxfQ=="])
def test_limits_that_are_not_understood_are_no_permission(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(TraitError, match="cannot be understood"):
        GpuCkpt()
