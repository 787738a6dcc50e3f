"""What spawners that ``configure(c)`` has told make of a server: pods, containers, jobs, units."""

from __future__ import annotations

import asyncio
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
from batchspawner import SlurmSpawner
from dockerspawner import DockerSpawner, SystemUserSpawner
from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner
from kubernetes_asyncio.client import ApiClient
from kubespawner import KubeSpawner
from sudospawner import SudoSpawner
from systemdspawner import SystemdSpawner, systemd
from traitlets import TraitError
from traitlets.config import Config

from jupyter_gpu_ckpt.hub import configure
from jupyter_gpu_ckpt.limits import VARIABLE

NEEDED = ["CHECKPOINT_RESTORE", "NET_ADMIN", "SETPCAP"]
#: A user of this machine.
NAME = pwd.getpwuid(os.getuid()).pw_name
#: Of the default settings: 20 s for saves, 60 s for uploads, and 15 s.
GRACE = 95


def user(name: str = "anna") -> Any:
    url = f"/user/{name}/"
    return SimpleNamespace(id=1, name=name, groups=[], url=url, escaped_name=name, settings={})


def spawner(kind: Any, c: Config, **more: Any) -> Any:
    orm = SimpleNamespace(name="", server=None, oauth_client=None, state=None)
    made = kind(
        config=c,
        user=more.pop("user", user()),
        orm_spawner=orm,
        hub=SimpleNamespace(
            public_host="", base_url="/hub/", api_url="http://127.0.0.1:8081/hub/api"
        ),
        oauth_client_id="anna",
        api_token="secret",
        _deprecated_db_session=None,
        **more,
    )
    return made


def told(kind: Any, **sections: dict[str, Any]) -> Config:
    """A hub's configuration, configured."""
    c = Config(sections)
    c.JupyterHub.spawner_class = kind
    configure(c)
    return c


# -- Kubernetes --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest is made without a cluster to send it to."""
    monkeypatch.setattr("kubespawner.spawner.load_config", lambda **kwargs: None)


def pod_of(made: Any) -> dict[str, Any]:
    """The manifest of a pod as it is sent to Kubernetes."""

    async def make() -> dict[str, Any]:
        manifest = await made.get_pod_manifest()
        async with ApiClient() as client:
            found: dict[str, Any] = client.sanitize_for_serialization(manifest)
            return found

    return asyncio.run(make())


def pod(c: Config, **more: Any) -> tuple[Any, dict[str, Any]]:
    """A spawner of KubeSpawner, and the manifest of its pod."""

    async def make() -> Any:
        return spawner(KubeSpawner, c, _mock=True, **more)

    made = asyncio.run(make())
    return made, pod_of(made)


def test_a_pod_may_save_kernels_and_end_slowly_and_is_a_valid_one() -> None:
    c = told(
        "kubespawner.KubeSpawner",
        GpuCkptHub={"store_url": "s3://states/{username}"},
        KubeSpawner={
            "environment": {"LANG": "C.UTF-8"},
            "container_security_context": {"capabilities": {"add": ["CHOWN"]}},
        },
    )
    made, manifest = pod(c)
    kubernetes_validate.validate(manifest, "1.32", strict=True)
    (container,) = manifest["spec"]["containers"]
    context = container["securityContext"]
    assert context["capabilities"]["add"] == ["CHOWN", *NEEDED]
    assert context["allowPrivilegeEscalation"] is True
    assert context["seccompProfile"] == {"type": "Unconfined"}
    assert "privileged" not in context
    assert {"LANG", VARIABLE} <= {variable["name"] for variable in container["env"]}
    assert made.delete_grace_period == GRACE
    # While it stops a pod, the hub waits for this long.
    assert made.start_timeout > GRACE


def test_only_the_pods_of_those_who_may_save_get_the_rights() -> None:
    c = told("kubespawner.KubeSpawner", GpuCkptHub={"allowed_users": ["bert"]})
    _, manifest = pod(c)
    context = manifest["spec"]["containers"][0]["securityContext"]
    assert context == {"allowPrivilegeEscalation": False}
    _, manifest = pod(c, user=user("bert"))
    context = manifest["spec"]["containers"][0]["securityContext"]
    assert context["capabilities"]["add"] == NEEDED


