"""What each spawner must be told so that kernels of its servers can be saved, and no more.

Every function adds to what the administrator has set, and replaces nothing that is stronger. Rights
are given to servers of those users only who may save.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import PurePosixPath
from typing import Any, Final

from traitlets import TraitError
from traitlets.config import Config, LazyConfigValue

from ..limits import VARIABLE
from .granting import turns_folder
from .names import filled
from .pods import add_pod_hook
from .settings import GpuCkptHub

#: Seconds that a server may take beyond its saves and uploads: what else it ends, a slow machine.
_MORE: Final = 15.0
#: And what waits for it after that, so that it sees the end.
_SEEN: Final = 30.0
#: Parts of systemd's times, and their units in seconds.
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?) *(ms|s|sec|min|m|h|hr|d)?(?![a-z])")
_SPANS: Final = {
    "": 1.0, "ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0,
    "hr": 3600.0, "d": 86400.0,
}  # fmt: skip
_LOCAL: Final = ("SudoSpawner", "SimpleLocalProcessSpawner", "LocalProcessSpawner")
_DOCKER: Final = ("SystemUserSpawner", "DockerSpawner")
#: Docker's volume, on each of its machines, with the turns of saves and the parts of uploads.
_TURNS: Final = "jupyter-gpu-ckpt-turns"


def prepare(c: Config, hub: GpuCkptHub) -> str | None:
    """Tell the hub's spawner, whichever it is, what it needs.

    Returns
    -------
    str or None
        What the administrator should know: that a spawner is not known, or what it was told
        instead of what is set.

    Raises
    ------
    TraitError
        There is no such spawner, or its users would see each other's states.
    """
    names = _ancestors(c)
    for known, tell in SPAWNERS.items():
        if known in names:
            return tell(c, hub)
    return (
        f"{names[0]} is not known: its servers get the settings. That it waits {grace(hub):g} s "
        "for a server that it stops, and lets it have what saving needs, is up to you."
    )


def grace(hub: GpuCkptHub) -> float:
    """Seconds that a server may take to end."""
    return hub.shutdown_deadline + hub.upload_timeout + _MORE


# -- on the hub's own machine ------------------------------------------------------------


def local(c: Config, hub: GpuCkptHub) -> None:
    """LocalProcessSpawner, and those made from it: that they wait for saves.

    Rights are on the file ``kernel-capture``.
    """
    _at_least(c, _LOCAL, "interrupt_timeout", 30, grace(hub))


def systemd(c: Config, hub: GpuCkptHub) -> str | None:
    """SystemdSpawner: file capabilities work, kernels live while they are saved.

    Its ``disable_user_sudo`` (no_new_privs) would take away the capabilities of
    ``kernel-capture``. In its place no process of the unit can get any others, without which sudo
    and su fail; a set-user-id program still is root where root's files are concerned.
    """
    section = c.SystemdSpawner
    properties = _dict(section.get("unit_extra_properties"))
    properties.setdefault("CapabilityBoundingSet", " ".join(f"CAP_{n}" for n in hub.capabilities()))
    # Or systemd would end the kernels at the same time as their server.
    properties["KillMode"] = "mixed"
    if _timespan(properties.setdefault("TimeoutStopSec", "1s")) < grace(hub):
        properties["TimeoutStopSec"] = f"{grace(hub):g}"
    section.unit_extra_properties = properties
    section.disable_user_sudo = False
    if section.get("isolate_devices") is True:
        return (
            "SystemdSpawner.isolate_devices keeps kernels from being saved: systemd puts a "
            "seccomp filter on such servers, and takes all capabilities of files away."
        )
    return None


def _timespan(value: Any) -> float:
    """Seconds of a time as systemd reads it, ``5min 20s``; endless if it is 0 or not a number."""
    text = str(value)
    parts = _SPAN.findall(text)
    if _SPAN.sub("", text).strip():
        return math.inf  # "infinity", or what is the administrator's own business
    return sum(float(number) * _SPANS[unit] for number, unit in parts) or math.inf


# -- in containers -----------------------------------------------------------------------


def docker(c: Config, hub: GpuCkptHub) -> None:
    """DockerSpawner and SystemUserSpawner: capabilities, no seccomp filter, time to stop, folders.

    Where states are in a folder of the machine, each container gets its user's own, and all of a
    machine have the turns of saves and the rate of uploads in common.
    """
    names = _set_in(c, _DOCKER, "extra_host_config"), _set_in(c, _DOCKER, "extra_create_kwargs")
    host, create = (c[name] for name in names)
    before = _set(host.get("extra_host_config"))
    system_users = "SystemUserSpawner" in _ancestors(c)
    folder = _folder(hub, one_user=not system_users)

    async def host_config(spawner: Any) -> dict[str, Any]:
        base = dict(await _value(before, spawner))
        if not _gets_rights(hub, spawner):
            return base
        base["cap_add"] = _joined(base.get("cap_add"), hub.capabilities())
        # CRIU has to set filters aside, which nobody below one may, whatever it allows.
        options = base.get("security_opt") or []
        if not any(str(option).startswith("seccomp") for option in options):
            base["security_opt"] = [*options, "seccomp=unconfined"]
        more = {}
        if folder is not None:
            path = filled(folder, spawner.user.name, spawner.name)
            more[path] = path
        if hub.shares_nodes():
            more[_TURNS] = turns_folder(hub)
        if more:
            binds = base.get("binds")
            if isinstance(binds, list):
                base["binds"] = [*binds, *(f"{here}:{there}:rw" for here, there in more.items())]
            else:
                added = {here: {"bind": there, "mode": "rw"} for here, there in more.items()}
                base["binds"] = {**(binds or {}), **added}
        return base

    host.extra_host_config = host_config
    seconds = int(grace(hub))
    extra = _set(create.get("extra_create_kwargs"))

    async def create_kwargs(spawner: Any) -> dict[str, Any]:
        base = dict(await _value(extra, spawner))
        base["stop_timeout"] = max(int(base.get("stop_timeout") or 0), seconds)
        return base

    create.extra_create_kwargs = create_kwargs
    client = c[_set_in(c, _DOCKER, "client_kwargs")]
    options = _dict(client.get("client_kwargs"))
    options["timeout"] = max(options.get("timeout") or 60, seconds + int(_SEEN))
    client.client_kwargs = options


def kubernetes(c: Config, hub: GpuCkptHub) -> None:
    """KubeSpawner: capabilities that take effect, no seccomp filter, a pod that may end slowly.

    The key comes from a Secret, and turns of saves and the rate of uploads are the node's.
    """
    _folder(hub, one_user=True)
    section = c.KubeSpawner
    before = _set(section.get("container_security_context"))

    async def security_context(spawner: Any) -> dict[str, Any]:
        base = dict(await _value(before, spawner))
        if not _gets_rights(hub, spawner):
            return base
        capabilities = dict(base.get("capabilities") or {})
        capabilities["add"] = _joined(capabilities.get("add"), hub.capabilities())
        # Those of the file kernel-capture count only where a program may get more rights.
        base |= {"allowPrivilegeEscalation": True, "capabilities": capabilities}
        base.setdefault("seccompProfile", {"type": "Unconfined"})
        return base

    section.container_security_context = security_context
    if hub.master_key() is not None or hub.shares_nodes():
        add_pod_hook(c, hub, _gets_rights)
    # Of one second, that is; and as long as it takes the hub waits for the pod to go.
    _at_least(c, ("KubeSpawner",), "delete_grace_period", 1, grace(hub))
    _at_least(c, ("KubeSpawner",), "start_timeout", 60, grace(hub) + _SEEN)


# -- on a cluster ------------------------------------------------------------------------


def slurm(c: Config, hub: GpuCkptHub) -> str | None:
    """SlurmSpawner of batchspawner: that signals reach the server alone, and in time.

    The server takes the place of the batch shell, as what Slurm signals besides are the kernels,
    which it would end. Slurm says beforehand that the job ends, and the hub stops a server by a
    signal to it.
    """
    section = c.SlurmSpawner
    section.req_srun = ""
    command = section.get("batchspawner_singleuser_cmd") or "batchspawner-singleuser"
    if not command.startswith("exec "):
        section.batchspawner_singleuser_cmd = f"exec {command}"
    options = section.get("req_options") or ""
    if "--signal" not in options:
        lead = max(60, int(grace(hub)))
        section.req_options = f"{options} --signal=B:USR2@{lead}".strip()
    if not section.get("batch_cancel_cmd"):
        prefix = _in_sections(c, ("SlurmSpawner", "BatchSpawnerBase"), "exec_prefix")
        if prefix is None:
            prefix = "sudo -E -u {username}"
        job = "{{job_id}}" if "{{" in prefix else "{job_id}"
        # The server alone, which then ends; a job that waits hears no signal. In this order, as the
        # other way round the second one fails where the first has ended the job.
        section.batch_cancel_cmd = (
            f"scancel --state=RUNNING --batch --signal=TERM {job}; "
            f"{prefix} scancel --state=PENDING {job}"
        )
    if section.get("req_epilogue"):
        return "SlurmSpawner.req_epilogue is not run: the server takes the place of its script."
    if section.get("batch_script"):
        return (
            "SlurmSpawner.batch_script is your own: its server must be started with exec and "
            "without srun, or Slurm ends the kernels before they are saved."
        )
    return None


#: By the name of a class, the more special ones first.
SPAWNERS: Final[dict[str, Callable[[Config, GpuCkptHub], str | None]]] = {
    "KubeSpawner": kubernetes,
    "DockerSpawner": docker,
    "SlurmSpawner": slurm,
    "SystemdSpawner": systemd,
    "LocalProcessSpawner": local,
}
#: Known only in name: it starts services of a swarm, which have none of these options.
_NOT: Final = {"SwarmSpawner"}


def _ancestors(c: Config) -> list[str]:
    """Names of the classes that the hub's spawner is made of."""
    chosen = c.JupyterHub.get("spawner_class") or "jupyterhub.spawner.LocalProcessSpawner"
    kind = _load(chosen) if isinstance(chosen, str) else chosen
    names = [ancestor.__name__ for ancestor in inspect.getmro(kind)]
    return names[:1] if _NOT & {*names} else names


