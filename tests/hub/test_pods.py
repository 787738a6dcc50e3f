"""What a pod has besides: its user's key from a Secret, and the turns of its node."""

from __future__ import annotations

import asyncio
import base64
import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_asyncio.client import ApiClient, Configuration, CoreV1Api
from kubespawner import KubeSpawner
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler
from traitlets.config import Config

from jupyter_gpu_ckpt.hub.keys import VARIABLE, user_key
from jupyter_gpu_ckpt.hub.pods import secret_name
from tests.hub.test_spawners import no_cluster, spawner, told, user  # noqa: F401


class Kubernetes(RequestHandler):
    """Of Kubernetes' API what is about Secrets, for a hub that may get, create and delete them."""

    def initialize(self, secrets: dict[str, Any], refuses: bool) -> None:
        self.secrets = secrets
        self.refuses = refuses

    def prepare(self) -> None:
        self.set_header("Content-Type", "application/json")
        if self.refuses:
            self.set_status(403)
            self.finish({"kind": "Status", "status": "Failure", "code": 403})

    def get(self, name: str) -> None:
        if name not in self.secrets:
            self.set_status(404)
        self.finish(self.secrets.get(name, {"kind": "Status", "code": 404}))

    def post(self, _: str) -> None:
        body = json.loads(self.request.body)
        kubernetes_validate.validate(body, "1.32", strict=True)
        assert body["metadata"]["name"] not in self.secrets
        self.secrets[body["metadata"]["name"]] = body
        self.set_status(201)
        self.finish(body)

    def delete(self, name: str) -> None:
        self.finish(self.secrets.pop(name))


def pod_of(c: Config, secrets: dict[str, Any], *, refuses: bool = False) -> dict[str, Any]:
    """The pod that KubeSpawner would start for anna; `secrets` are those of Kubernetes."""

    async def make() -> dict[str, Any]:
        given = {"secrets": secrets, "refuses": refuses}
        server = HTTPServer(
            Application([(r"/api/v1/namespaces/default/secrets/?(.*)", Kubernetes, given)])
        )
        (socket,) = bind_sockets(0, "127.0.0.1")
        server.add_socket(socket)
        host = f"http://127.0.0.1:{socket.getsockname()[1]}"
        async with ApiClient(Configuration(host=host)) as client:
            made = spawner(KubeSpawner, c, _mock=True, user=user())
            made.api, made.namespace = CoreV1Api(client), "default"
            pod = await made.modify_pod_hook(made, await made.get_pod_manifest())
            found: dict[str, Any] = client.sanitize_for_serialization(pod)
        server.stop()
        kubernetes_validate.validate(found, "1.32", strict=True)
        return found

    return asyncio.run(make())


@pytest.fixture
def master(tmp_path: Path) -> Path:
    key = tmp_path / "key"
    key.write_text("5" * 64)
    key.chmod(0o600)
    return key


def test_a_key_is_in_a_secret_and_not_in_the_pod(master: Path) -> None:
    key, secrets = user_key(master, "anna"), dict[str, Any]()
    c = told("kubespawner.KubeSpawner", GpuCkptHub={"master_key_file": str(master)})
    pod = pod_of(c, secrets)
    (variable,) = [v for v in pod["spec"]["containers"][0]["env"] if v["name"] == VARIABLE]
    reference = variable["valueFrom"]["secretKeyRef"]
    assert reference == {"name": secret_name("anna"), "key": "key", "optional": True}
    assert key not in json.dumps(pod)
    (name,) = secrets
    assert name == reference["name"] != secret_name("Anna")
    assert base64.b64decode(secrets[name]["data"]["key"]).decode() == key
    # It is hers at the next start too; one that holds something else is replaced.
    kept = secrets[name]
    pod_of(c, secrets)
    assert secrets[name] is kept
    secrets[name] = {**kept, "data": {"key": "AAAA"}}
    pod_of(c, secrets)
    assert secrets[name]["data"] == kept["data"]


def test_without_a_secret_the_server_starts_without_a_key(
    master: Path, caplog: pytest.LogCaptureFixture
) -> None:
    c = told("kubespawner.KubeSpawner", GpuCkptHub={"master_key_file": str(master)})
    pod = pod_of(c, {}, refuses=True)
    assert user_key(master, "anna") not in json.dumps(pod)
    assert "cannot be made" in caplog.text and "get, create and delete Secrets" in caplog.text


def test_pods_of_a_node_share_a_rate_of_uploads(tmp_path: Path) -> None:
    c = told("kubespawner.KubeSpawner", GpuCkptHub={"upload_bandwidth_per_node": 120.0})
    (makes,) = pod_of(c, {})["spec"]["initContainers"]
    folder = tmp_path / "turns"
    folder.mkdir()
    script = makes["command"][2].replace("/turns", str(folder))
    subprocess.run([*makes["command"][:2], script], check=True, timeout=30)
    assert [file.name for file in folder.iterdir()] == ["upload-0.lock"]


def test_pods_of_a_node_save_in_turns(tmp_path: Path) -> None:
    c = told("kubespawner.KubeSpawner", GpuCkptHub={"saves_per_node": 2})
    c.KubeSpawner.pod_security_context = {"runAsNonRoot": True}
    spec = pod_of(c, {})["spec"]
    (turns,) = [volume for volume in spec["volumes"] if "hostPath" in volume]
    (server,), (makes,) = spec["containers"], spec["initContainers"]
    (mount,) = [m for m in server["volumeMounts"] if m["name"] == turns["name"]]
    assert mount["readOnly"] and mount["mountPath"] == "/tmp/jupyter-gpu-ckpt-turns"
    assert makes["image"] == server["image"]
    context = makes["securityContext"]
    assert (context["runAsUser"], context["capabilities"]) == (0, {"drop": ["ALL"]})
    # It makes what servers can lock, and leaves it when it is there.
    for _ in range(2):
        script = makes["command"][2].replace("/turns", str(tmp_path))
        subprocess.run([*makes["command"][:2], script], check=True, timeout=30)
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert files == {"0.lock": 0o644, "1.lock": 0o644, "upload-0.lock": 0o644}
    other = told(
        "kubespawner.KubeSpawner", GpuCkptHub={"saves_per_node": 2, "allowed_users": ["bert"]}
    )
    assert not pod_of(other, {})["spec"].get("initContainers")
