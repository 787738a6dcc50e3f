"""The administrator's page of a JupyterHub with many users: how soon it answers."""

from __future__ import annotations

import re
import time
from pathlib import Path

import requests

from benchmarks.report import Row
from tests.harness.client import wait_for
from tests.harness.hub import Hub
from tests.harness.server import Home, free_port
from tests.hub.generated import crowd

USERS, KERNELS, STATES = 200, 5, 3
SECONDS_WANTED = 1.0
#: Who else may use the page: the benchmark itself, as a service of the hub.
TOKEN = "token-of-the-benchmark"


def measure(folder: Path, rounds: int) -> list[Row]:
    """Measure the page, its data and its metrics, and how long reading all stores takes."""
    (states := folder / "states").mkdir()
    names = crowd(states, USERS, KERNELS, STATES)
    scopes = ["custom:gpu-ckpt:read", "access:services!service=gpu-ckpt"]
    more = f"""
c.JupyterHub.services.append({{"name": "benchmark", "api_token": {TOKEN!r}}})
c.JupyterHub.load_roles.append(
    {{"name": "benchmark", "services": ["benchmark"], "scopes": {scopes!r}}}
)
from jupyter_gpu_ckpt.hub import add_admin_page
add_admin_page(c, url="http://127.0.0.1:{free_port()}", folder={str(folder / "service")!r},
               interval=5)
"""
    config = {"GpuCkptHub": {"store_url": str(states), "quota": 1 << 30}}
    with Hub(Home(folder / "hub"), hub_config=config, more=more) as hub:
        hub.add_users(names)
        with requests.Session() as client:
            client.headers["Authorization"] = f"token {TOKEN}"

            def get(path: str) -> str:
                answer = client.get(f"{hub.url}/services/gpu-ckpt/{path}", timeout=60)
                answer.raise_for_status()
                return answer.text

            everybody = re.compile(rf"{USERS} users, {USERS * KERNELS * STATES} states")
            wait_for("all are read", lambda: everybody.search(get("")), 120)
            rows = []
            for what, path in (
                ("page of all users", ""),
                ("page of one user", f"users/{names[7]}"),
                ("JSON of all users", "api/users"),
                ("metrics", "metrics"),
            ):
                took = []
                for _ in range(max(20, rounds)):
                    began = time.perf_counter()
                    get(path)
                    took.append(time.perf_counter() - began)
                wanted = [SECONDS_WANTED] * len(took)
                rows.append(Row(f"{what}, {_crowd()}", "1 s", took, wanted, "<= 1"))
            reading = []
            for _ in range(max(3, rounds)):
                last = _metric(get("metrics"), "read_timestamp_seconds")

                def again(before: float = last) -> bool:
                    return _metric(get("metrics"), "read_timestamp_seconds") > before

                wait_for("all are read again", again, 60, 0.5)
                reading.append(_metric(get("metrics"), "read_seconds"))
            minute = [60.0] * len(reading)
            rows.append(Row(f"reading all stores, {_crowd()}", "60 s", reading, minute, "<= 0.1"))
            return rows


def _crowd() -> str:
    return f"{USERS} users x {KERNELS} kernels x {STATES} states"


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^gpu_ckpt_hub_{name} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])