def _load(name: str) -> type:
    registered = [
        point
        for point in entry_points(group="jupyterhub.spawners")
        if point.name.lower() == name.lower()
    ]
    try:
        if registered:
            found = registered[0].load()
        else:
            module, _, attribute = name.rpartition(".")
            found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise TraitError(
            f"GpuCkptHub: JupyterHub.spawner_class names {name!r}, which cannot be loaded: {error}"
        ) from error
    assert isinstance(found, type)
    return found


def _gets_rights(hub: GpuCkptHub, spawner: Any) -> bool:
    """Whether a server may save; never without the limits, which were overwritten then."""
    if VARIABLE not in spawner.environment:
        spawner.log.error(
            "gpu-ckpt: the environment of servers was set after configure(c), so that limits are "
            "missing: the server of %s gets no rights to save kernels. Call configure(c) last.",
            spawner.user.name,
        )
        return False
    return hub.lets(spawner)


def _folder(hub: GpuCkptHub, *, one_user: bool) -> str | None:
    """The folder of a user's states; ``None`` where they are elsewhere.

    ``one_user``: servers of all users run with the same user id, so that what one may read all may.
    """
    url = (hub.store_url or "").removeprefix("file://")
    if not url or "://" in url or not PurePosixPath(url).is_absolute():
        return None
    if one_user and "{username}" not in url:
        raise TraitError(
            f"GpuCkptHub.store_url is one folder for all users, {url}, and their servers have the "
            "same user id: each could read the states of all. Put {username} in it."
        )
    return url if "{username}" in url else None


