"""What a store says of kernels whose last save failed."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store import KernelRecord, SaveFailure, StateStore
from jupyter_gpu_ckpt.store.failures import MOST
from tests.store.conftest import KERNEL


def at(seconds: float = 0.0) -> str:
    when = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def failure(
    kernel_id: str = KERNEL, *, age: float = 0.0, message: str = "Too large."
) -> SaveFailure:
    return SaveFailure(
        kernel_id=kernel_id, at=at(age), since=at(age), cause="idle", reason="over_quota",
        message=message, path="a.ipynb",
    )  # fmt: skip


@pytest.fixture
def stores(tmp_path: Path) -> tuple[StateStore, StateStore]:
    """One store, as two processes see it."""
    return StateStore(tmp_path / "store", "alice"), StateStore(tmp_path / "store", "alice")


def test_another_process_reads_it_until_a_save_succeeds(
    stores: tuple[StateStore, StateStore],
) -> None:
    here, there = stores
    assert there.failures() == []
    here.note_failure(first := failure(age=60))
    here.note_failure(failure(message="x" * 1000))
    (found,) = there.failures()
    assert (found.kernel_id, found.count, found.since) == (KERNEL, 2, first.since)
    assert found.at > first.at
    assert len(found.message) == 300
    there.clear_failure(KERNEL)
    there.clear_failure(KERNEL)
    assert here.failures() == []


def test_it_is_left_when_the_kernels_record_goes(stores: tuple[StateStore, StateStore]) -> None:
    here, there = stores
    here.put_kernel(KernelRecord(kernel_id=KERNEL, kernel_name="python3", display_name="Python"))
    here.note_failure(failure())
    here.delete_kernel(KERNEL)
    assert [found.kernel_id for found in there.failures()] == [KERNEL]
    assert there.kernels() == []
    assert there.listing().states == []


def test_there_are_never_many(stores: tuple[StateStore, StateStore]) -> None:
    here, there = stores
    for number in range(MOST + 3):
        here.note_failure(failure(f"kernel-{number:03}", age=MOST + 3 - number))
    found = [one.kernel_id for one in there.failures()]
    assert found == [f"kernel-{number:03}" for number in range(MOST + 2, 2, -1)]


def test_old_and_damaged_ones_are_not_told(
    stores: tuple[StateStore, StateStore], tmp_path: Path
) -> None:
    here, there = stores
    here.note_failure(failure("old", age=31 * 86400))
    here.note_failure(failure("moved"))
    kernels = tmp_path / "store" / "alice" / "kernels"
    (kernels / "moved").rename(kernels / "elsewhere")
    for name, content in (("cut", b'{"kernel_id": "cut"'), ("nonsense", b'{"at": 3}')):
        (kernels / name).mkdir()
        (kernels / name / "failure.json").write_bytes(content)
    assert there.failures() == []


def test_an_id_that_is_no_name_is_refused(stores: tuple[StateStore, StateStore]) -> None:
    with pytest.raises(CkptError, match="no kernel"):
        stores[0].note_failure(failure("../evil"))
