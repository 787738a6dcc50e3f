"""The hint where a user's next server should start, from the states that she has."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
from traitlets.config import Config

from jupyter_gpu_ckpt.hub import configure, placement
from jupyter_gpu_ckpt.store import StateMeta, StateStore
from tests.hub.test_spawners import job, no_cluster, pod, pod_of, user  # noqa: F401

A100 = "NVIDIA A100-SXM4-40GB"
NODE: dict[str, Any] = {
    "id": "n", "hostname": "node-a", "boot_id": "b", "pid_ns": "p", "pod_uid": None,
    "kernel_release": "6.1", "machine": "x86_64", "cpu_model": "EPYC", "libc": None, "criu": "4.2",
    "cpu_flags": ["fpu", "sse2", "avx2", "avx512f", "amx_tile"], "driver": "580.95.05",
}  # fmt: skip
GPU = {
    "processes": [{"pid": 7, "memory_bytes": 1 << 30, "visible": "1"}],
    "gpus": [
        {"uuid": "GPU-0", "name": "NVIDIA T4", "memory_bytes": 16 << 30},
        {"uuid": "GPU-1", "name": A100, "memory_bytes": 40 << 30},
    ],
}
TERMS = [
    {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]},
    {
        "key": "feature.node.kubernetes.io/cpu-cpuid.AMXTILE", "operator": "In",
        "values": ["true"],
    },
    {"key": "feature.node.kubernetes.io/cpu-cpuid.AVX2", "operator": "In", "values": ["true"]},
    {
        "key": "feature.node.kubernetes.io/cpu-cpuid.AVX512F", "operator": "In",
        "values": ["true"],
    },
    {
        "key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-A100-SXM4-40GB"],
    },
    {"key": "nvidia.com/cuda.driver.major", "operator": "Gt", "values": ["579"]},
]  # fmt: skip


def save(root: Path, owner: str, kernel_id: str, gpu: dict[str, Any] | None) -> None:
    folder = root / "image"
    folder.mkdir(exist_ok=True)
    (folder / "core-1.img").write_bytes(b"core")
    store = StateStore(root / owner, owner)
    with store.begin(kernel_id) as writer:
        writer.add_tree(folder)
        writer.commit(
            StateMeta(
                kernel_id=kernel_id, kernel_name="python3", display_name="Python 3",
                language="python", node=NODE, gpu=gpu,
            )
        )  # fmt: skip
    store.stop(10.0)


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """Where anna has two kernels, one of them with GPU memory."""
    tmp_path.chmod(0o700)
    save(tmp_path, "anna", "5f4f6b2e-1a52-4c53-8d2f-6d9c6cf0a001", None)
    save(tmp_path, "anna", "5f4f6b2e-1a52-4c53-8d2f-6d9c6cf0a002", GPU)
    return tmp_path


def configured(kind: str, root: Path, placement: str, **more: dict[str, Any]) -> Config:
    c = Config(more)
    c.JupyterHub.spawner_class = kind
    c.GpuCkptHub.store_url = f"{root}/{{username}}"
    c.GpuCkptHub.placement = placement
    configure(c)
    return c


def affinity(c: Config, **more: Any) -> dict[str, Any] | None:
    """That of a second start's pod, which is a valid one."""
    made, _ = pod(c, **more)
    for _ in range(2):
        asyncio.run(made.run_pre_spawn_hook())
    manifest = pod_of(made)
    kubernetes_validate.validate(manifest, "1.32", strict=True)
    found: dict[str, Any] | None = manifest["spec"].get("affinity", {}).get("nodeAffinity")
    return found


def test_a_pod_is_wanted_where_the_states_can_be_restored(states: Path) -> None:
    kube = {
        "node_affinity_required": [{"matchExpressions": [{"key": "ssd", "operator": "Exists"}]}]
    }
    c = configured("kubespawner.KubeSpawner", states, "prefer", KubeSpawner=kube)
    assert affinity(c) == {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": kube["node_affinity_required"]
        },
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "preference": {"matchExpressions": TERMS}}
        ],
    }


