"""A node is drained: all servers on it are told to end at the same moment."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from jupyter_gpu_ckpt.store import StateStore
from tests.harness.client import KernelClient
from tests.harness.forked import ForkedServers
from tests.harness.server import Home

SERVERS = 20
#: How many kernels may be saved at the same time.
PER_NODE = 2
#: Before its save a kernel takes its time, and writes down when that was.
NOTES_ITS_SAVE = """
import json, time
%load_ext jupyter_gpu_ckpt
from jupyter_gpu_ckpt.hooks import before_save
def note():
    begin = time.monotonic()
    time.sleep(0.3)
    with open(PATH, "a") as file:
        print(json.dumps([begin, time.monotonic()]), file=file)
before_save(note)
x = 41
"""


def test_the_kernels_of_twenty_servers_are_saved_in_turns(shared: Path) -> None:
    notes, users = shared / "notes", [f"user-{number}" for number in range(SERVERS)]
    homes = [Home(shared / user) for user in users]
    configs: list[dict[str, dict[str, Any]]] = [
        {
            "GpuCkpt": {
                "store_url": str(shared / "states"), "owner": user, "saves_per_node": PER_NODE,
                "node_turns_dir": str(shared / "turns"), "node_turn_timeout": 100.0,
            },
            "AutoSave": {"shutdown_deadline": 120.0},
        }
        for user in users
    ]  # fmt: skip
    with ForkedServers(homes, configs) as servers, ThreadPoolExecutor(4) as pool:

        def begin(number: int) -> KernelClient:
            kernel = servers.clients[number].start(homes[number].add_notebook("book.ipynb"))
            kernel.run(NOTES_ITS_SAVE.replace("PATH", repr(str(notes))))
            return kernel

        kernels = list(pool.map(begin, range(SERVERS)))
        assert len(servers.processes) == SERVERS
        for process in servers.processes:
            process.terminate()
        assert psutil.wait_procs(servers.processes, timeout=130)[1] == []

        times = [json.loads(line) for line in notes.read_text().splitlines()]
        assert len(times) == SERVERS
        at_once = [sum(begin <= moment < end for begin, end in times) for moment, _ in times]
        assert max(at_once) <= PER_NODE, times
        for number, (user, kernel) in enumerate(zip(users, kernels, strict=True)):
            assert "Saved 1 of 1 kernels" in servers.log(number)
            store = StateStore(shared / "states", user)
            (record,) = store.kernels()
            assert (record.kernel_id, record.offer) == (kernel.id, "shutdown")
            (state,) = store.states(kernel.id)
            assert state.meta.reason == "shutdown"
