"""Launches kernels under the supervisor, and adopts restored ones.

Registered as ``gpu-ckpt-provisioner`` and made the default of a server by the extension, so
that every kernelspec is covered. A kernelspec opts out with::

    "metadata": {"kernel_provisioner": {"provisioner_name": "local-provisioner"}}
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import LocalProvisioner
from jupyter_core.paths import jupyter_data_dir
from traitlets import Bool, Float, List, Unicode

from .capture.native import find_kernel_capture
from .capture.supervisor import Supervisor
from .connection import allow_address, apply_connection, own_address, wants_own_address
from .errors import CkptError
from .launching import started
from .limits import Limited, denial
from .observer import KernelObserver, Restored, RestoreToken, kept_from_kernels, observer_of
from .operations import in_thread
from .savability import why_not


class GpuCkptProvisioner(Limited, LocalProvisioner):  # type: ignore[metaclass]  # it is one
    """Runs a kernel on this machine so that it can be saved whole and restored.

    Differs from the stock provisioner in what a save needs: the kernel runs below a
    supervisor of its own, listens on a loopback address of its own, and writes what it
    prints outside of cells (stdout and stderr of the process, which used to appear in the
    server's terminal) to a log file.
    """

    enabled = Bool(
        True,
        config=True,
        help="Whether kernels are launched so that they can be saved. If False, every kernel is "
        "launched exactly as by the stock local provisioner.",
    )

    kernel_capture = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Path of the kernel-capture program. None: the one that came with the package, then "
        "/usr/local/libexec, then /usr/libexec.",
    )

    log_dir = Unicode(
        None,
        allow_none=True,
        config=True,
        help="Folder for what kernels print outside of cells, one file <kernel id>.log each. "
        "None: gpu-ckpt/logs below Jupyter's data folder.",
    )

    scrub_environment = List(
        Unicode(),
        [
            "JUPYTERHUB_API_TOKEN",
            "JUPYTERHUB_COOKIE_SECRET",
            "JUPYTERHUB_CRYPT_KEY",
            "JPY_API_TOKEN",
            "JUPYTER_TOKEN",
            "CONFIGPROXY_AUTH_TOKEN",
            "KG_AUTH_TOKEN",
        ],
        config=True,
        help="Patterns (case-sensitive, * and ? as in file names) of environment variables that "
        "kernels do not inherit from the server, because a kernel's environment becomes part of "
        "its saved states and is stale after a restore. The default is the secrets of the server, "
        "the hub and the gateway. Credentials that notebooks use (AWS_SECRET_ACCESS_KEY, say) are "
        "inherited, and so lie in saved states, until you add them here. A variable that the "
        "kernelspec's own env names is never taken out.",
    )

    launch_timeout = Float(
        60.0,
        config=True,
        help="Seconds the supervisor has to start the kernel's process.",
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        #: The handle on the process; ``None`` for one that the stock provisioner runs.
        self.supervisor: Supervisor | None = None
        #: Why the kernel that runs now cannot be saved; ``None`` when nothing is known against it.
        self.savability: CkptError | None = CkptError(
            "not_savable", "The kernel is not running.", hint="Start it."
        )
        self.log_path: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restoring: RestoreToken | None = None
        self._stopping = self._exit_seen = False
        self._restored: Restored | None = None

    @property
    def observer(self) -> KernelObserver | None:
        """The keeper of the server this kernel belongs to, if there is one."""
        return observer_of(getattr(self.parent, "parent", None))

    # -- launch --------------------------------------------------------------------------

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Choose address and ports, write the connection file, prepare command and environment.

        Called by ``KernelManager.pre_start_kernel()`` at each start and restart.
        """
        km = self.parent
        self._stopping = self._exit_seen = False
        self._restoring = None
        self.savability = self._why_not(kwargs)
        self.log_path = None if self.savability else self.log_folder() / f"{self.kernel_id}.log"
        observer = self.observer
        self._restored = observer.take_restored(self.kernel_id) if observer else None
        if km is not None:
            if self._restored is not None:
                apply_connection(km, self._restored.connection)
                self.ports_cached = True
                self.savability = None
                encrypted = bool(self._restored.connection.get("curve_publickey"))
                kwargs["transport_encryption"] = "auto" if encrypted else "disabled"
            elif self.savability is None and wants_own_address(km):
                km.ip = own_address(self.kernel_id)
                allow_address(km.ip)
        return await super().pre_launch(**kwargs)

    def _finalize_env(self, env: dict[str, str]) -> None:
        """Take secrets out of the kernel's environment; called by :meth:`pre_launch`."""
        super()._finalize_env(env)
        # The keys of saved states are no kernel's business, whoever launches it.
        for name in kept_from_kernels(getattr(self.parent, "parent", None)):
            env.pop(name, None)
        if self.savability is None:
            wanted = self.kernel_spec.env if self.kernel_spec else {}
            for pattern in self.scrub_environment:
                for name in fnmatch.filter(env, pattern):
                    if name not in wanted:
                        del env[name]
            # The parent is the supervisor: ipykernel would end itself on seeing another one.
            env.pop("JPY_PARENT_PID", None)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the kernel, or adopt the restored process that waits for this id.

        Called by ``KernelManager.launch_kernel()``, right after :meth:`pre_launch`.
        """
        self._loop = asyncio.get_running_loop()
        if self._restored is not None:
            self.cwd = kwargs.get("cwd", Path.cwd())
            self._take(self._restored.supervisor)
        elif self.savability is not None:
            self.supervisor = None
            kwargs.pop("kernel_id", None)
            return await super().launch_kernel(cmd, **kwargs)
        else:
            await self._launch(cmd, kwargs)
        return self.connection_info

    async def _launch(self, cmd: list[str], kwargs: dict[str, Any]) -> None:
        program, log = find_kernel_capture(self.kernel_capture), self.log_path
        assert program is not None and log is not None
        cwd = kwargs.get("cwd")
        supervisor = await in_thread(
            lambda: Supervisor.run(
                program,
                [os.path.expanduser(part) for part in cmd],
                env=kwargs["env"],
                cwd=None if cwd is None else os.fspath(cwd),
                log=log,
            )
        )
        await started(supervisor, self.launch_timeout)
        self.cwd = cwd if cwd is not None else Path.cwd()
        self._take(supervisor)

    async def post_launch(self, **kwargs: Any) -> None:
        """Tell the keeper; called by ``KernelManager.post_start_kernel()``."""
        await super().post_launch(**kwargs)
        restored, self._restored = self._restored, None
        if self.supervisor is not None and self.observer is not None:
            self.observer.kernel_started(self, restored)

    def log_folder(self) -> Path:
        """Where the kernels' logs lie."""
        if self.log_dir:
            return Path(self.log_dir).expanduser()
        return Path(jupyter_data_dir()) / "gpu-ckpt" / "logs"

    def _why_not(self, kwargs: dict[str, Any]) -> CkptError | None:
        """Why the kernel about to be launched could not be saved; ``None``: it could."""
        if (denied := denial()) is not None:
            return CkptError("not_savable", denied.message, hint=denied.hint)
        if not self.enabled:
            return CkptError(
                "not_savable",
                "Saving is switched off for this kernel.",
                hint="The administrator or the kernelspec set GpuCkptProvisioner.enabled to false.",
            )
        return why_not(
            self.parent, kwargs, kernel_capture=self.kernel_capture, logs=self.log_folder()
        )

    # -- restoring -----------------------------------------------------------------------

    def begin_restore(self) -> RestoreToken:
        """From now on the kernel counts as alive though its process may be gone.

        Called by the keeper. The restart of a kernel, its shutdown and a later
        ``begin_restore`` end the attempt: :meth:`adopt` is then refused.
        """
        self._restoring = RestoreToken()
        return self._restoring

    def end_restore(self, token: RestoreToken) -> None:
        """The attempt failed: what the process is decides again. Called by the keeper."""
        if self._restoring is token:
            self._restoring = None

    def is_wanted(self, token: RestoreToken) -> bool:
        """Whether the attempt is still the one that :meth:`adopt` would take. For the keeper."""
        return self._restoring is token

    def adopt(self, token: RestoreToken, supervisor: Supervisor) -> bool:
        """Make a restored process this kernel's. Called by the keeper.

        Returns
        -------
        bool
            False when the attempt is not wanted any more: the caller ends the process.
        """
        if not self.is_wanted(token):
            return False
        self._restoring = None
        self._loop = asyncio.get_running_loop()
        self._take(supervisor)
        return True

    def _take(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.process = supervisor.process
        self.pid = self.pgid = supervisor.pid
        self._exit_seen = False
        supervisor.add_exit_callback(self._exit_callback(supervisor))

    def _exit_callback(self, supervisor: Supervisor) -> Callable[[int], None]:
        loop = self._loop

        def called_from_a_thread(code: int) -> None:
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._exited, supervisor, code)

        return called_from_a_thread

    def _exited(self, supervisor: Supervisor, code: int) -> None:
        if supervisor is not self.supervisor or self._exit_seen:
            return
        self._exit_seen = True
        asked = self._stopping or getattr(self.parent, "shutting_down", False)
        # Code 0 is a kernel that ended itself, as on exit().
        if asked or code == 0 or self._restoring is not None or self.observer is None:
            return
        self.observer.kernel_died(self, code)

    # -- life ----------------------------------------------------------------------------

    @property
    def has_process(self) -> bool:
        """Whether there is a process, or one is being restored."""
        return self.is_coming_back() or super().has_process

    async def poll(self) -> int | None:
        """``None`` while the kernel runs or is being restored, else its exit code.

        Called by ``KernelManager.is_alive()``, so by the restarter every few seconds.
        """
        if self.is_coming_back():
            return None
        if self.supervisor is None:
            return await super().poll()
        code = self.supervisor.poll()
        if code is None:
            return None
        self._exited(self.supervisor, code)  # may begin a restore
        return None if self.is_coming_back() else code

    def is_coming_back(self) -> bool:
        """Whether a restore is under way."""
        return self._restoring is not None

    async def wait(self) -> int | None:
        """Wait for the end of the process and forget it; returns its exit code.

        Called by ``KernelManager.finish_shutdown()`` and ``kill_kernel()``.
        """
        if self.supervisor is None:
            return await super().wait()
        while await self.poll() is None:
            await asyncio.sleep(0.1)
        code = self.supervisor.wait()
        self.supervisor = self.process = None
        return code

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel's process group.

        Called by ``KernelManager.signal_kernel()``; SIGINT is the interrupt.
        """
        if self.supervisor is None:
            await super().send_signal(signum)
        elif signum == signal.SIGKILL:
            await self.kill()
        elif signum == 0:
            if self.supervisor.poll() is not None:
                raise ProcessLookupError(f"kernel {self.kernel_id} has ended")
        elif self._restoring is None and self.supervisor.poll() is None:
            if signum == signal.SIGTERM:
                self._stop_asked()
            self.supervisor.signal(signum)

    async def kill(self, restart: bool = False) -> None:
        """End the whole process tree at once; called by ``KernelManager.kill_kernel()``."""
        if self.supervisor is None:
            await super().kill(restart=restart)
            return
        self._stop_asked()
        self.supervisor.kill()

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel's process group to end; called by ``KernelManager.finish_shutdown()``."""
        if self.supervisor is None:
            await super().terminate(restart=restart)
            return
        self._stop_asked()
        if self.supervisor.poll() is None:
            self.supervisor.signal(signal.SIGTERM)

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Note that the kernel was asked to end; called by ``KernelManager.request_shutdown()``."""
        await super().shutdown_requested(restart=restart)
        km: Any = self.parent
        if self.supervisor is not None and self.supervisor.poll() is not None and km is not None:
            # A request that nobody took must not end the kernel that is started next.
            km._control_socket.close(linger=0)
            km._control_socket = None
        self._stop_asked()

    def _stop_asked(self) -> None:
        self._stopping = True
        self._restoring = None
        if self.observer is not None:
            self.observer.kernel_stopping(self)

    async def cleanup(self, restart: bool = False) -> None:
        """Give ports back and tell the keeper; called by ``KernelManager.cleanup_resources()``."""
        await super().cleanup(restart=restart)
        if self.observer is not None:
            self.observer.kernel_ended(self, restart)

    # -- persistence ---------------------------------------------------------------------

    async def get_provisioner_info(self) -> dict[str, Any]:
        """What an application needs to find this kernel again, beyond the stock provisioner's."""
        info: dict[str, Any] = await super().get_provisioner_info()
        info["supervisor_pid"] = self.supervisor.process.pid if self.supervisor else None
        info["log"] = str(self.log_path) if self.log_path else None
        return info

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """The inverse of :meth:`get_provisioner_info`.

        The supervisor belongs to the server that started it, so a kernel loaded this way is
        known, but can neither be saved nor waited for.
        """
        await super().load_provisioner_info(provisioner_info)
        log = provisioner_info.get("log")
        self.log_path = Path(log) if log else None
        self.savability = CkptError(
            "not_savable",
            "The kernel was started by another server.",
            hint="Only kernels that this server starts can be saved: start one here.",
        )
