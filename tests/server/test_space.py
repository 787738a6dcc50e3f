"""A save that does not fit is refused before anything is done."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.space import check_space

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """Make a file system of so many MiB."""
    made: list[Path] = []

    def make(name: str, mib: int) -> Path:
        path = tmp_path / name
        path.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={mib}m", "tmpfs"]
        subprocess.run(["mount", *options, str(path)], check=True)
        made.append(path)
        return path

    yield make
    for path in made:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
@pytest.mark.parametrize(
    ("spool", "store", "named"), [(9, 100, "spool_dir"), (100, 9, "store_url"), (100, 11, None)]
)
def test_two_disks(
    disk: Callable[[str, int], Path], spool: int, store: int, named: str | None
) -> None:
    folders = disk("spool", spool), disk("store", store) / "not" / "yet"
    if named is None:
        assert check_space(10 * MIB, *folders) is False
        return
    with pytest.raises(CkptError) as caught:
        check_space(10 * MIB, *folders)
    error = caught.value
    assert error.reason == "no_space"
    assert named in error.message
    assert "10 MiB" in error.message
    assert "9 MiB are free" in error.message
    assert "rm" in (error.hint or "")


@pytest.mark.root
def test_one_disk_for_both(disk: Callable[[str, int], Path]) -> None:
    both = disk("both", 100)
    assert check_space(40 * MIB, both, both / "store") is False
    # With less than twice the room, what is stored has to make place as it goes.
    assert check_space(60 * MIB, both, both / "store") is True
    with pytest.raises(CkptError, match="spool_dir"):
        check_space(101 * MIB, both, both / "store")