def test_or_started_nowhere_else(states: Path) -> None:
    kube = {
        "node_affinity_required": [{"matchExpressions": [{"key": "ssd", "operator": "Exists"}]}]
    }
    c = configured("kubespawner.KubeSpawner", states, "require", KubeSpawner=kube)
    (term,) = affinity(c)["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "ssd", "operator": "Exists"}, *TERMS]


def test_who_has_no_states_starts_anywhere(states: Path) -> None:
    c = configured("kubespawner.KubeSpawner", states, "require")
    assert affinity(c, user=user("bert")) is None


def test_a_job_prefers_the_clusters_own_features(states: Path) -> None:
    names = {A100: "a100", "avx512f": "avx512", "x86_64": "intel"}
    c = configured(
        "batchspawner.SlurmSpawner", states, "prefer", SlurmSpawner={"req_options": "--nice=5"}
    )
    c.GpuCkptHub.slurm_features = names
    configure(c)
    made, _ = job(c)
    made.user = user("anna")
    for _ in range(2):
        asyncio.run(made.run_pre_spawn_hook())
    assert made.req_options == "--nice=5 --signal=B:USR2@95 --prefer=a100&avx512&intel"


@pytest.mark.parametrize(
    ("placement", "options", "expected"),
    [
        ("require", "--constraint=ib --nice=5", "--constraint=ib&a100 --nice=5"),
        ("require", "--nice=5 -C 'ib&ssd'", "--nice=5 --constraint=ib&ssd&a100"),
        ("require", "--prefer=ib", "--prefer=ib --constraint=a100"),
        ("prefer", "--constraint ib", "--constraint ib --prefer=a100"),
        ("prefer", "--prefer ib", "--prefer=ib&a100"),
        ("require", "--constraint=[rack1|rack2]", "--constraint=[rack1|rack2]"),
    ],
)
def test_a_jobs_own_features_are_needed_too(
    placement: str, options: str, expected: str, states: Path
) -> None:
    c = configured("batchspawner.SlurmSpawner", states, placement)
    c.GpuCkptHub.slurm_features = {A100: "a100"}
    configure(c)
    made, _ = job(c)
    made.user, made.req_options = user("anna"), options
    for _ in range(2):
        asyncio.run(made.run_pre_spawn_hook())
    assert made.req_options == expected


def test_what_is_chosen_after_a_failed_start_counts(states: Path) -> None:
    c = configured("batchspawner.SlurmSpawner", states, "require")
    c.GpuCkptHub.slurm_features = {A100: "a100"}
    configure(c)
    made, _ = job(c)
    made.user, made.req_options = user("anna"), "--nice=5"
    asyncio.run(made.run_pre_spawn_hook())
    assert made.req_options == "--nice=5 --constraint=a100"
    made.req_options = "--mem=4G"
    for _ in range(2):
        asyncio.run(made.run_pre_spawn_hook())
        assert made.req_options == "--mem=4G --constraint=a100"


def test_a_store_that_cannot_be_read_keeps_no_server_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called = []
    c = Config({"Spawner": {"pre_spawn_hook": called.append}})
    c.GpuCkptHub.update(store_url=f"{tmp_path}/gone/{{username}}", placement="require")
    configure(c)
    spawner = SimpleNamespace(user=user(), name="", log=logging.getLogger("hub"), req_options="")
    asyncio.run(c.Spawner.pre_spawn_hook(spawner))
    assert called == [spawner]
    assert "no hint where anna" in caplog.text


def test_no_start_waits_for_a_store_that_hangs_already(
    states: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over, begun = threading.Event(), []

    def hang(self: placement.Placement, spawner: Any) -> None:
        begun.append(spawner)
        over.wait(30)

    monkeypatch.setattr(placement, "_PATIENCE", 0.3)
    monkeypatch.setattr(placement.Placement, "needs_of", hang)
    c = configured("kubespawner.KubeSpawner", states, "require")
    spawner = SimpleNamespace(user=user(), name="", log=logging.getLogger("hub"))
    for _ in range(3):
        asyncio.run(c.Spawner.pre_spawn_hook(spawner))
    over.set()
    assert begun == [spawner]
    assert "did not answer within" in caplog.text and "has not answered for" in caplog.text
