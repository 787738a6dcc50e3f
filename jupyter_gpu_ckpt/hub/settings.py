"""What a JupyterHub's administrator sets for all users' servers: the traits of `c.GpuCkptHub`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from traitlets import Bool, Dict, Enum, Float, Integer, List, TraitError, Unicode, validate
from traitlets.config import LoggingConfigurable

from ..autosave import FIELDS
from .names import fields, groups_of

#: Settings that users may be let change, by the section of their servers' configuration.
SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "AutoSave": tuple(FIELDS),
    "GpuCkpt": (
        "keep_last",
        "keep_hourly",
        "keep_daily",
        "max_age",
        "restore_on_start",
        "restore_on_death",
        "refresh_environment",
    ),
}
#: Capabilities that a container gets, by what is to work (docs/install.md).
CAPABILITIES: Final[dict[str, tuple[str, ...]]] = {
    "minimal": ("CHECKPOINT_RESTORE", "NET_ADMIN", "SETPCAP"),
    "sys_ptrace": ("CHECKPOINT_RESTORE", "NET_ADMIN", "SETPCAP", "SYS_PTRACE"),
    "sys_admin": ("CHECKPOINT_RESTORE", "NET_ADMIN", "SETPCAP", "SYS_PTRACE", "SYS_ADMIN"),
}
_ALL: Final = tuple(name for names in SECTIONS.values() for name in names)


class GpuCkptHub(LoggingConfigurable):
    """Saving and restoring kernels for a hub's users; the configuration section is ``GpuCkptHub``.

    What is set here is the default in every server, and for what users may not change it is all
    that counts. ``None`` leaves a setting at the server's own default.
    """

    # -- who -----------------------------------------------------------------------------

    allow_all = Bool(
        None,
        allow_none=True,
        config=True,
        help="Whether everybody's kernels can be saved. None: yes, unless allowed_users or "
        "allowed_groups is set.",
    )
    allowed_users = List(
        Unicode(),
        config=True,
        help="Users whose kernels can be saved. Empty: see allow_all.",
    )
    allowed_groups = List(
        Unicode(), config=True, help="The hub's groups whose members' kernels can be saved."
    )

    rights = Enum(
        list(CAPABILITIES),
        "minimal",
        config=True,
        help="What containers are given. minimal: CHECKPOINT_RESTORE, NET_ADMIN and SETPCAP; "
        "sys_ptrace: SYS_PTRACE too, for machines where kernel.yama.ptrace_scope is 1; sys_admin: "
        "SYS_ADMIN too, for second kernels of a state and states whose process numbers are taken.",
    )

    # -- where ---------------------------------------------------------------------------

    store_url = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Where saved states are kept, as GpuCkpt.store_url: a folder or a URL. {username} and "
        "{servername} in it stand for the user's and the named server's name, made safe for a "
        "path. None: below the user's home folder.",
    )
    store_options = Dict(
        config=True,
        help="fsspec's options for store_url, such as endpoint_url. No credentials: users can read "
        "them. Give servers theirs through the environment, a mounted file, or the node's role.",
    )

    # -- keys ----------------------------------------------------------------------------

    master_key_file = Unicode(
        None,
        allow_none=True,
        config=True,
        help="File, which only the hub may read, with a key from which each user's is derived; "
        "`jupyter gpu-ckpt new-key FILE` makes one. A server whose user may save "
        "gets its user's in its environment.",
    )
    key_file = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Path of the file with the user's key, in the server. {username} is filled in.",
    )
    key_env = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Environment variable of the user's server that holds the user's key, where the "
        "spawner or the image sets one.",
    )
    key_command = List(
        Unicode(),
        config=True,
        help="Command, in the user's server, that prints the user's key: the program and its "
        "arguments. {username} is filled in.",
    )

    # -- how much ------------------------------------------------------------------------

    quota = Integer(
        None,
        allow_none=True,
        min=0,
        config=True,
        help="Bytes that a user's states may take. None: no limit.",
    )
    group_quotas = Dict(
        value_trait=Integer(min=0),
        config=True,
        help="Bytes for members of groups, instead of quota. Of several groups the most counts.",
    )
    user_quotas = Dict(
        value_trait=Integer(min=0),
        config=True,
        help="Bytes for single users, instead of quota and group_quotas.",
    )
    upload_bandwidth = Float(
        None,
        allow_none=True,
        min=0.0,
        config=True,
        help="Bytes a second that the uploads of a server take at most. 0: no limit.",
    )
    upload_bandwidth_per_node = Float(
        None,
        allow_none=True,
        min=0.0,
        config=True,
        help="Bytes a second that the uploads of all servers of a node take together at most, as "
        "GpuCkpt.upload_bandwidth_per_node. 0: no limit.",
    )
    keep_last = Integer(None, allow_none=True, min=0, config=True, help="As GpuCkpt.keep_last.")
    most_keep_last = Integer(
        None,
        allow_none=True,
        min=1,
        config=True,
        help="The most keep_last that a user may choose; the least is 1 then, and keep_hourly and "
        "keep_daily can be lowered only.",
    )
    keep_hourly = Integer(None, allow_none=True, min=0, config=True, help="As GpuCkpt.keep_hourly.")
    keep_daily = Integer(None, allow_none=True, min=0, config=True, help="As GpuCkpt.keep_daily.")
    max_age = Float(
        None,
        allow_none=True,
        min=0.0,
        config=True,
        help="Seconds after which a user's states are removed, as GpuCkpt.max_age.",
    )
    most_max_age = Float(
        None,
        allow_none=True,
        min=0.0,
        config=True,
        help="The most max_age that a user may choose.",
    )

    saves_per_node = Integer(
        None,
        allow_none=True,
        min=0,
        config=True,
        help="How many kernels of a node are saved at the same time, by all its servers, as "
        "GpuCkpt.saves_per_node.",
    )

    # -- when ----------------------------------------------------------------------------

    enabled = Bool(None, allow_none=True, config=True, help="As AutoSave.enabled.")
    idle = Float(None, allow_none=True, min=0.0, config=True, help="As AutoSave.idle.")
    interval = Float(None, allow_none=True, min=0.0, config=True, help="As AutoSave.interval.")
    long_cell = Float(None, allow_none=True, min=0.0, config=True, help="As AutoSave.long_cell.")
    hibernate = Float(None, allow_none=True, min=0.0, config=True, help="As AutoSave.hibernate.")
    park = Float(None, allow_none=True, min=0.0, config=True, help="As AutoSave.park.")
    before_shutdown = Bool(None, allow_none=True, config=True, help="As AutoSave.before_shutdown.")
    before_preemption = Bool(
        None, allow_none=True, config=True, help="As AutoSave.before_preemption."
    )
    before_cull = Bool(None, allow_none=True, config=True, help="As AutoSave.before_cull.")
    shortest = Float(
        60.0,
        min=0.0,
        config=True,
        help="Shortest idle, interval, long_cell, hibernate and park that users may choose, in "
        "seconds; default 60.",
    )
    shutdown_deadline = Float(
        20.0,
        min=0.0,
        config=True,
        help="Seconds that a server's saves may take when the hub stops it; default 20.",
    )
    upload_timeout = Float(
        60.0,
        min=0.0,
        config=True,
        help="Seconds that it waits for uploads then, where states are kept on a remote system; "
        "default 60. The spawner is told to wait for both.",
    )

    # -- restoring, and the rest ---------------------------------------------------------

    restore_on_start = Enum(
        ["prompt", "always", "never"],
        None,
        allow_none=True,
        config=True,
        help="What a new server does with the kernels of the last one, as "
        "GpuCkpt.restore_on_start.",
    )
    restore_on_death = Bool(None, allow_none=True, config=True, help="As GpuCkpt.restore_on_death.")
    refresh_environment = List(
        Unicode(),
        None,
        allow_none=True,
        config=True,
        help="Patterns of environment variables that restored kernels get anew, as "
        "GpuCkpt.refresh_environment.",
    )
    placement = Enum(
        ["off", "prefer", "require"],
        "off",
        config=True,
        help="Whether KubeSpawner and SlurmSpawner start a server where the user's states can be "
        "restored, if there is such a node (prefer), or nowhere else (require).",
    )
    node_labels = Dict(
        default_value={
            "machine": "kubernetes.io/arch",
            "feature": "feature.node.kubernetes.io/cpu-cpuid.",
            "gpu": "nvidia.com/gpu.product",
            "driver": "nvidia.com/cuda.driver.major",
        },
        config=True,
        help="Labels that say what nodes of Kubernetes have; what is not named is left out.",
    )
    slurm_features = Dict(
        config=True,
        help="Features of Slurm's nodes, by the GPU's name or the processor's feature that they "
        'stand for: {"NVIDIA A100-SXM4-40GB": "a100", "avx512f": "avx512"}.',
    )
    users_may_change = List(
        Unicode(),
        list(_ALL),
        config=True,
        help="Which settings users may change, within the limits; what is not named is fixed, also "
        "against the configuration of a server's image. Default: " + ", ".join(_ALL) + ".",
    )
    server_config = Dict(
        value_trait=Dict(),
        config=True,
        help="Further settings that are fixed in every server, by section (GpuCkpt, AutoSave, "
        "GpuCkptProvisioner) and trait: "
        '{"GpuCkpt": {"local_tier_dir": "/scratch/states"}}.',
    )

    @validate("users_may_change")
    def _check_names(self, proposal: dict[str, Any]) -> list[str]:
        names: list[str] = proposal["value"]
        if unknown := sorted(set(names) - set(_ALL)):
            raise TraitError(
                f"GpuCkptHub.users_may_change names what cannot be changed: {', '.join(unknown)}."
            )
        return names

    @validate("store_url", "key_file")
    def _check_template(self, proposal: dict[str, Any]) -> str | None:
        template: str | None = proposal["value"]
        for field in fields(template or ""):
            if field not in ("username", "servername"):
                raise TraitError(
                    f"GpuCkptHub.{proposal['trait'].name}: {{{field}}} stands for nothing; "
                    "{username} and {servername} do."
                )
        return template

    def check(self) -> None:
        """Refuse settings that contradict each other; called once, when the hub starts.

        Raises
        ------
        TraitError
            They do.
        """
        if self.allow_all and (self.allowed_users or self.allowed_groups):
            raise TraitError(
                "GpuCkptHub.allow_all lets everybody save kernels, and allowed_users or "
                "allowed_groups only some: set one of them."
            )
        keys = ("master_key_file", "key_file", "key_env", "key_command")
        if len(found := [name for name in keys if getattr(self, name)]) > 1:
            raise TraitError(f"Only one of GpuCkptHub.{' and GpuCkptHub.'.join(found)} can be set.")

    def capabilities(self) -> tuple[str, ...]:
        """Capabilities that a server gets, without their ``CAP_``."""
        return CAPABILITIES[self.rights]

    # -- what counts for one user --------------------------------------------------------

    def allows(self, user: str, groups: Collection[str]) -> bool:
        """Whether a user's kernels may be saved."""
        if self.allow_all is not None:
            everybody = self.allow_all
        else:
            everybody = not (self.allowed_users or self.allowed_groups)
        return everybody or user in self.allowed_users or bool({*groups} & {*self.allowed_groups})

    def shares_nodes(self) -> bool:
        """Whether servers of a node need the folder ``GpuCkpt.node_turns_dir`` in common."""
        return bool(self.saves_per_node or self.upload_bandwidth_per_node)

    def lets(self, spawner: Any) -> bool:
        """Whether the kernels of a spawner's user may be saved."""
        return self.allows(spawner.user.name, groups_of(spawner))

    def quota_of(self, user: str, groups: Collection[str]) -> int | None:
        """Bytes that a user's states may take; ``None``: no limit."""
        if user in self.user_quotas:
            return int(self.user_quotas[user])
        of_groups = [self.group_quotas[name] for name in groups if name in self.group_quotas]
        return max(of_groups) if of_groups else self.quota

    def master_key(self) -> Path | None:
        """File of the key from which users' keys are derived."""
        return Path(self.master_key_file).expanduser() if self.master_key_file else None
