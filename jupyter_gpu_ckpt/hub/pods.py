"""What a pod of KubeSpawner needs that no trait of its says: a key from a Secret, the node's turns.

It is added to the finished pod, so that no profile and no other hook takes it away.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

from traitlets.config import Config

from ..store.bandwidth import SHARED
from . import keys
from .granting import turns_folder
from .settings import GpuCkptHub

#: Seconds that Kubernetes may take to keep a Secret.
_PATIENCE: Final = 15.0
#: Of a Secret: where in it the key is.
_FIELD: Final = "key"
_LABELS: Final = {"app.kubernetes.io/managed-by": "jupyter-gpu-ckpt"}
#: The turns' folder on a node, which lasts as long as the node is up.
_ON_NODE: Final = "/run/jupyter-gpu-ckpt/turns"
_TURNS: Final = "gpu-ckpt-turns"
#: As root, whose files the server may lock and not write: no user fills a node's disk with them.
_MAKE_TURNS: Final = (
    "cd /turns && umask 022 && n=0 && {{ [ -e {uploads} ] || : > {uploads}; }} && "
    "while [ $n -lt {count} ]; do "
    "[ -e $n.lock ] || : > $n.lock || exit 1; n=$((n + 1)); done"
)


def add_pod_hook(
    c: Config, hub: GpuCkptHub, gets_rights: Callable[[GpuCkptHub, Any], bool]
) -> None:
    """Add the hook to KubeSpawner's configuration, after the one that is set."""
    section = c.KubeSpawner
    section.modify_pod_hook = PodHook(hub, gets_rights, section.get("modify_pod_hook"))


class PodHook:
    """The ``modify_pod_hook`` of KubeSpawner.

    Parameters
    ----------
    hub
        The settings.
    gets_rights
        Whether the server of a spawner may save kernels.
    before
        The hook that was set before, which is called first.
    """

    def __init__(
        self,
        hub: GpuCkptHub,
        gets_rights: Callable[[GpuCkptHub, Any], bool],
        before: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._hub = hub
        self._gets_rights = gets_rights
        self._before = before

    async def __call__(self, spawner: Any, pod: Any) -> Any:
        """Be the hook."""
        if self._before is not None:
            changed = self._before(spawner, pod)
            pod = await changed if inspect.isawaitable(changed) else changed
        await self._hide_key(spawner, pod)
        if self._hub.shares_nodes() and self._gets_rights(self._hub, spawner):
            _mount_turns(pod, self._hub.saves_per_node or 0, turns_folder(self._hub))
        return pod

    async def _hide_key(self, spawner: Any, pod: Any) -> None:
        """Have the pod name a Secret with the key, as more may read pods than Secrets."""
        from kubernetes_asyncio.client import V1EnvVarSource, V1SecretKeySelector

        name = secret_name(spawner.user.name)
        found = [
            variable
            for container in pod.spec.containers
            for variable in container.env or ()
            if variable.name == keys.VARIABLE and variable.value
        ]
        if not found:
            return
        key = found[0].value
        for variable in found:
            variable.value = None
            # Without the Secret the server starts, and saves nothing.
            reference = V1SecretKeySelector(name=name, key=_FIELD, optional=True)
            variable.value_from = V1EnvVarSource(secret_key_ref=reference)
        try:
            await asyncio.wait_for(_keep_secret(spawner, name, key), _PATIENCE)
        except Exception as error:
            spawner.log.error(
                "gpu-ckpt: the Secret %s with the key of %s cannot be made, so that kernels cannot "
                "be saved: %s. May the hub's service account get, create and delete Secrets?",
                name,
                spawner.user.name,
                getattr(error, "reason", None) or repr(error),
            )


def secret_name(user: str) -> str:
    """Name of the Secret with a user's key; no two users have the same."""
    return f"gpu-ckpt-key-{sha256(user.encode()).hexdigest()[:32]}"


async def _keep_secret(spawner: Any, name: str, key: str) -> None:
    """Have a Secret that holds this key.

    Only what KubeSpawner's role lets a hub do: get, create and delete.
    """
    from kubernetes_asyncio.client import ApiException, V1ObjectMeta, V1Secret

    api, namespace = spawner.api, spawner.namespace
    wanted = base64.b64encode(key.encode()).decode()
    try:
        found = await api.read_namespaced_secret(name, namespace)
    except ApiException as error:
        if error.status != 404:
            raise
    else:
        if (found.data or {}).get(_FIELD) == wanted:
            return
        await api.delete_namespaced_secret(name, namespace)
    metadata = V1ObjectMeta(
        name=name, labels=_LABELS, annotations={"hub.jupyter.org/username": spawner.user.name}
    )
    secret = V1Secret(
        api_version="v1", kind="Secret", metadata=metadata, type="Opaque", data={_FIELD: wanted}
    )
    try:
        await api.create_namespaced_secret(namespace, secret)
    except ApiException as error:
        if error.status != 409:  # another server of hers was as quick, with the same key
            raise


def _mount_turns(pod: Any, count: int, folder: str) -> None:
    """Have all servers of a node see the same locks, ``GpuCkpt.node_turns_dir``."""
    from kubernetes_asyncio.client import (
        V1Capabilities,
        V1Container,
        V1HostPathVolumeSource,
        V1SecurityContext,
        V1Volume,
        V1VolumeMount,
    )

    spec = pod.spec
    server = spec.containers[0]
    where = V1HostPathVolumeSource(path=_ON_NODE, type="DirectoryOrCreate")
    spec.volumes = [*(spec.volumes or ()), V1Volume(name=_TURNS, host_path=where)]
    mount = V1VolumeMount(name=_TURNS, mount_path=folder, read_only=True)
    server.volume_mounts = [*(server.volume_mounts or ()), mount]
    context = V1SecurityContext(
        run_as_user=0,
        run_as_non_root=False,
        allow_privilege_escalation=False,
        read_only_root_filesystem=True,
        capabilities=V1Capabilities(drop=["ALL"]),
    )
    makes = V1Container(
        name=_TURNS,
        image=server.image,
        image_pull_policy=server.image_pull_policy,
        command=["sh", "-c", _MAKE_TURNS.format(count=count, uploads=SHARED)],
        resources=server.resources,  # of which a pod needs the most of any container's, not more
        security_context=context,
        volume_mounts=[V1VolumeMount(name=_TURNS, mount_path="/turns")],
    )
    spec.init_containers = [*(spec.init_containers or ()), makes]
