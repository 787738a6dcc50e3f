"""A handle on one ``kernel-capture run`` or ``restore``: the parent of a kernel's process tree."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ..errors import CkptError
from .explain import explain
from .native import native_environment
from .protocol import RestoredEvent, read_events

logger = logging.getLogger(__name__)

#: Seconds for a supervisor that was told to kill its tree, before it is killed itself. Giving
#: back a hundred gigabytes takes the system many seconds, and until then the numbers are taken.
KILL_GRACE: Final = 30.0


class Supervisor:
    """One supervised kernel. Thread-safe; needs no event loop.

    Made by :meth:`run` or :meth:`restore`. The supervisor process ends its kernel when
    this process ends, because the pipe to its standard input closes.

    Attributes
    ----------
    process
        The ``kernel-capture`` process.
    pid
        The kernel's own process id once it runs, as this process sees it.
    restored
        What a finished restore reported, else ``None``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str | None,
        log: Path | None,
        pass_fds: Sequence[int] = (),
        temporary: Path | None = None,
    ) -> None:
        self.pid: int | None = None
        self.restored: RestoredEvent | None = None
        self._changed = threading.Condition()
        self._write_lock = threading.Lock()
        self._exit_code: int | None = None
        self._exited: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        self._callbacks: list[Callable[[int], None]] = []
        self._temporary = temporary
        self._restoring = command[1] == "restore"
        with contextlib.ExitStack() as stack:
            if log is None:
                messages: Any = subprocess.DEVNULL
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                messages = os.open(log, flags, 0o600)
                stack.callback(os.close, messages)
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    cwd=cwd,
                    env=native_environment(),
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
            except OSError as error:
                if error.filename == cwd and cwd is not None:
                    raise
                raise CkptError(
                    "cannot_capture",
                    "The program that supervises kernels (kernel-capture) cannot be started.",
                    hint="Reinstall jupyter-gpu-ckpt.",
                    details=str(error),
                ) from error
        self._reader = threading.Thread(target=self._read, name="gpu-ckpt-events", daemon=True)
        self._reader.start()
        threading.Thread(target=self._reap, name="gpu-ckpt-supervisor", daemon=True).start()

    @classmethod
    def run(
        cls,
        kernel_capture: Path,
        argv: list[str],
        *,
        env: dict[str, str],
        cwd: str | None,
        log: Path,
    ) -> Supervisor:
        """Start a fresh kernel; called by the provisioner.

        Parameters
        ----------
        kernel_capture
            The program, from :func:`.native.find_kernel_capture`.
        argv
            The kernel's command.
        env
            The kernel's whole environment.
        cwd
            Its working directory, or ``None`` for this process's.
        log
            The file for the kernel's stdout and stderr. The supervisor's own messages go
            beside it, to ``<log>.supervisor``.

        Raises
        ------
        FileNotFoundError
            When the kernel's program or working directory does not exist, as
            ``subprocess`` would.
        CkptError
            ``cannot_capture`` when ``kernel-capture`` cannot be started.
        """
        program: str | None = argv[0]
        if os.sep not in argv[0]:
            program = shutil.which(argv[0], path=env.get("PATH"))
        if program is None:
            raise FileNotFoundError(2, "No such file or directory", argv[0])
        read_end, write_end = os.pipe()
        try:
            command = [str(kernel_capture), "run", "--log", str(log), "--env-fd", str(read_end)]
            command += ["--", program, *argv[1:]]
            self = cls(command, cwd=cwd, log=_beside(log), pass_fds=(read_end,))
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        data = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
        # A thread, because an environment larger than the pipe would block until it is read.
        threading.Thread(target=_write_all, args=(write_end, data), daemon=True).start()
        return self

    @classmethod
    def restore(
        cls,
        kernel_capture: Path,
        images_dir: Path,
        *,
        pids: Sequence[int],
        cwd: str | None = None,
        hold: bool,
        hold_timeout: float,
        timeout: float,
        pid_namespace: Literal["auto", "never", "always"] = "auto",
        stream: bool = False,
        gpu_map: Mapping[str, str] | None = None,
        gpu_timeout: float = 30.0,
        log: Path | None = None,
    ) -> Supervisor:
        """Start the restore of a tree; called by the provisioner after ``prepare_for_restore``.

        Parameters
        ----------
        kernel_capture
            The program.
        images_dir
            The image directory, prepared.
        pids
            Every PID and TID of the images, from :func:`.images.all_pids`.
        cwd
            Working directory of the supervisor itself.
        hold
            Keep the kernel's main thread waiting until :meth:`release`.
        hold_timeout
            Longest hold, seconds.
        timeout
            Seconds until a restore is given up.
        pid_namespace
            Whether a taken PID may be solved with a new PID namespace.
        stream
            CRIU gets its images from the :class:`.stream.ImageServer` of the image directory.
        gpu_map
            UUIDs: which GPU stands for each one of the save; by index where it is empty.
        gpu_timeout
            Seconds that room on a GPU is waited for.
        log
            The kernel's log file; the supervisor's messages go to ``<log>.supervisor``.

        Raises
        ------
        CkptError
            ``cannot_capture`` when ``kernel-capture`` cannot be started.
        """
        fd, name = tempfile.mkstemp(prefix="gpu-ckpt-pids-")
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.writelines(f"{pid}\n" for pid in pids)
        command = [str(kernel_capture), "restore", "--images-dir", str(images_dir)]
        command += ["--pids-file", name, "--timeout", f"{timeout:.3f}"]
        command += ["--pid-namespace", pid_namespace]
        if stream:
            command.append("--stream")
        command += ["--gpu-timeout", f"{gpu_timeout:.3f}"]
        for old, new in (gpu_map or {}).items():
            command += ["--gpu-map", f"{old}={new}"]
        if hold:
            command += ["--hold", "--hold-timeout", f"{hold_timeout:.3f}"]
        try:
            return cls(
                command, cwd=cwd, log=None if log is None else _beside(log), temporary=Path(name)
            )
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def wait_started(self, timeout: float) -> int:
        """Block until the kernel runs.

        Parameters
        ----------
        timeout
            Seconds; when they are over the supervisor and its tree are ended.

        Returns
        -------
        int
            The kernel's process id.

        Raises
        ------
        CkptError
            ``restore_failed``, ``pid_in_use``, ``timeout``, ``internal`` and what else
            :mod:`.explain` makes of the native error.
        """
        with self._changed:
            self._changed.wait_for(self._is_settled, timeout)
            pid, error, code = self.pid, self._error, self._exit_code
        if pid is not None:
            return pid
        if error is not None and self._restoring:
            raise explain(error, doing="restore")
        if error is None and code is None:
            self.kill()
            raise CkptError(
                "timeout",
                f"The kernel did not start within {timeout:g} seconds.",
                hint="Look at the kernel's log.",
            )
        raise CkptError(
            "internal",
            "The kernel's supervisor ended before the kernel ran.",
            hint="Look at the kernel's log.",
            details=str((error or {}).get("message") or f"exit status {code}"),
        )

    def release(self) -> None:
        """Let a held main thread go on. Harmless when nothing is held."""
        self._send(b"release\n")

    def kill(self) -> None:
        """End the whole tree at once (SIGKILL). Returns before it has ended: see :meth:`wait`."""
        self._send(b"kill\n")
        timer = threading.Timer(KILL_GRACE, self._kill_supervisor)
        timer.daemon = True
        timer.start()

    def signal(self, signum: int) -> None:
        """Send a signal to the kernel's process group.

        SIGKILL ends the tree; every other signal is passed on by the supervisor.
        """
        if signum == signal.SIGKILL:
            self.kill()
        else:
            self.process.send_signal(signum)

    def poll(self) -> int | None:
        """The kernel's exit code once its whole tree is gone, else ``None``.

        As with ``subprocess``: ``-N`` when signal N ended it.
        """
        with self._changed:
            return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Block until the tree is gone; the exit code as :meth:`poll` gives it.

        Raises
        ------
        TimeoutError
            When ``timeout`` seconds pass first.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._exit_code is not None, timeout):
                raise TimeoutError(f"the kernel did not end within {timeout} s")
            assert self._exit_code is not None
            return self._exit_code

    def add_exit_callback(self, callback: Callable[[int], None]) -> None:
        """Have ``callback(exit_code)`` called once, in another thread, when the tree is gone.

        When it is gone already, ``callback`` is called at once in this thread.
        """
        with self._changed:
            if self._exit_code is None:
                self._callbacks.append(callback)
                return
            code = self._exit_code
        callback(code)

    def _is_settled(self) -> bool:
        return self.pid is not None or self._error is not None or self._exit_code is not None

    def _send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with self._write_lock, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def _kill_supervisor(self) -> None:
        if self.poll() is None:
            logger.error("the supervisor %d did not end its kernel; killing it", self.process.pid)
            self.process.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for event in read_events(stream):  # type: ignore[arg-type]
                with self._changed:
                    self._note(event)
                    self._changed.notify_all()

    def _note(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started" and isinstance(event.get("pid"), int):
            self.pid = event["pid"]
        elif kind == "restored":
            try:
                self.restored = msgspec.convert(event, RestoredEvent)
            except msgspec.ValidationError as error:
                logger.error("odd 'restored' event: %s", error)
            else:
                self.pid = self.restored.pid
        elif kind == "exited":
            self._exited = event
        elif kind == "error":
            self._error = event

    def _reap(self) -> None:
        status = self.process.wait()
        # The pipe closes with the process; a descendant that holds it must not delay us.
        self._reader.join(timeout=1)
        with self._write_lock, contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
        with self._changed:
            self._exit_code = code = self._kernel_code(status)
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            try:
                callback(code)
            except Exception:
                logger.exception("an exit callback failed")

    def _kernel_code(self, status: int) -> int:
        if self._exited is not None:
            if isinstance(code := self._exited.get("code"), int):
                return code
            if isinstance(number := self._exited.get("signal"), int):
                return -number
        return status


def _beside(log: Path) -> Path:
    return log.with_name(log.name + ".supervisor")


def _write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as file:
        file.write(data)
