"""What one user's server may be configured to do: the hub's settings as limits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from ..autosave import FIELDS, SECONDS
from ..limits import Limits, Rule, fixed, plain
from ..settings import GpuCkpt
from .keys import VARIABLE
from .names import filled
from .settings import SECTIONS, GpuCkptHub


def limits(hub: GpuCkptHub, user: str, groups: Collection[str] = (), server: str = "") -> Limits:
    """What a server's own configuration may set.

    Parameters
    ----------
    user, groups
        The user's name, and the groups that the user is in.
    server
        The name of a named server.
    """
    if not hub.allows(user, groups):
        return Limits(
            rules={
                "GpuCkptProvisioner": {"enabled": fixed(False)},
                "AutoSave": {"enabled": fixed(False), "locked": fixed(list(FIELDS))},
            },
            denied="This JupyterHub does not let your kernels be saved.",
        )
    rules = {section: _rules(hub, names) for section, names in SECTIONS.items()}
    most = {"keep_last": hub.most_keep_last, "max_age": hub.most_max_age}
    for name, value in most.items():
        rule = rules["GpuCkpt"].get(name, Rule())
        if value is not None and not rule.fixed:
            rules["GpuCkpt"][name] = Rule(value=rule.value, most=value)
    if hub.most_keep_last is not None:
        _close_ways_round(hub, rules["GpuCkpt"])
    for name in SECONDS:
        rule = rules["AutoSave"].get(name, Rule())
        if not rule.fixed:
            rules["AutoSave"][name] = Rule(value=rule.value, least=hub.shortest)
    rules["AutoSave"] |= {
        "shortest": fixed(hub.shortest),
        "locked": fixed([name for name in FIELDS if name not in hub.users_may_change]),
        "shutdown_deadline": Rule(value=hub.shutdown_deadline, most=hub.shutdown_deadline),
    }
    rules["GpuCkpt"] |= {
        "owner": fixed(user),
        "upload_timeout": Rule(value=hub.upload_timeout, most=hub.upload_timeout),
        **_place(hub, user, server),
        **_keys(hub, user),
    }
    if (quota := hub.quota_of(user, groups)) is not None:
        rules["GpuCkpt"]["quota"] = Rule(value=quota, most=quota)
    if hub.saves_per_node is not None:
        rules["GpuCkpt"] |= {
            "saves_per_node": fixed(hub.saves_per_node),
            "node_turn_timeout": Rule(fixed=True),
        }
    if hub.upload_bandwidth_per_node is not None:
        per_node = fixed(hub.upload_bandwidth_per_node)
        rules["GpuCkpt"]["upload_bandwidth_per_node"] = per_node
    if hub.shares_nodes():  # in another folder nobody waits
        rules["GpuCkpt"]["node_turns_dir"] = fixed(turns_folder(hub))
    if hub.upload_bandwidth is not None:
        rules["GpuCkpt"]["upload_bandwidth"] = Rule(
            value=hub.upload_bandwidth, most=hub.upload_bandwidth or None
        )
    for section, values in hub.server_config.items():
        others = {name: fixed(value) for name, value in values.items()}
        rules[section] = {**rules.get(section, {}), **others}
    return Limits(rules=plain(rules))


def turns_folder(hub: GpuCkptHub) -> str:
    """The folder of saves and uploads that all servers of a node have in common."""
    default = GpuCkpt.class_traits()["node_turns_dir"].default_value
    return str(hub.server_config.get("GpuCkpt", {}).get("node_turns_dir", default))


def _close_ways_round(hub: GpuCkptHub, rules: dict[str, Rule]) -> None:
    """Have ``most_keep_last`` count: keeping none for any reason means to keep everything.

    So one is kept, and of hours and days no more than without the user's own wish.
    """
    if not (last := rules["keep_last"]).fixed:
        rules["keep_last"] = Rule(value=last.value, least=1, most=last.most)
    for name in ("keep_hourly", "keep_daily"):
        if not (rule := rules.get(name, Rule())).fixed:
            default = GpuCkpt.class_traits()[name].default_value
            most = default if rule.value is msgspec.UNSET else rule.value
            rules[name] = Rule(value=rule.value, most=most)


def _rules(hub: GpuCkptHub, names: Collection[str]) -> dict[str, Rule]:
    """Rules for settings that the administrator has set, or does not let be changed."""
    rules = {}
    for name in names:
        value, free = getattr(hub, name), name in hub.users_may_change
        if value is not None:
            rules[name] = Rule(value=value, fixed=not free)
        elif not free:
            rules[name] = Rule(fixed=True)
    return rules


def _place(hub: GpuCkptHub, user: str, server: str) -> dict[str, Rule]:
    if hub.store_url is None:
        return {}
    url = filled(hub.store_url, user, server)
    return {"store_url": fixed(url), "store_options": fixed(dict(hub.store_options))}


def _keys(hub: GpuCkptHub, user: str) -> dict[str, Rule]:
    values: dict[str, Any] = {"key_file": None, "key_env": None, "key_command": []}
    if hub.master_key_file:
        values["key_env"] = VARIABLE
    elif hub.key_file:
        values["key_file"] = filled(hub.key_file, user, "")
    elif hub.key_env:
        values["key_env"] = hub.key_env
    elif hub.key_command:
        values["key_command"] = [part.replace("{username}", user) for part in hub.key_command]
    else:
        return {}
    return {name: fixed(value) for name, value in values.items()}