def _set_in(c: Config, sections: Sequence[str], trait: str) -> str:
    """Name of the section that sets a trait, the first that does; else the last one."""
    return next((name for name in sections if trait in c.get(name, ())), sections[-1])


def _in_sections(c: Config, sections: Sequence[str], trait: str) -> Any:
    return c[_set_in(c, sections, trait)].get(trait)


def _at_least(c: Config, sections: Sequence[str], trait: str, default: float, least: float) -> None:
    """Raise a number to what is needed, where it counts, and where it would once it is set."""
    for name in sections:
        if trait in c.get(name, ()) and c[name][trait] < least:
            c[name][trait] = int(least)
    if trait not in c.get(sections[-1], ()) and default < least:
        c[sections[-1]][trait] = int(least)


def _dict(value: Any) -> dict[str, Any]:
    """A dictionary of the configuration, which `update` may have made."""
    return dict(_set(value) or {})


def _set(value: Any) -> Any:
    return value.get_value({}) if isinstance(value, LazyConfigValue) else value


def _joined(have: Any, more: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*(have or []), *more]))


async def _value(value: Any, spawner: Any) -> Any:
    """What a trait holds that may also be a function, which may be asynchronous."""
    found = value(spawner) if callable(value) else value
    return (await found if inspect.isawaitable(found) else found) or {}
