"""What keeps a server from what is saved is said once as long as it lasts, and no details of it."""

from __future__ import annotations

import errno
import itertools
import logging

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.store.layout import store_error
from jupyter_gpu_ckpt.troubles import Troubles

_NUMBERS = itertools.count()


def read_only() -> CkptError:
    """What a store says that cannot be written, each time of another file."""
    path = f"/store/writers/.kernel-{next(_NUMBERS)}"
    return store_error(OSError(errno.EROFS, "Read-only file system", path), "write a record")


def test_each_time_that_it_begins_and_not_at_each_try(caplog: pytest.LogCaptureFixture) -> None:
    troubles = Troubles(logging.getLogger())
    for _ in range(3):
        troubles.tell("Nothing is tidied up", read_only(), again=False)
        troubles.tell("No leases", read_only())
        troubles.tell("No states", read_only())
    assert len(caplog.messages) == 1
    troubles.over("No leases")
    for _ in range(3):
        troubles.tell("No leases", read_only())
        troubles.tell("No states", read_only())
    assert len(caplog.messages) == 2
    # What is tried only once ends with what works again.
    for consequence in ("No leases", "No states"):
        troubles.over(consequence)
    troubles.tell("Nothing is tidied up", read_only(), again=False)
    troubles.over("No leases")
    troubles.tell("No leases", read_only())
    assert [said.partition(":")[0] for said in caplog.messages] == [
        "Nothing is tidied up", "No leases", "Nothing is tidied up", "No leases",
    ]  # fmt: skip


def test_it_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    details = "list: HttpResponseError: Not allowed\nRequestId:4\nTime:now"
    error = CkptError("store_unavailable", "It does not work.", hint="Look.", details=details)
    Troubles(logging.getLogger()).tell("No leases", error)
    (said,) = caplog.messages
    assert said == "No leases: It does not work. Look. (list: HttpResponseError: Not allowed)"
