"""``configure(c)``: what a hub's configuration needs so that its users' kernels can be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traitlets import TraitError
from traitlets.config import Config

from ..autosave import AutoSave
from ..limits import VARIABLE, Limited
from ..settings import GpuCkpt
from . import keys, spawners
from .granting import limits
from .names import groups_of
from .settings import GpuCkptHub


def configure(c: Config) -> GpuCkptHub:
    """Turn saving and restoring on for all users' servers.

    Call it at the end of ``jupyterhub_config.py``: it adds to what is set there.

    Parameters
    ----------
    c
        The hub's configuration. What counts of it is ``c.GpuCkptHub``,
        ``c.JupyterHub.spawner_class`` and what is set of the spawner.

    Returns
    -------
    GpuCkptHub
        The settings, as they count.

    Raises
    ------
    TraitError
        A setting is wrong; the hub does not start.
    CkptError
        ``key_missing``, ``wrong_key``: the master key cannot be used.
    """
    hub = GpuCkptHub(config=c)
    hub.check()
    _check_further(hub)
    if (master := hub.master_key()) is not None:
        keys.user_key(master, "")  # that there is no key is to be seen now
    _add_environment(c, environment(hub))
    if (said := spawners.prepare(c, hub)) is not None:
        hub.log.warning("gpu-ckpt: %s", said)
    if hub.placement != "off":
        from .placement import add_hint  # what reads stores takes its time to load

        add_hint(c, hub)
    return hub


def _check_further(hub: GpuCkptHub) -> None:
    """Refuse what no server has: there it would be passed over in silence."""
    known: dict[str, type[Limited] | None] = {
        "GpuCkpt": GpuCkpt,
        "AutoSave": AutoSave,
        "GpuCkptProvisioner": None,  # loads what a hub has no use for
    }
    for section, values in hub.server_config.items():
        if section not in known:
            raise TraitError(f"GpuCkptHub.server_config: {section} is none of {', '.join(known)}.")
        kind = known[section]
        for name in values:
            if kind is not None and name not in kind.class_traits(config=True):
                raise TraitError(f"GpuCkptHub.server_config: there is no {section}.{name}.")


def environment(hub: GpuCkptHub) -> dict[str, Callable[[Any], str]]:
    """Variables of each server, which a spawner fills in when it starts one."""
    variables: dict[str, Callable[[Any], str]] = {
        VARIABLE: lambda spawner: limits(
            hub, spawner.user.name, groups_of(spawner), spawner.name
        ).encoded()
    }
    if (master := hub.master_key()) is not None:
        # Only the settings of who may save keep it from kernels.
        variables[keys.VARIABLE] = lambda spawner: (
            keys.user_key(master, spawner.user.name) if hub.lets(spawner) else ""
        )
    return variables


def _add_environment(c: Config, variables: dict[str, Callable[[Any], str]]) -> None:
    """Add to the environment of servers, in whichever section it is set."""
    sections = [name for name in c if name.endswith("Spawner") and "environment" in c[name]]
    for name in {*sections, "Spawner"}:
        have = c[name].get("environment")
        if isinstance(have, dict):
            c[name].environment = {**have, **variables}
        else:
            c[name].environment.update(variables)
