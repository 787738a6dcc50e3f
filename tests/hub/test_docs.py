"""The administrator's page is true, and its files work: values, images, settings."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from traitlets.config import Config

from jupyter_gpu_ckpt.hub import GpuCkptHub
from jupyter_gpu_ckpt.hub.settings import CAPABILITIES
from jupyter_gpu_ckpt.limits import VARIABLE
from tests.harness.node import REPOSITORY

PAGE = REPOSITORY / "docs" / "jupyterhub.md"
FILES = REPOSITORY / "docs" / "jupyterhub"


def test_every_setting_is_documented_with_its_default() -> None:
    text = PAGE.read_text().split("## Settings: `c.GpuCkptHub`\n")[1].split("\n## ")[0]
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    said = {row[1].strip().strip("`"): row[2].strip() for row in cells}
    traits = GpuCkptHub.class_own_traits(config=True)
    assert set(said) == set(traits)
    for name, trait in traits.items():
        default: Any = trait.default()
        if default is None or isinstance(default, str):
            assert said[name] == f"`{default}`", name
        elif isinstance(default, float):
            assert said[name] == f"{default:g}", name
        elif not default:
            assert said[name] == "none", name


def test_the_values_of_zero_to_jupyterhub_configure_its_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = yaml.safe_load((FILES / "values.yaml").read_text())
    hub = values["hub"]
    c = Config()  # as the chart's jupyterhub_config.py makes it
    c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
    c.KubeSpawner.environment = dict(values["singleuser"]["extraEnv"])
    for section, traits in hub["config"].items():
        c[section].update(traits)
    (mount,) = hub["extraVolumeMounts"]
    (volume,) = hub["extraVolumes"]
    assert mount["name"] == volume["name"]
    # In the volume there is the key, which the hub's group may read and nobody else.
    assert Path(c.GpuCkptHub.master_key_file).parent == Path(mount["mountPath"])
    assert volume["secret"]["defaultMode"] == 0o440
    key = tmp_path / "key"
    key.write_text("5" * 64)
    key.chmod(0o600)
    c.GpuCkptHub.master_key_file = str(key)
    assert list(hub["extraConfig"]) == ["zz-gpu-ckpt"]
    exec(hub["extraConfig"]["zz-gpu-ckpt"], {"c": c})
    assert c.KubeSpawner.delete_grace_period > 60
    assert {VARIABLE, "AWS_ENDPOINT_URL"} <= set(c.KubeSpawner.environment)
    anna = SimpleNamespace(
        user=SimpleNamespace(name="anna", groups=[]), name="", environment=c.KubeSpawner.environment
    )
    context = asyncio.run(c.KubeSpawner.container_security_context(anna))
    assert context["capabilities"]["add"] == [*CAPABILITIES["minimal"]]


def only(**properties: Any) -> dict[str, Any]:
    """An object that has no other properties."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


TEXT: dict[str, Any] = {"type": "string"}
FREE: dict[str, Any] = {"type": "object"}
IMAGE = only(name=TEXT, tag=TEXT) | {"required": ["name", "tag"]}
#: What the chart's own schema (of 3.x and 4.x) says of the values that ours sets. It is strict: the
#: chart refuses a name that it does not know. Whoever sets another value looks it up there.
CHART = only(
    hub=only(
        image=IMAGE,
        config=FREE | {"additionalProperties": FREE},
        extraConfig=FREE | {"additionalProperties": TEXT},
        extraVolumes={"type": "array", "items": FREE},
        extraVolumeMounts={"type": "array", "items": FREE},
    ),
    singleuser=only(
        image=IMAGE, serviceAccountName=TEXT, extraEnv=FREE | {"additionalProperties": TEXT}
    ),
    cull=only(enabled={"type": "boolean"}, timeout={"type": "integer"}),
)


def test_the_values_are_ones_that_the_chart_takes() -> None:
    values = yaml.safe_load((FILES / "values.yaml").read_text())
    jsonschema.validate(values, CHART)
    for wrong in ({"hub": {"extraconfig": {}}}, {"cull": {"timeout": "1h"}}, {"gpuCkpt": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | wrong, CHART)
    # What goes into the hub's pod as it is, is what Kubernetes takes.
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "hub"},
        "spec": {
            "volumes": values["hub"]["extraVolumes"],
            "containers": [
                {
                    "name": "hub",
                    "image": ":".join(values["hub"]["image"].values()),
                    "volumeMounts": values["hub"]["extraVolumeMounts"],
                }
            ],
        },
    }
    kubernetes_validate.validate(pod, "1.32", strict=True)


