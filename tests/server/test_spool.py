"""Memory images and logs are their owner's alone, wherever and however the server runs."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.spool import Spool
from tests.harness.server import Home, JupyterServer

OTHER = 65534


@pytest.fixture
def no_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def use(spool: Spool) -> None:
    async def run() -> None:
        async with spool.folder("operation") as folder:
            (folder / "image").touch()

    asyncio.run(run())


def test_everything_is_private_whatever_the_umask(home: Home, no_umask: None) -> None:
    with JupyterServer(home) as server:
        kernel = server.client.start(home.add_notebook("n.ipynb"))
        state = server.client.save(kernel)["state_id"]
        server.client.restore(state)
        server.client.restore(state, mode="new")
    ours = home.data / "gpu-ckpt"
    found = [ours, *ours.rglob("*")]
    assert {"logs", "spool", "store"} <= {path.name for path in found}
    open_to_others = [p for p in found if stat.S_IMODE(p.lstat().st_mode) & 0o077]
    assert not open_to_others


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    use(spool)
    spool.root.chmod(0o777)
    with pytest.raises(CkptError, match="Other users can write") as caught:
        use(spool)
    assert caught.value.reason == "store_unavailable"
    spool.root.chmod(0o1777)  # as /tmp: only its owner may rename what is in it
    use(spool)


@pytest.mark.root
@pytest.mark.parametrize("planted", ["folder", "link"])
def test_a_folder_that_another_user_has_made_is_not_used(tmp_path: Path, planted: str) -> None:
    spool = Spool(tmp_path / "spool")
    use(spool)
    (own,) = spool.root.iterdir()
    own.rmdir()
    spool.root.chmod(0o1777)
    if planted == "folder":
        own.mkdir()
        os.chown(own, OTHER, OTHER)
    else:
        own.symlink_to(tmp_path)
    with pytest.raises(CkptError, match="Other users can write"):
        use(spool)


@pytest.mark.root
def test_only_its_own_left_overs_are_removed(tmp_path: Path) -> None:
    """Nor are those of others read: a FIFO in the place of an image would hold up the server."""
    spool = Spool(tmp_path / "spool")
    use(spool)
    (own,) = spool.root.iterdir()
    node = own.name.split("-")[0]
    mine, theirs = (spool.root / f"{node}-{4000000 + n}-1" for n in range(2))
    for folder in (mine, theirs):
        (folder / "operation" / "images").mkdir(parents=True)
    os.mkfifo(theirs / "operation" / "images" / "files.img")
    os.chown(theirs, OTHER, OTHER)
    spool.clean()
    assert not mine.exists()
    assert theirs.exists()
