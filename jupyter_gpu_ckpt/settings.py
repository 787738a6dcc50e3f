"""What an administrator can set about saving and restoring: the traits of `c.GpuCkpt`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from traitlets import Bool, Enum, Float, Integer, List, TraitError, Unicode, validate

from .place_settings import PlaceSettings

#: What kernel-capture takes: seconds up to a week, and a ghost limit of 32 bits.
_SHORTEST: Final = 0.001
_LONGEST: Final = 6 * 24 * 3600.0
_LARGEST_GHOST: Final = (1 << 32) - 1
_MOST_DIRS: Final = 64


class GpuCkpt(PlaceSettings):
    """Base of :class:`~jupyter_gpu_ckpt.keeper.Keeper`; the configuration section is ``GpuCkpt``.

    What is set in the section ``Keeper`` counts too.
    """

    spool_dir = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Folder for images while a kernel is saved or restored; it must be able to hold a "
        "socket. Best on a fast local disk with room for the largest kernel that is saved. None: "
        "gpu-ckpt/spool below Jupyter's data folder.",
    )
    node_local_dirs = List(
        Unicode(),
        ["/tmp", "/var/tmp", "/dev/shm", "/run"],
        config=True,
        help="Folders that another node does not share. What a kernel has open or mapped below "
        "them is saved with it. At most 64, as absolute paths.",
    )
    node_local_limit = Integer(
        4 << 30,
        config=True,
        help="Most bytes of node-local files in one state; default 4 GiB.",
    )
    ghost_limit = Integer(
        1 << 30,
        min=0,
        max=_LARGEST_GHOST,
        config=True,
        help="Largest deleted but still open file that is saved with a kernel, in bytes; "
        "default 1 GiB.",
    )
    save_timeout = Float(
        600.0,
        min=_SHORTEST,
        max=_LONGEST,
        config=True,
        help="Seconds that writing a kernel's memory may take, during which it stands still; "
        "default 600. After that the save is undone and the kernel runs on.",
    )
    saves_per_node = Integer(
        0,
        min=0,
        max=1024,
        config=True,
        help="How many kernels of a node are saved at the same time, by all its servers and users "
        "together; default 0, no limit. For many servers that end at once.",
    )
    node_turn_timeout = Float(
        10.0,
        min=0.0,
        config=True,
        help="Seconds that a save waits for its turn at most; default 10. Then it goes on without "
        "one, so that nobody can keep others from saving. Less than AutoSave.shutdown_deadline.",
    )
    restore_timeout = Float(
        600.0,
        min=_SHORTEST,
        max=_LONGEST,
        config=True,
        help="Seconds that rebuilding a kernel's processes may take; default 600.",
    )
    gpu_timeout = Float(
        30.0,
        min=_SHORTEST,
        max=_LONGEST,
        config=True,
        help="Seconds that a save waits for the end of what a kernel has running on a GPU, and a "
        "restore for room on the GPU; default 30. After that nothing has changed.",
    )
    gpu_to_store = Bool(
        False,
        config=True,
        help="Whether GPU memory is saved straight to the store where the driver offers that "
        "(custom storage, CUDA 13.4), so that the host's memory needs no room for it. Such a "
        "state cannot be restored with a driver that does not. Default False, because it was not "
        "run on a real GPU yet, and cannot be taken back once it is under way: see the design.",
    )
    unpark_timeout = Float(
        600.0,
        min=_SHORTEST,
        max=_LONGEST,
        config=True,
        help="Seconds that a parked kernel, and a cell that needs it, wait for room on its GPU; "
        "default 600. After that the cell ends with an error, and the kernel stays parked.",
    )
    park_others = Bool(
        False,
        config=True,
        help="Whether idle kernels of this server are parked where another one waits for room on "
        "their GPU, least recently used first.",
    )
    hold_timeout = Float(
        10.0,
        min=_SHORTEST,
        max=_LONGEST,
        config=True,
        help="Most seconds that a restored kernel waits for the server's connections before it "
        "goes on; default 10. Output before that may be lost.",
    )
    restore_on_death = Bool(
        True,
        config=True,
        help="Whether a kernel that dies unexpectedly is restored at once from its newest state. "
        "If False, an empty one is started, as Jupyter does, and the states stay.",
    )
    death_window = Float(
        30.0,
        config=True,
        help="Seconds within which the death of a restored kernel is put down to its state; "
        "default 30.",
    )
    death_limit = Integer(
        2,
        config=True,
        help="How many such deaths in a row are answered with another restore; default 2.",
    )
    restore_on_start = Enum(
        ["prompt", "always", "never"],
        "prompt",
        config=True,
        help="What a server does with kernels that were lost with an earlier one: 'prompt' asks "
        "the user which to restore, 'always' restores them at once, 'never' does neither; their "
        "states stay.",
    )
    restore_parallel = Integer(
        2,
        min=1,
        config=True,
        help="How many kernels 'always' restores at the same time, most recently saved first; "
        "default 2.",
    )
    refresh_environment = List(
        Unicode(),
        [
            "AWS_CONTAINER_*",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "JUPYTERHUB_*",
            "KRB5CCNAME",
            "SLURM_*",
            "SSH_AUTH_SOCK",
        ],
        config=True,
        help="Patterns (case-sensitive, * and ? as in file names) of environment variables that a "
        "restored Python kernel gets anew from the server that restored it: tokens and places "
        "that belong to a node, a job or a server. What GpuCkptProvisioner.scrub_environment "
        "names stays out. A variable that the notebook itself has set is left alone.",
    )
    lease_interval = Float(
        10.0, config=True, help="Seconds between renewals of a kernel's lease; default 10."
    )
    lease_ttl = Float(
        30.0,
        config=True,
        help="Seconds after which a kernel whose lease was not renewed counts as lost on another "
        "node; default 30.",
    )

    @validate("node_local_dirs")
    def _check_node_local_dirs(self, proposal: dict[str, Any]) -> list[str]:
        dirs: list[str] = proposal["value"]
        if len(dirs) > _MOST_DIRS or not all(os.path.isabs(path) for path in dirs):
            raise TraitError(
                f"GpuCkpt.node_local_dirs takes at most {_MOST_DIRS} folders, as absolute paths."
            )
        return dirs

    def spool_folder(self) -> Path:
        """Where image directories lie while an operation runs."""
        return Path(self.spool_dir).expanduser() if self.spool_dir else self.data_folder() / "spool"
