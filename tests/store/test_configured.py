"""What an administrator sets about the store is what the store does."""

from __future__ import annotations

from pathlib import Path

import pytest
from traitlets.config import Config

from jupyter_gpu_ckpt.settings import GpuCkpt
from jupyter_gpu_ckpt.store import StateStore

from .conftest import KERNEL, make_meta

MIB = 1 << 20


def opened(url: str, monkeypatch: pytest.MonkeyPatch, folder: Path, **traits: int) -> StateStore:
    """The store that a server with these settings has; its own files are in `folder`."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(folder))
    config = Config({"GpuCkpt": {"store_url": url, "owner": "ada", **traits}})
    return GpuCkpt(config=config).open_store()


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_level_and_memory_are_those_that_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    source = tmp_path / "image"
    source.mkdir()
    words = [f"word {number * number % 9973}" for number in range(200_000)]
    (source / "pages-1.img").write_text(" ".join(words))
    sizes: list[int] = []
    for level in (1, 19):
        place = tmp_path / f"store-{level}"
        url = f"memory://{place.name}" if scheme == "memory://" else f"{scheme}{place}"
        traits = {"compression_level": level, "memory_limit": (level + 63) * MIB}
        store = opened(url, monkeypatch, tmp_path / f"data-{level}", **traits)
        assert store._memory == (level + 63) * MIB
        with store.begin(KERNEL) as writer:
            writer.add_tree(source)
            sizes.append(writer.commit(make_meta()).stored_size)
        store.start()
        assert store.stop(5) == []
    assert sizes[1] < 0.9 * sizes[0]


def test_a_bound_is_256_mib_and_one_in_which_nothing_works_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "store")
    assert opened(url, monkeypatch, tmp_path)._memory == 256 * MIB
    with pytest.raises(Exception, match="memory_limit"):
        opened(url, monkeypatch, tmp_path, memory_limit=MIB)