def test_the_image_has_all_that_a_server_needs() -> None:
    text = (FILES / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [re.sub(r"\s+", " ", line) for line in text.splitlines() if line and line[0] != "#"]
    assert steps[0].startswith("FROM ")
    runs = [step for step in steps if step.startswith("RUN ")]
    order = [
        next(number for number, step in enumerate(runs) if what in step)
        for what in ("pip install", "jupyter-gpu-ckpt-get-criu", "setcap")
    ]
    assert order == sorted(order)
    granted = re.search(r"setcap (\S+)=p ", runs[order[-1]])
    assert granted is not None
    assert granted[1] == ",".join(f"cap_{name.lower()}" for name in CAPABILITIES["minimal"])
    # As root, and then not any more.
    assert [step for step in steps if step.startswith("USER")] == ["USER root", "USER ${NB_UID}"]
    hub = (FILES / "Dockerfile.hub").read_text()
    assert "jupyter-gpu-ckpt[hub,s3]" in hub


#: What our dashboard says, in places that Grafana's own model has: so it was read last.
READ = {
    "editable",
    "panels.datasource.type",
    "panels.datasource.uid",
    "panels.description",
    "panels.fieldConfig.defaults.max",
    "panels.fieldConfig.defaults.min",
    "panels.fieldConfig.defaults.thresholds.mode",
    "panels.fieldConfig.defaults.thresholds.steps.color",
    "panels.fieldConfig.defaults.thresholds.steps.value",
    "panels.fieldConfig.defaults.unit",
    "panels.gridPos.h",
    "panels.gridPos.w",
    "panels.gridPos.x",
    "panels.gridPos.y",
    "panels.id",
    "panels.targets.datasource.type",
    "panels.targets.datasource.uid",
    "panels.targets.expr",
    "panels.targets.legendFormat",
    "panels.targets.refId",
    "panels.title",
    "panels.type",
    "refresh",
    "schemaVersion",
    "tags",
    "templating.list.label",
    "templating.list.name",
    "templating.list.query",
    "templating.list.type",
    "time.from",
    "time.to",
    "timezone",
    "title",
    "uid",
    "version",
}


def test_the_dashboard_is_one_as_grafana_reads_it() -> None:
    dashboard = json.loads((FILES / "grafana.json").read_text())
    assert set(_said(dashboard, "")) == READ
    if sys.version_info >= (3, 11):  # which the package with that model needs
        the_model_reads(dashboard)


def the_model_reads(dashboard: dict[str, Any]) -> None:
    """Check a dashboard against Grafana's own model."""
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    assert list(not_understood(dashboard)) == []
    # What Grafana has no place for is found: in the dashboard, a panel, its options, its queries.
    for where in ("", "panels", "panels options", "panels targets", "panels fieldConfig defaults"):
        wrong: Any = copy.deepcopy(dashboard)
        place = wrong
        for name in where.split():
            place = place[name][0] if isinstance(place[name], list) else place[name]
        place["madeUp"] = 1
        assert [path.rpartition(".")[2] for path in not_understood(wrong)] == ["madeUp"], where


def not_understood(dashboard: dict[str, Any]) -> Iterator[str]:
    """Where a dashboard says what is gone once Grafana's own model has read it."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    read = Dashboard.from_json(copy.deepcopy(dashboard))
    yield from _gone(dashboard, json.loads(JSONEncoder().encode(read)), "")


def _said(value: Any, path: str) -> Iterator[str]:
    """Where a dashboard says something."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if inner not in (None, [], {}, ""):
                yield from _said(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _said(inner, path)
    else:
        yield path


def _gone(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            if value not in (None, [], {}, ""):  # as it is without
                yield from _gone(value, after.get(name), f"{path}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _gone(one, other, f"{path}[{number}]")
    elif before != after:
        yield path


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
