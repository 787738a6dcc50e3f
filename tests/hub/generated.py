"""Stores of many users, with records of kernels and states but nothing in them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec

from jupyter_gpu_ckpt.store import KernelRecord, Lease, SaveFailure, ServerStop, StateMeta
from jupyter_gpu_ckpt.store.failures import NAME as FAILURE
from jupyter_gpu_ckpt.store.keys import KeyRing
from jupyter_gpu_ckpt.store.layout import owner_folder
from jupyter_gpu_ckpt.store.manifest import Body, IndexPlace, encode_manifest
from jupyter_gpu_ckpt.store.owner import OwnerStore, open_owner
from jupyter_gpu_ckpt.store.packs import pack_id, pack_key

MIB = 1 << 20


def ago(**how: float) -> datetime:
    return datetime.now(timezone.utc) - timedelta(**how)


def iso(when: datetime) -> str:
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class User:
    """The store of one user, made of nothing but records.

    Parameters
    ----------
    root, name
        Where, and whose.
    ring
        The user's keys.
    """

    def __init__(self, root: Path, name: str, ring: KeyRing | None = None) -> None:
        owner = open_owner(root, owner_folder(name), create=True, ring=ring)
        assert owner is not None
        self.owner: OwnerStore = owner
        self._ring = ring

    def kernel(
        self,
        kernel_id: str,
        path: str,
        *,
        status: str = "ended",
        hostname: str = "node-a",
        stop: ServerStop | None = None,
    ) -> str:
        """Write a kernel's record: ``ended``, ``running``, ``hibernated`` or ``lost``."""
        lease = None
        if status in ("running", "hibernated"):
            lease = Lease(
                node_id="another", hostname=hostname, boot_id="b", server_pid=1,
                server_start=1.0, renewed=0.0, ttl=3600.0,
            )  # fmt: skip
        record = KernelRecord(
            kernel_id=kernel_id, kernel_name="python3", display_name="Python 3", path=path,
            lease=lease, hibernated=status == "hibernated",
            offer="shutdown" if status == "lost" else None, stop=stop,
        )  # fmt: skip
        self._write(self.owner.kernels / kernel_id / "kernel.json", msgspec.json.encode(record))
        return kernel_id

    def state(
        self,
        kernel_id: str,
        path: str,
        when: datetime,
        *,
        size: int = 100 * MIB,
        stored: int = 10 * MIB,
        reason: str = "idle",
        frozen: float = 0.0,
        shares: Iterable[str] = (),
    ) -> str:
        """Write a state's manifest, with a pack that is a hole; `shares`: states it needs too."""
        state_id = f"{when:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        own = pack_id(state_id, 0)
        key = self._ring.current() if self._ring is not None else None
        body = Body(
            format=2, id=state_id, created=iso(when), size=size, stored_size=stored, parent=None,
            key_id=key.id if key is not None else None,
            packs={own: stored} | {pack_id(state, 0): 1 for state in shares},
            index=IndexPlace(
                pack=own, number=0, offset=0, length=1, codec=0, size=1, salt="", name="00" * 32
            ),
            meta=StateMeta(
                kernel_id=kernel_id, kernel_name="python3", display_name="Python 3",
                language="python", path=path, reason=reason, frozen_seconds=frozen,
            ),
        )  # fmt: skip
        manifest = encode_manifest(body, self.owner.sealing)
        self._write(self.owner.manifest(kernel_id, state_id), manifest)
        pack = self.owner.packs / pack_key(own)
        self._write(pack, b"")
        os.truncate(pack, stored)
        return state_id

    def failure(self, kernel_id: str, path: str, message: str, when: datetime) -> None:
        """Note that the kernel's last save failed."""
        failure = SaveFailure(
            kernel_id=kernel_id, at=iso(when), since=iso(when), cause="idle", reason="over_quota",
            message=message, hint="Delete states.", path=path, hostname="node-a",
        )  # fmt: skip
        self._write(self.owner.kernels / kernel_id / FAILURE, msgspec.json.encode(failure))

    def give_to(self, uid: int, gid: int) -> None:
        """Have it all belong to a user of the system."""
        for folder, _, files in os.walk(self.owner.folder):
            os.chown(folder, uid, gid)
            for name in files:
                os.chown(os.path.join(folder, name), uid, gid)

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)


def crowd(root: Path, users: int, kernels: int, states: int) -> list[str]:
    """Many users with as many kernels each, of which each has as many states; returns their names.

    One in ten kernels is lost, and one in ten could not be saved lately.
    """
    names = [f"user-{number:03}" for number in range(users)]
    for number, name in enumerate(names):
        user = User(root, name)
        for kernel in range(kernels):
            which = number * kernels + kernel
            kernel_id, path = f"kernel-{which:05}", f"notebooks/work-{kernel}.ipynb"
            user.kernel(kernel_id, path, status="lost" if which % 10 == 0 else "running")
            for state in range(states):
                user.state(kernel_id, path, ago(hours=1 + state), size=(1 + which % 9) * 300 * MIB)
            if which % 10 == 1:
                user.failure(kernel_id, path, "The kernel was not saved: over quota.", ago(hours=2))
    return names
