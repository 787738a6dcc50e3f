"""A real Slurm of one node on the loopback: Debian's munge, slurmctld and slurmd."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from tests.harness.client import wait_for
from tests.harness.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# linuxproc finds a job's processes by their parents: it needs no cgroups, which a container lacks.
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
MpiDefault=none
SwitchType=switch/none
KillWait=2
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster, up once constructed. A context manager: leaving ends it and its jobs."""

    #: Seconds between the controller's looks for jobs that are over their time.
    LOOKS = 30.0

    def __init__(self) -> None:
        missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
        assert not missing, (
            f"Slurm cannot run here: {', '.join(missing)} missing. "
            "apt-get install slurmctld slurmd slurm-client munge"
        )
        # Not below a folder of the tests: munge refuses folders that others can write to.
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-ckpt-slurm-"))
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._host = socket.gethostname().split(".")[0]
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self.folder.chmod(0o755)
        for name in ("state", "spool", "munge"):
            (self.folder / name).mkdir()
        munge = self.folder / "munge"
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o600)
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                folder=self.folder, host=self._host, cpus=os.cpu_count(),
                ctld_port=free_port(), slurmd_port=free_port(),
            )
        )  # fmt: skip
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge", "munge")
        self._daemon(
            "setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--foreground",
            f"--socket={munge}/socket", f"--key-file={munge}/key", f"--pid-file={munge}/pid",
            f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        self._ready("munge answers", (munge / "socket").exists)
        self._daemon("slurmctld", "-D", "-i")
        #: When the controller began, in Unix seconds: its looks come at fixed times after that.
        self.began = time.time()
        self._daemon("slurmd", "-D")
        self._ready("the node is idle", lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"))

    def _daemon(self, *argv: str) -> None:
        log = self.folder / f"out-{len(self._daemons)}"
        with log.open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    argv, env=self.environment(), stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True, cwd=self.folder,
                )
            )  # fmt: skip

    def _ready(self, what: str, condition: object) -> None:
        try:
            wait_for(what, condition, 20)  # type: ignore[arg-type]
        except AssertionError as error:
            raise AssertionError(f"Slurm cannot run here: {error}\n{self.log()}") from None

    def environment(self) -> dict[str, str]:
        """Where Slurm's programs find this cluster."""
        conf = str(self.folder / "slurm.conf")
        return {"PATH": PATH, "SLURM_CONF": conf, "LANG": "C.UTF-8"}

    def ask(self, *argv: str) -> str:
        """What one of Slurm's programs says; empty where it fails."""
        done = subprocess.run(
            argv, env=self.environment(), capture_output=True, text=True, timeout=20
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def log(self) -> str:
        """What the daemons said last."""
        texts = []
        for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("out-*")]):
            lines = path.read_text(errors="replace").splitlines()[-20:]
            texts.append(f"--- {path.name}\n" + "\n".join(lines))
        return "\n".join(texts)

    def submit(
        self, script: str, *options: str, environment: Mapping[str, str], output: Path
    ) -> str:
        """Submit a batch script that gets this environment, and returns the job's id."""
        path = self.folder / f"job-{secrets.token_hex(3)}.sh"
        path.write_text(script)
        job = subprocess.run(
            ["sbatch", "--parsable", f"--output={output}", "--export=ALL", *options, str(path)],
            env={**environment, "SLURM_CONF": str(self.folder / "slurm.conf")},
            cwd="/", capture_output=True, text=True, timeout=20, check=True,
        ).stdout.strip()  # fmt: skip
        return job.split(";")[0]

    def state(self, job: str) -> str:
        """RUNNING, TIMEOUT, CANCELLED...; Slurm forgets a job after some minutes."""
        words = self.ask("scontrol", "show", "job", job).split()
        return next((w.split("=")[1] for w in words if w.startswith("JobState=")), "")

    def end_job_at(self, job: str, when: float) -> None:
        """Set a running job's limit, as an administrator does; `when` in Unix seconds."""
        text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(when))
        subprocess.run(
            ["scontrol", "update", f"jobid={job}", f"EndTime={text}"],
            env=self.environment(), check=True, capture_output=True, timeout=20,
        )  # fmt: skip

    def next_look(self, after: float) -> float:
        """When the controller looks next for jobs over their time, after that Unix time."""
        looks = int((after - self.began) // self.LOOKS) + 1
        return self.began + looks * self.LOOKS

    def stop(self) -> None:
        """End all jobs and the cluster."""
        with contextlib.suppress(OSError, subprocess.SubprocessError, AssertionError):
            self.ask("scancel", "--full", "--signal=KILL", "--user=root")
            self.ask("scancel", "--user=root")
            wait_for("the jobs end", lambda: not self.ask("squeue", "-h"), 10)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@contextlib.contextmanager
def cluster() -> Iterator[Slurm]:
    """Yield a cluster; what its daemons said is part of a failure."""
    with Slurm() as slurm:
        try:
            yield slurm
        except AssertionError as error:
            raise AssertionError(f"{error}\n{slurm.log()}") from error
