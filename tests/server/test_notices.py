"""Somebody says that the server ends: kernels are saved in time, and told of."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from traitlets import TraitError

from jupyter_gpu_ckpt.notices import Notice, NoticeSource
from jupyter_gpu_ckpt.notices.clouds import AwsNotice, AzureNotice, GcpNotice
from jupyter_gpu_ckpt.notices.local import FileNotice, SignalNotice
from jupyter_gpu_ckpt.notices.slurm import SlurmNotice
from tests.harness.client import EventStream, wait_for
from tests.harness.node import Node
from tests.harness.server import Home, JupyterServer
from tests.server.rest import metrics
from tests.server.shell import PROGRAM, Shell

AZURE_NAME = "/metadata/instance/compute/name"
AZURE_EVENTS = "/metadata/scheduledevents"
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
AUTOSAVE = "gpu-ckpt/api/kernels"
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"


class Metadata:
    """A metadata service on a port of this machine: strict about what clouds are strict about."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {GCP_PREEMPTED: "FALSE", AZURE_NAME: "vm-1"}
        self.changed = threading.Condition()
        self.tokens = 0
        self.refused: list[str] = []
        self.broken = False
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                if not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdecimal():
                    return self.answer(400)
                service.tokens += 1
                self.answer(200, f"token-{service.tokens}")

            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                if service.broken:
                    return self.answer(500)
                if path.startswith("/latest/"):
                    allowed = (
                        self.headers.get("X-aws-ec2-metadata-token") == f"token-{service.tokens}"
                    )
                elif path.startswith("/metadata/"):
                    allowed = self.headers.get("Metadata") == "true" and "api-version=" in query
                else:
                    allowed = self.headers.get("Metadata-Flavor") == "Google"
                if not allowed:
                    service.refused.append(path)
                    return self.answer(401)
                if "wait_for_change=true" in query:
                    with service.changed:
                        service.changed.wait_for(
                            lambda: f"last_etag={hash(service.said[path])}" not in query, 60
                        )
                text = service.said.get(path)
                self.answer(404 if text is None else 200, text or "")

            def answer(self, status: int, text: str = "") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.send_header("ETag", str(hash(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def say(self, path: str, text: str | dict[str, Any]) -> None:
        with self.changed:
            self.said[path] = text if isinstance(text, str) else json.dumps(text)
            self.changed.notify_all()

    def stop(self) -> None:
        self.say(GCP_PREEMPTED, "")  # nobody waits any more
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    service = Metadata()
    yield service
    service.stop()


def after(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def aws_action(seconds: float) -> dict[str, str]:
    return {"action": "terminate", "time": after(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")}


def azure_event(seconds: float, **change: Any) -> dict[str, Any]:
    return {
        "EventId": "A-1", "EventType": "Preempt", "ResourceType": "VirtualMachine",
        "Resources": ["vm-1"], "EventStatus": "Scheduled",
        "NotBefore": format_datetime(after(seconds), usegmt=True), **change,
    }  # fmt: skip


@asynccontextmanager
async def listening(source: NoticeSource) -> AsyncIterator[Callable[[], Any]]:
    """Listen to a source; gives a function that waits for its next notice."""
    notices: asyncio.Queue[Notice] = asyncio.Queue()

    async def listen() -> None:
        async with aclosing(source.notices()) as found:  # type: ignore[type-var]
            async for notice in found:
                notices.put_nowait(notice)

    task = asyncio.create_task(listen())
    await asyncio.sleep(0.1)
    try:
        yield lambda: asyncio.wait_for(notices.get(), 5)
        assert notices.empty()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ends"
    path.write_text("5")
    source = FileNotice(path=str(path), poll=0.05, seconds=7.0)
    assert source.applies()
    assert not FileNotice().applies()
    async with listening(source) as next_one:  # the old file is no notice
        path.write_text("120\n")
        assert (await next_one()).seconds == 120
        path.unlink()
        await asyncio.sleep(0.1)
        path.write_text("soon")
        assert (await next_one()).seconds == 7


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN])
def inherited(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process that was started with SIGUSR2 at its default, and one where it is ignored."""
    before = signal.signal(signal.SIGUSR2, request.param)
    yield
    signal.signal(signal.SIGUSR2, before)


async def test_a_signal(inherited: None) -> None:
    assert SignalNotice().applies()
    async with listening(SignalNotice(seconds=5.0)) as next_one:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (await next_one()).seconds == 5
        assert not SignalNotice().applies()
    os.kill(os.getpid(), signal.SIGUSR2)  # a late one does not end what still saves
    SignalNotice(signal="SIGRTMIN+3")
    for taken in ("SIGTERM", "SIGUSR1", "SIGRTMIN+99", "USR2"):
        with pytest.raises(TraitError, match="have a meaning"):
            SignalNotice(signal=taken)


def controller(folder: Path) -> Callable[[float], None]:
    """A Slurm controller's answers: sets when the job ends, from now."""
    program, answer = folder / "squeue", folder / "answer"
    program.write_text(
        f"#!/bin/sh\n[ \"$*\" = '--noheader --jobs=7 --format=%e' ] && cat {answer}\n"
    )
    program.chmod(0o755)

    def ends(seconds: float) -> None:
        (folder / "new").write_text(f"{time.time() + seconds:.0f}\n")
        (folder / "new").rename(answer)

    ends(3600)
    return ends


async def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = controller(tmp_path)
    assert not SlurmNotice().applies()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    source = SlurmNotice(squeue=str(tmp_path / "squeue"), lead=60.0)
    assert source.applies()
    source.set_trait("poll", 1.0)
    async with listening(source) as next_one:
        slurm(50)  # an administrator has changed it
        assert 40 < (await next_one()).seconds <= 51
    # What does not answer is replaced by what the job knew at its start.
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 30))
    async with listening(SlurmNotice(squeue="/nonexistent")) as next_one:
        assert 20 < (await next_one()).seconds <= 31


async def test_aws(metadata: Metadata) -> None:
    source = AwsNotice(address=metadata.address, poll=0.05)
    async with listening(source) as next_one:
        metadata.say(AWS_REBALANCE, {"noticeTime": "2026-01-01T00:00:00Z"})
        notice = await next_one()
        assert (notice.seconds, notice.sure) == (120, False)
        metadata.tokens += 1  # the service was started anew and knows the token no more
        metadata.say(AWS_ACTION, aws_action(100))
        notice = await next_one()
        assert 90 < notice.seconds <= 100
        assert notice.sure
        assert "terminate" in notice.why


async def test_gcp(metadata: Metadata) -> None:
    async with listening(GcpNotice(address=metadata.address, poll=0.05)) as next_one:
        metadata.say(GCP_PREEMPTED, "TRUE")
        assert (await next_one()).seconds == 30
    assert not metadata.refused


async def test_azure(metadata: Metadata) -> None:
    metadata.say(AZURE_EVENTS, {"DocumentIncarnation": 1, "Events": []})
    async with listening(AzureNotice(address=metadata.address, poll=0.05)) as next_one:
        others = [
            azure_event(60, EventId="A-2", Resources=["vm-2"]),
            azure_event(60, EventId="A-3", EventType="Freeze"),
        ]
        metadata.say(AZURE_EVENTS, {"Events": [*others, azure_event(60)]})
        notice = await next_one()
        assert 50 < notice.seconds <= 60
        assert "Preempt" in notice.why
        metadata.say(AZURE_EVENTS, {"Events": [azure_event(0, NotBefore="", EventId="A-4")]})
        assert (await next_one()).seconds == 0


async def test_a_service_that_fails_is_asked_again(
    metadata: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    metadata.broken = True
    async with listening(AwsNotice(address=metadata.address, poll=0.05)) as next_one:
        metadata.say(AWS_ACTION, "this is no JSON")
        metadata.broken = False
        await asyncio.sleep(0.2)
        metadata.say(AWS_ACTION, aws_action(100))
        await next_one()
    assert not caplog.records


def test_no_cloud_is_asked_from_a_machine_that_is_none_of_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clouds = {
        AwsNotice: ("sys_vendor", "Amazon EC2"),
        GcpNotice: ("product_name", "Google Compute Engine"),
        AzureNotice: ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),
    }
    monkeypatch.setattr("jupyter_gpu_ckpt.notices.clouds.DMI", tmp_path)
    (tmp_path / "sys_vendor").write_text("Microsoft Corporation\n")  # any Hyper-V machine
    assert not any(cloud().applies() for cloud in clouds)
    for cloud, (name, word) in clouds.items():
        (tmp_path / name).write_text(word + "\n")
        assert cloud().applies()


def saved(events: EventStream, source: str) -> dict[str, Any]:
    """Wait until kernels were saved because of a source's notice."""
    return events.wait_for("server", action="saved", source=source)


@pytest.mark.root
@pytest.mark.timeout(200)
def test_each_notice_ends_in_a_state_that_another_node_restores(
    home: Home, metadata: Metadata, shared: Path
) -> None:
    tmp_path = shared / "what-says-it"
    tmp_path.mkdir()
    slurm = controller(tmp_path)
    own = tmp_path / "own"
    (own / "own_notice-1.dist-info").mkdir(parents=True)
    (own / "own_notice-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: own-notice\nVersion: 1\n"
    )
    (own / "own_notice-1.dist-info" / "entry_points.txt").write_text(
        "[jupyter_gpu_ckpt.notice_sources]\nown = own_notice:Own\nbroken = own_notice:Nothing\n"
    )
    (own / "own_notice.py").write_text(
        "import asyncio, os\n"
        "from jupyter_gpu_ckpt.notices import Notice, NoticeSource\n"
        "class Own(NoticeSource):\n"
        "    async def notices(self):\n"
        f"        while not os.path.exists({str(tmp_path / 'own-ends')!r}):\n"
        "            await asyncio.sleep(0.05)\n"
        "        yield Notice(3.0, 'My own machine ends.')\n"
    )
    cloud = {"address": metadata.address, "poll": 0.1}
    config: dict[str, Any] = {
        "AutoSave": {
            "notice_sources": ["auto", "aws", "gcp", "azure", "own", "broken", "mistyped"],
            "idle": 0.0,
            "shortest": 0.1,
        },
        "FileNotice": {"path": str(tmp_path / "ends"), "poll": 0.1},
        "SignalNotice": {"seconds": 3.0},
        "SlurmNotice": {"squeue": str(tmp_path / "squeue"), "lead": 30.0, "poll": 1.0},
        "AwsNotice": cloud,
        "GcpNotice": {**cloud, "seconds": 3.0},
        "AzureNotice": cloud,
    }
    environment = {"SLURM_JOB_ID": "7", "PYTHONPATH": str(own)}
    states: dict[str, str] = {}
    with (
        Node("node-a", [shared]) as node,
        JupyterServer(home, node=node, config=config, environment=environment) as server,
    ):
        node.reach(metadata.server.server_address[1])
        give: dict[str, Callable[[], Any]] = {
            "file": lambda: (tmp_path / "ends").write_text("3"),
            "signal": lambda: server.process.send_signal(signal.SIGUSR2),
            "slurm": lambda: slurm(5),
            "aws": lambda: metadata.say(AWS_ACTION, aws_action(3)),
            "gcp": lambda: metadata.say(GCP_PREEMPTED, "TRUE"),
            "azure": lambda: metadata.say(AZURE_EVENTS, {"Events": [azure_event(3)]}),
            "own": lambda: (tmp_path / "own-ends").write_text(""),
        }
        events = server.client.events()
        kernel = server.client.start(home.add_notebook("book.ipynb"))

        def newest(reason: str, source: str) -> None:
            state = server.client.states(kernel=kernel.id)[0]
            assert state["reason"] == reason
            states[source] = state["id"]

        for source, tell in give.items():
            kernel.run(f"x = {source!r}")
            tell()
            told = events.wait_for("server", action="ends", source=source)
            assert told["seconds"] <= 6
            told = saved(events, source)
            assert (told["saved"], told["not_saved"]) == (1, [])
            newest("preemption", source)
            ends = server.client.get("gpu-ckpt/api/endings")[0]["ends"]
            wait_for("the time is over", lambda ends=ends: ends < after(0).isoformat(), 10)
        numbers = metrics(server)
        for source in give:
            assert numbers[f'gpu_ckpt_notices_total{{source="{source}"}}'] >= 1
            saves = f'gpu_ckpt_foretold_saves_total{{saved="true",source="{source}"}}'
            assert numbers[saves] >= 1
        assert "names mistyped, which is not installed" in server.log()
        assert "The source of notices broken cannot be used" in server.log()
        # Nobody says anything: it is idle.
        kernel.run("x = 'idle'")
        server.client.request("PUT", f"{AUTOSAVE}/{kernel.id}/autosave", body={"idle": 0.2})
        events.wait_for("operation", kernel_id=kernel.id, cause="idle", status="done")
        newest("idle", "idle")
        server.client.request("PUT", f"{AUTOSAVE}/{kernel.id}/autosave", body={})
        # As Kubernetes does: the preStop hook, then SIGTERM, then the pod is gone.
        kernel.run("x = 'pod'")
        hook = Shell(home)
        said = node.run(
            [*PROGRAM, "save", "--all", "--deadline", "20"],
            env=hook.environment,
            cwd=home.notebooks,
        )
        assert said.stdout == "1 of 1 kernels are saved.\n"
        newest("preemption", "pod")
        kernel.run("x = 'after the hook'")
        server.stop()
    with Node("node-b", [shared]) as node, JupyterServer(home, node=node) as server:
        (lost,) = server.client.wait_lost(1)
        assert (lost["kernel_id"], lost["state"]["reason"]) == (kernel.id, "shutdown")
        server.client.restore_lost(kernel.id)
        again = server.client.connect(kernel.id)
        assert again.run("print(x)") == "after the hook"
        for source, state_id in states.items():
            server.client.restore(state_id)
            assert again.run("print(x)") == source


NOTHING_ELSE: dict[str, Any] = {"AutoSave": {"idle": 0.0, "interval": 0.0, "long_cell": 0.0}}


def test_a_pod_that_is_stopped(home: Home) -> None:
    shell = Shell(home)
    with JupyterServer(home, config=NOTHING_ELSE) as server:
        kernels = [server.client.start(home.add_notebook(f"{n}.ipynb")) for n in range(4)]
        idle, hanging, alone, stopped = kernels
        for kernel, choice in (
            (idle, {"before_shutdown": False}),  # it may be stopped: its end is foretold
            (stopped, {"before_preemption": False}),
        ):
            path = f"gpu-ckpt/api/kernels/{kernel.id}/autosave"
            server.client.request("PUT", path, body=choice)
        server.client.request("PUT", "gpu-ckpt/api/autosave", body={"long_cell": 1234.0})
        for kernel in kernels:
            kernel.run("x = 41")
        home.choose("2.ipynb", False)  # leaves "alone" alone
        # The hook, as in docs/autosave.md, while a kernel is in something that cannot be saved.
        hanging.run("import subprocess; c = subprocess.Popen(['unshare', '-m', 'sleep', '600'])")
        done = shell.run("save", "--all", "--deadline", "300", code=1)
        assert done.stdout == "1 of 2 kernels are saved.\n"
        assert done.stderr.startswith("Not saved: 1.ipynb: ")
        hanging.run("c.kill(); c.wait()")
        found = shell.json("save", "--all", "--deadline", "300", code=1)
        # It is the same end. What changed since is saved when it comes near, or at SIGTERM.
        assert [kernel["saved"] for kernel in found["kernels"]] == [True, False]
        assert [s["reason"] for s in server.client.states(kernel=idle.id)] == ["preemption"]
        assert server.client.states(kernel=stopped.id) == []
        numbers = metrics(server)
        assert numbers['gpu_ckpt_foretold_saves_total{saved="true",source="request"}'] == 1
        assert numbers['gpu_ckpt_foretold_saves_total{saved="false",source="request"}'] == 1
        assert numbers['gpu_ckpt_notices_total{source="request"}'] == 2
        for arguments in (["save"], ["save", "--all"], ["save", "0.ipynb", "--deadline", "3"]):
            assert "Give a KERNEL, or --all" in shell.error(*arguments, code=2)
        server.stop()
    with JupyterServer(home, config=NOTHING_ELSE) as server:
        server.client.wait_lost(3)
        for kernel in (idle, hanging, stopped):
            server.client.restore_lost(kernel.id)
            assert server.client.connect(kernel.id).run("print(x + 1)") == "42"
        # What the user chose, for all kernels and for one, is still so.
        assert server.client.get("gpu-ckpt/api/autosave")["own"]["long_cell"] == 1234
        chosen = server.client.get(f"gpu-ckpt/api/kernels/{idle.id}/autosave")
        assert (chosen["own"]["before_shutdown"], chosen["policy"]["long_cell"]) == (False, 1234)
        for kernel in (hanging, stopped):
            assert [s["reason"] for s in server.client.states(kernel=kernel.id)] == ["shutdown"]
        assert server.client.states(kernel=alone.id) == []


def test_one_end_is_told_once_and_late_work_is_saved_too(home: Home, metadata: Metadata) -> None:
    config = {
        "AutoSave": {**NOTHING_ELSE["AutoSave"], "notice_sources": ["auto", "aws"]},
        "FileNotice": {"path": str(home.path / "ends"), "poll": 0.1},
        "AwsNotice": {"address": metadata.address, "poll": 0.1},
    }
    with JupyterServer(home, config=config) as server:
        events = server.client.events()
        kernel = server.client.start(home.add_notebook("book.ipynb"))
        metadata.say(AWS_REBALANCE, {"noticeTime": "2026-01-01T00:00:00Z"})
        maybe = events.wait_for("server", action="ends", source="aws")
        assert maybe["sure"] is False
        kernel.run("x = 1")
        # Now it is known, and when: later than it might have been.
        first = server.client.post("gpu-ckpt/api/endings", {"seconds": 600, "why": "A drill."})
        assert first["id"] == maybe["ending_id"]
        assert (first["source"], first["why"], first["sure"]) == ("request", "A drill.", True)
        saved(events, "request")
        kernel.run("x = 2")
        # The same end from elsewhere, or a later one, is no news.
        (home.path / "ends").write_text("600")
        again = server.client.post("gpu-ckpt/api/endings", {"seconds": 900})
        assert again["id"] == first["id"]
        assert len(server.client.states(kernel=kernel.id)) == 1
        # It comes earlier: what was done meanwhile is saved.
        again = server.client.post("gpu-ckpt/api/endings", {"seconds": 14})
        assert (again["id"], again["ends"] < first["ends"]) == (first["id"], True)

        def states(count: int) -> list[dict[str, Any]]:
            found = server.client.states(kernel=kernel.id)
            return found if len(found) == count else []

        wait_for("it is saved again", lambda: states(2), 15)
        wait_for("that is over", lambda: endings(server)[0]["phase"] == "done", 15)
        kernel.run("x = 3")
        # And once more, as late as there is time.
        (last, *_) = wait_for("late work is saved", lambda: states(3), 16)
        assert last["reason"] == "preemption"
        assert endings(server)[0]["ends"] > last["created"]
        assert len(endings(server)) == 1
        assert len(events.of("server", action="ends")) == 3
        server.kill()
    with JupyterServer(home, config=config) as server:
        server.client.wait_lost(1)
        server.client.restore_lost(kernel.id)
        assert server.client.connect(kernel.id).run("print(x)") == "3"


def endings(server: JupyterServer) -> list[dict[str, Any]]:
    return list(server.client.get("gpu-ckpt/api/endings"))
