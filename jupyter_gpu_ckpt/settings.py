"""What an administrator can set about saving and restoring: the traits of `c.GpuCkpt`."""

from __future__ import annotations

import getpass
import os
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jupyter_core.paths import jupyter_data_dir
from traitlets import Bool, Enum, Float, Integer, List, TraitError, Unicode, validate

from .store_settings import StoreSettings

#: What kernel-capture takes: seconds up to a week, and a ghost limit of 32 bits.
_SHORTEST: Final = 0.001
_LONGEST: Final = 6 * 24 * 3600.0
_LARGEST_GHOST: Final = (1 << 32) - 1
_MOST_DIRS: Final = 64


class GpuCkpt(StoreSettings):
    """Base of :class:`~jupyter_gpu_ckpt.keeper.Keeper`; the configuration section is ``GpuCkpt``.

    What is set in the section ``Keeper`` counts too.
    """

    store_url = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Where saved states are kept: a folder, which may be on a shared file system. "
        "{username} in it is the owner's name. None: gpu-ckpt/store below Jupyter's data folder.",
    )
    owner = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Name of this user's part of the store. None: the JupyterHub user, else the user "
        "the server runs as.",
    )
    spool_dir = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Folder for memory images while they are saved or restored; best on a fast local "
        "disk with room for the largest kernel. None: gpu-ckpt/spool below Jupyter's data folder.",
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
    restore_timeout = Float(
        600.0,
        min=_SHORTEST,
        max=_LONGEST,
        config=True,
        help="Seconds that rebuilding a kernel's processes may take; default 600.",
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

    @validate("store_url")
    def _check_store_url(self, proposal: dict[str, Any]) -> str | None:
        url: str | None = proposal["value"]
        if url and (scheme := _scheme(url)) not in (None, "file"):
            raise TraitError(f"GpuCkpt.store_url: stores on {scheme}:// are not supported.")
        return url

    def store_folder(self) -> Path:
        """Where states lie."""
        if not self.store_url:
            return _data() / "store"
        path = self.store_url.replace("{username}", quote(self.owner_name(), safe=""))
        return Path(path.removeprefix("file://")).expanduser()

    def data_folder(self) -> Path:
        """Where this package keeps what belongs to the user and not to the store."""
        return _data()

    def spool_folder(self) -> Path:
        """Where image directories lie while an operation runs."""
        return Path(self.spool_dir).expanduser() if self.spool_dir else _data() / "spool"

    def owner_name(self) -> str:
        """Whose part of the store this is."""
        return self.owner or os.environ.get("JUPYTERHUB_USER") or _user()


def _scheme(url: str) -> str | None:
    """The scheme of a URL, ``None`` for a path."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    return match[1].lower() if match else None


def _data() -> Path:
    return Path(jupyter_data_dir()) / "gpu-ckpt"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return str(os.getuid())
