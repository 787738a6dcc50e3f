"""What an administrator can set about where saved states are kept, and how they get there."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jupyter_core.paths import jupyter_data_dir
from traitlets import Dict, Float, Integer, TraitError, Unicode, validate

from .store import StateStore
from .store.bandwidth import Bandwidth, NodeShare
from .store.tiers import TieredStore, tier_folder
from .store_settings import StoreSettings


class PlaceSettings(StoreSettings):
    """Base of :class:`~jupyter_gpu_ckpt.settings.GpuCkpt`, and part of its section."""

    store_url = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Where saved states are kept: a folder, which may be on a shared file system, or a "
        "URL that fsspec knows, such as s3://bucket/states. {username} in it is the owner's name. "
        "None: gpu-ckpt/store below Jupyter's data folder.",
    )
    store_options = Dict(
        config=True,
        help="fsspec's storage options for store_url: endpoint, credentials and so on. fsspec's "
        "own configuration and the environment count too.",
    )
    owner = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Name of this user's part of the store. None: the JupyterHub user, else the user "
        "the server runs as.",
    )
    local_tier_dir = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Folder on this node's disk where states lie first when store_url is a remote "
        "system, and whence they are uploaded. None: gpu-ckpt/tiers below Jupyter's data folder.",
    )
    local_tier_limit = Integer(
        64 << 30,
        min=0,
        config=True,
        help="Bytes of uploaded states that stay in that folder, the last used ones; default "
        "64 GiB. What is not uploaded yet stays in any case.",
    )
    upload_parallel = Integer(
        3,
        min=1,
        max=64,
        config=True,
        help="How many packs are uploaded at the same time; default 3. Each takes 32 MiB of "
        "memory.",
    )
    upload_bandwidth = Float(
        0.0,
        min=0.0,
        config=True,
        help="Bytes a second that uploads take at most, on average; default 0, no limit.",
    )
    upload_bandwidth_per_node = Float(
        0.0,
        min=0.0,
        config=True,
        help="Bytes a second that the uploads of all servers of a node take together at most, on "
        "average, in equal parts for all users who upload; default 0, no limit.",
    )
    node_turns_dir = Unicode(
        "/tmp/jupyter-gpu-ckpt-turns",
        config=True,
        help="Folder of saves_per_node and upload_bandwidth_per_node, the same in all servers of a "
        "node; containers have to be given it from outside. Made where it is missing, open to "
        "everybody as /tmp is.",
    )
    upload_timeout = Float(
        60.0,
        min=0.0,
        config=True,
        help="Seconds that a server which stops waits for uploads; default 60. The next server "
        "on this node goes on with what is left.",
    )
    store_timeout = Float(
        20.0,
        min=0.1,
        config=True,
        help="Seconds without an answer after which a call to a remote system has failed; "
        "default 20. It is tried again, and states stay on this node meanwhile.",
    )
    memory_limit = Integer(
        256 << 20,
        min=64 << 20,
        config=True,
        help="Bytes of memory that the buffers of one save or restore may take; default 256 MiB.",
    )
    compression_level = Integer(
        1,
        min=1,
        max=19,
        config=True,
        help="zstd's level for what compresses; default 1. Higher ones are much slower, and "
        "seldom much smaller.",
    )

    @validate("store_url")
    def _check_store_url(self, proposal: dict[str, Any]) -> str | None:
        url: str | None = proposal["value"]
        if url and (scheme := _scheme(url)) in ("http", "https", "ftp"):
            raise TraitError(f"GpuCkpt.store_url: nothing can be kept on {scheme}://.")
        return url

    def open_store(self, on_durable: Callable[[str], None] | None = None) -> StateStore:
        """The store, as it is configured.

        ``on_durable``: called, in a thread, with the id of each state that was uploaded.
        """
        url = self._place()
        ways: dict[str, Any] = {
            "sealing": self.key_ring(),
            "compression_level": self.compression_level,
            "memory_limit": self.memory_limit,
        }
        if url is None:
            return StateStore(self.store_folder(), self.owner_name(), **ways)
        return TieredStore(
            url,
            self._tiers(),
            self.owner_name(),
            options=self.store_options,
            limit=self.local_tier_limit,
            parallel=self.upload_parallel,
            bandwidth=Bandwidth(
                self.upload_bandwidth,
                NodeShare(Path(self.node_turns_dir), self.upload_bandwidth_per_node),
            ),
            timeout=self.store_timeout,
            on_durable=on_durable,
            **ways,
        )

    def store_folder(self) -> Path:
        """Where states lie on this machine, at first at least."""
        url = self._place()
        if url is not None:
            return tier_folder(self._tiers(), url)
        if not self.store_url:
            return self.data_folder() / "store"
        return Path(self._named().removeprefix("file://")).expanduser()

    def data_folder(self) -> Path:
        """Where this package keeps what belongs to the user and not to the store."""
        return Path(jupyter_data_dir()) / "gpu-ckpt"

    def owner_name(self) -> str:
        """Whose part of the store this is."""
        return self.owner or os.environ.get("JUPYTERHUB_USER") or _user()

    def server_name(self) -> str:
        """Name of this server among those of its user, as JupyterHub has it; empty: unnamed."""
        return os.environ.get("JUPYTERHUB_SERVER_NAME", "")

    def _place(self) -> str | None:
        """URL of a remote system; ``None`` for a folder."""
        if not self.store_url or _scheme(self.store_url) in (None, "file"):
            return None
        return self._named()

    def _named(self) -> str:
        return (self.store_url or "").replace("{username}", quote(self.owner_name(), safe=""))

    def _tiers(self) -> Path:
        if self.local_tier_dir:
            return Path(self.local_tier_dir).expanduser()
        return self.data_folder() / "tiers"


def _scheme(url: str) -> str | None:
    """The scheme of a URL, ``None`` for a path."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    return match[1].lower() if match else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return str(os.getuid())