def test_without_its_limits_a_pod_gets_no_rights(caplog: pytest.LogCaptureFixture) -> None:
    c = told("kubespawner.KubeSpawner")
    c.Spawner.environment = {"LANG": "C.UTF-8"}  # too late
    _, manifest = pod(c)
    context = manifest["spec"]["containers"][0]["securityContext"]
    assert context == {"allowPrivilegeEscalation": False}
    assert "Call configure(c) last" in caplog.text


def test_what_is_longer_already_stays() -> None:
    kube = {"delete_grace_period": 600, "start_timeout": 900}
    made, _ = pod(told("kubespawner.KubeSpawner", KubeSpawner=kube))
    assert (made.delete_grace_period, made.start_timeout) == (600, 900)


# -- Docker ------------------------------------------------------------------------------


class Docker:
    """What a spawner asks Docker for."""

    api_version = "1.43"

    def __init__(self, kind: Any, c: Config, **more: Any) -> None:
        from docker.api.container import ContainerApiMixin

        self.asked: dict[str, Any] = {}

        async def docker(action: str, **kwargs: Any) -> dict[str, str]:
            assert action == "create_container"
            self.asked = kwargs
            return {}

        class Client(ContainerApiMixin):  # type: ignore[misc]
            _version = "1.43"
            _general_configs: dict[str, Any] = {}  # noqa: RUF012

        made = spawner(kind, c, **more)
        made.docker = docker
        made.__class__ = type(kind.__name__, (kind,), {"client": Client()})

        async def command() -> list[str]:
            return ["jupyterhub-singleuser"]

        made.get_command = command
        asyncio.run(made.create_object())
        self.spawner = made
        self.host = self.asked["host_config"]


def test_a_container_may_save_kernels_and_has_its_users_folder_only() -> None:
    c = told(
        "docker",
        GpuCkptHub={"store_url": "/shared/states/{username}"},
        DockerSpawner={"extra_host_config": {"cap_add": ["CHOWN"]}},
    )
    docker = Docker(DockerSpawner, c)
    assert docker.host["CapAdd"] == ["CHOWN", *NEEDED]
    assert docker.host["SecurityOpt"] == ["seccomp=unconfined"]
    assert docker.host["Binds"] == ["/shared/states/anna:/shared/states/anna:rw"]
    assert "Privileged" not in docker.host
    assert docker.asked["stop_timeout"] == GRACE
    # Docker answers once the container has stopped.
    assert docker.spawner.client_kwargs["timeout"] > GRACE
    assert VARIABLE in docker.asked["environment"]


@pytest.mark.parametrize("trait", ["saves_per_node", "upload_bandwidth_per_node"])
def test_containers_of_a_machine_share_what_it_has(trait: str) -> None:
    c = told(
        "docker",
        GpuCkptHub={trait: 2},
        DockerSpawner={"volumes": {"work-{username}": "/work"}},
    )
    turns = "jupyter-gpu-ckpt-turns:/tmp/jupyter-gpu-ckpt-turns:rw"
    assert sorted(Docker(DockerSpawner, c).host["Binds"]) == [turns, "work-anna:/work:rw"]


def test_a_system_users_container_too() -> None:
    c = told(SystemUserSpawner, GpuCkptHub={"store_url": "/shared/states"})
    docker = Docker(SystemUserSpawner, c, user=user(NAME))
    assert docker.host["CapAdd"] == NEEDED


def test_only_the_containers_of_those_who_may_save_get_the_rights() -> None:
    docker = Docker(DockerSpawner, told("docker", GpuCkptHub={"allowed_users": ["bert"]}))
    assert not docker.host.get("CapAdd") and not docker.host.get("SecurityOpt")


@pytest.mark.parametrize("kind", ["docker", "kubespawner.KubeSpawner"])
def test_one_folder_for_users_who_have_one_user_id_is_refused(kind: str) -> None:
    with pytest.raises(TraitError, match="each could read the states of all"):
        told(kind, GpuCkptHub={"store_url": "/shared/states"})


# -- processes of the machine ------------------------------------------------------------


