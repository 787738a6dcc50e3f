"""The administrator's page on a remote system: it reads records only, and what it does arrives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CkptError
from jupyter_gpu_ckpt.hub import GpuCkptHub
from jupyter_gpu_ckpt.hub.service_reading import Person, UserStores
from jupyter_gpu_ckpt.store.records import KernelRecord
from tests.harness.s3 import Proxy
from tests.store.conftest import KERNEL
from tests.store.test_failures import failure

from .test_tiers import Node, node, save, wait_durable, wait_for

__all__ = ["node"]


def test_states_of_another_node_are_read_and_managed(
    node: Node, proxy: Proxy, url: str, image: Path, tmp_path: Path
) -> None:
    server = node("a")
    server.put_kernel(KernelRecord(kernel_id=KERNEL, kernel_name="p", display_name="P"))
    states = [save(server, image) for _ in range(2)]
    for state in states:
        wait_durable(server, state.id)
    server.note_failure(failure())
    assert server._records.flush(10)

    hub = GpuCkptHub(store_url=url, store_options=proxy.options)
    page = UserStores(hub, Person("ada"), tmp_path / "service")
    proxy.requests.clear()
    report = page.read()
    assert {row.id for row in report.states} == {state.id for state in states}
    assert report.used > 0 and report.size == sum(state.size for state in states)
    assert [row.message for row in report.failures] == ["Too large."]
    assert [row.path for row in report.kernels] == [None]
    assert not [request for request in proxy.requests if ".pack" in request.path]

    for stores in page._stores():
        stores.store._mirror._refreshed = 0.0  # type: ignore[attr-defined]
    proxy.requests.clear()
    page.read()
    assert proxy.count() == 1, "a list, where nothing is new"

    page.pin(states[0].id, True)
    page.delete(states[1].id)
    wait_for(lambda: [state.id for state in server.states()] == [states[0].id])
    wait_for(lambda: server.state(states[0].id).pinned)
    assert page.expire(0.0, dry_run=False) == []
    page.close()


def test_a_system_that_does_not_answer_is_told_in_time(
    proxy: Proxy, url: str, tmp_path: Path
) -> None:
    proxy.down()
    hub = GpuCkptHub(store_url=url, store_options=proxy.options)
    page = UserStores(hub, Person("ada"), tmp_path / "service")
    began = time.monotonic()
    with pytest.raises(CkptError) as told:
        page.read()
    assert told.value.reason == "store_unavailable"
    assert time.monotonic() - began < 30
    page.close()
