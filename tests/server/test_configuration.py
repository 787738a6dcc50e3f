"""The configuration page is true: every trait is there, with its default."""

from __future__ import annotations

from typing import Any

import pytest
from traitlets import TraitError
from traitlets.config import Configurable

from jupyter_gpu_ckpt.app import GpuCkptApp
from jupyter_gpu_ckpt.autosave import AutoSave
from jupyter_gpu_ckpt.notices.clouds import AwsNotice, AzureNotice, GcpNotice
from jupyter_gpu_ckpt.notices.local import FileNotice, SignalNotice
from jupyter_gpu_ckpt.notices.slurm import SlurmNotice
from jupyter_gpu_ckpt.provisioner import GpuCkptProvisioner
from jupyter_gpu_ckpt.settings import GpuCkpt
from tests.harness.node import REPOSITORY

PAGE = REPOSITORY / "docs" / "configuration.md"
UNITS = {256 << 20: "256 MiB", 1 << 30: "1 GiB", 4 << 30: "4 GiB", 64 << 30: "64 GiB"}


def own_traits(kind: type[Configurable]) -> dict[str, Any]:
    """The traits that this project adds to a class."""
    return {
        name: trait
        for name, trait in kind.class_traits(config=True).items()
        if trait.this_class.__module__.startswith("jupyter_gpu_ckpt.")
    }


def rows(section: str) -> dict[str, str]:
    """The rows of a section's table: the default, by trait."""
    end = "\n##" if section.endswith("Notice") else "\n## "
    text = PAGE.read_text().split(f"`c.{section}`\n", 1)[1].split(end)[0]
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    return {row[1].strip().strip("`"): row[2].strip() for row in cells}


NOTICES = [FileNotice, SignalNotice, SlurmNotice, AwsNotice, GcpNotice, AzureNotice]


@pytest.mark.parametrize("kind", [GpuCkpt, GpuCkptProvisioner, AutoSave, *NOTICES])
def test_every_trait_is_documented_with_its_default(kind: type[Configurable]) -> None:
    traits, documented = own_traits(kind), rows(kind.__name__)
    assert set(documented) == set(traits)
    for name, trait in traits.items():
        default = trait.default() if callable(getattr(trait, "default", None)) else None
        said = documented[name]
        if default is None or isinstance(default, bool):
            assert said.startswith(f"`{default}`"), name
        elif isinstance(default, int | float):
            assert said == UNITS.get(int(default), f"{default:g}"), name
        elif name == "node_local_dirs":
            assert said == ", ".join(f"`{entry}`" for entry in default)
        assert trait.help, name


def test_the_extension_itself_has_none() -> None:
    assert own_traits(GpuCkptApp) == {}
    assert "`c.GpuCkptApp`, the server extension itself, has no traits" in PAGE.read_text()


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), 7 * 24 * 3600.0])
@pytest.mark.parametrize("trait", ["save_timeout", "restore_timeout", "hold_timeout"])
def test_a_deadline_that_no_save_could_use_is_refused_at_start(trait: str, value: float) -> None:
    with pytest.raises(TraitError, match=trait):
        GpuCkpt(**{trait: value})


@pytest.mark.parametrize("value", [-1, 1 << 32])
def test_a_ghost_limit_that_no_save_could_use_is_refused_at_start(value: int) -> None:
    with pytest.raises(TraitError, match="ghost_limit"):
        GpuCkpt(ghost_limit=value)


@pytest.mark.parametrize("value", [["tmp"], ["/tmp", ""], [f"/{i}" for i in range(65)]])
def test_node_local_folders_that_no_save_could_use_are_refused_at_start(value: list[str]) -> None:
    with pytest.raises(TraitError, match="node_local_dirs"):
        GpuCkpt(node_local_dirs=value)