@pytest.mark.parametrize("kind", [LocalProcessSpawner, SimpleLocalProcessSpawner, SudoSpawner])
def test_a_process_is_interrupted_and_then_waited_for(kind: Any) -> None:
    c = told(kind, LocalProcessSpawner={"interrupt_timeout": 5})
    made = spawner(kind, c, user=user(NAME))
    assert made.interrupt_timeout == GRACE
    assert VARIABLE in made.get_env()


def test_a_unit_of_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    async def start(name: str, **kwargs: Any) -> None:
        asked.update(kwargs)

    async def running(name: str) -> bool:
        return bool(asked)

    monkeypatch.setattr(systemd, "get_systemd_version", lambda: 252)
    monkeypatch.setattr(systemd, "start_transient_service", start)
    monkeypatch.setattr(systemd, "service_running", running)
    monkeypatch.setattr(systemd, "service_failed", running)
    c = Config({"SystemdSpawner": {"unit_extra_properties": {"Nice": "5"}}})
    c.JupyterHub.spawner_class = "systemd"
    configure(c)
    made = spawner(SystemdSpawner, c, user=user(NAME))
    asyncio.run(made.start())
    assert (
        asked["properties"].items()
        >= {
            "Nice": "5",
            "KillMode": "mixed",
            "TimeoutStopSec": str(GRACE),
            "CapabilityBoundingSet": "CAP_CHECKPOINT_RESTORE CAP_NET_ADMIN CAP_SETPCAP",
        }.items()
    )
    assert "NoNewPrivileges" not in asked["properties"]
    assert VARIABLE in asked["environment_variables"]


@pytest.mark.parametrize(
    ("set_to", "counts"),
    [
        ("60", str(GRACE)), (94.5, str(GRACE)), ("1min 30s", str(GRACE)), ("30s", str(GRACE)),
        (300, 300), ("0", "0"), ("5min", "5min"), ("1min 36s", "1min 36s"),
        ("infinity", "infinity"), ("2 weeks", "2 weeks"),
    ],
)  # fmt: skip
def test_a_unit_that_may_take_longer_still_may(set_to: Any, counts: Any) -> None:
    c = told("systemd", SystemdSpawner={"unit_extra_properties": {"TimeoutStopSec": set_to}})
    assert c.SystemdSpawner.unit_extra_properties["TimeoutStopSec"] == counts


# -- Slurm -------------------------------------------------------------------------------


def job(c: Config) -> tuple[Any, str]:
    made = spawner(SlurmSpawner, c, user=user(NAME))
    variables = made.get_req_subvars()
    variables["cmd"] = made.cmd_formatted_for_batch()
    return made, asyncio.run(made._get_batch_script(**variables))


def test_a_job_is_the_server_and_hears_of_its_end() -> None:
    c = told("batchspawner.SlurmSpawner", SlurmSpawner={"req_options": "--nice=5"})
    made, script = job(c)
    assert f"#SBATCH --nice=5 --signal=B:USR2@{GRACE}" in script.splitlines()
    # Nothing stands between Slurm's signals and the server.
    assert "\nexec batchspawner-singleuser jupyterhub-singleuser" in script
    assert "srun" not in script
    assert VARIABLE in made.get_req_subvars()["keepvars"].split(",")


def test_the_hub_stops_a_job_as_the_user() -> None:
    made, _ = job(told("batchspawner.SlurmSpawner"))
    made.job_id = "7"
    asked: list[str] = []

    async def run(command: str, **kwargs: Any) -> str:
        asked.append(command)
        return ""

    made.run_command = run
    asyncio.run(made.cancel_batch_job())
    (command,) = asked
    assert [part.split(" scancel ")[0].strip() for part in command.split(";")] == [
        f"sudo -E -u {NAME}"
    ] * 2
    # The server alone hears of it, and not its kernels.
    assert "--batch --signal=TERM 7;" in command


# -- others ------------------------------------------------------------------------------


def test_a_spawner_that_is_not_known_is_named_and_one_that_is_not_there_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told("batchspawner.PBSSpawner")
    assert "PBSSpawner is not known" in caplog.text
    with pytest.raises(TraitError, match="cannot be loaded"):
        told("no.such.Spawner")
