"""The kernels of one server as their provisioners report them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from .capture.supervisor import Supervisor
from .deaths import DeathPolicy
from .errors import CkptError
from .gpus.inventory import CudaProcess
from .models import RestoredFrom
from .parked import Parked
from .provisioner import GpuCkptProvisioner
from .watch import Activity, KernelWatch, WatchListener


class WaitingProcess:
    """A restored process whose kernel manager is about to be made."""

    def __init__(
        self, supervisor: Supervisor, connection: dict[str, Any], activity: Activity
    ) -> None:
        self.supervisor = supervisor
        self.connection = connection
        self.activity = activity


class TrackedKernel:
    """One kernel that runs below a supervisor."""

    def __init__(
        self,
        provisioner: GpuCkptProvisioner,
        policy: DeathPolicy,
        make_listener: Callable[[TrackedKernel], WatchListener],
    ) -> None:
        self.provisioner = provisioner
        self.policy = policy
        #: Its user's choice of when it is saved; ``None`` until it was looked up.
        self.autosave: dict[str, Any] | None = None
        #: Hears of what the kernel does, from its start on.
        self.listener = make_listener(self)
        #: Whether its process was ended until somebody needs the kernel.
        self.is_hibernated = False
        #: Why it did not wake when somebody needed it last.
        self.wake_error: CkptError | None = None
        self.watch: KernelWatch | None = None
        #: The state that the process came out of.
        self.restored_from: RestoredFrom | None = None
        self._parked: tuple[Parked, Supervisor | None] | None = None
        self._gpu_lost: tuple[str, Supervisor | None] | None = None
        #: What its last park said of its processes.
        self.last_park: Sequence[CudaProcess] = ()

    @property
    def parked(self) -> Parked | None:
        """What it has in host memory, where its process is parked; another one never is."""
        if self._parked is None or self._parked[1] is not self.provisioner.supervisor:
            return None
        return self._parked[0]

    @parked.setter
    def parked(self, parked: Parked | None) -> None:
        self._parked = None if parked is None else (parked, self.provisioner.supervisor)

    @property
    def gpu_lost(self) -> str | None:
        """That a GPU is lost which its process uses, in words; none of another process."""
        if self._gpu_lost is None or self._gpu_lost[1] is not self.provisioner.supervisor:
            return None
        return self._gpu_lost[0]

    @gpu_lost.setter
    def gpu_lost(self, message: str) -> None:
        self._gpu_lost = message, self.provisioner.supervisor

    @property
    def parked_processes(self) -> Sequence[CudaProcess] | None:
        """What its park said of its processes; ``None``: it is not parked."""
        return None if self.parked is None else self.last_park

    @property
    def km(self) -> Any:
        """The kernel's manager."""
        return self.provisioner.parent

    @property
    def kernel_id(self) -> str:
        """The kernel's id."""
        kernel_id: str = self.provisioner.kernel_id
        return kernel_id

    @property
    def pid(self) -> int | None:
        """Process id of the kernel, ``None`` when it has ended."""
        supervisor = self.provisioner.supervisor
        return None if supervisor is None or supervisor.poll() is not None else supervisor.pid

    def last_count(self) -> int | None:
        """How far the cells were counted that this kernel ran, over all its restores, if known."""
        before = self.restored_from
        if before is not None and before.last_execution_count is None:
            return None
        counts = [before.last_execution_count if before is not None else None]
        if self.watch is not None:
            counts.append(self.watch.now.execution_count)
        return max((count for count in counts if count is not None), default=0)

    def listen(self, activity: Activity | None = None) -> KernelWatch:
        """Follow what the kernel does; ``activity`` is what it does now (default: nothing)."""
        watch = self.watch
        if watch is not None and watch.is_open and watch.ports == list(self.km.ports):
            watch.reset(activity)
        else:
            self.deafen()
            watch = self.watch = KernelWatch(self.km, activity, self.listener)
        return watch

    def deafen(self) -> None:
        """Close the socket."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None


class Tracker:
    """Implements :class:`~jupyter_gpu_ckpt.provisioner.KernelObserver` for the keeper.

    Parameters
    ----------
    make_policy
        Makes the death policy of a new kernel.
    make_listener
        Makes the listener of a new kernel.
    on_started
        Called with a kernel that runs anew, after it is tracked.
    on_died
        Called with a kernel that died though nobody asked; true when it is brought back.
    on_stopping
        Called with the id of a kernel that somebody asked to end.
    on_ended
        Called with the id of a kernel that was shut down in order.
    on_interrupted
        Called with the id of a kernel that somebody interrupts.
    """

    def __init__(
        self,
        make_policy: Callable[[], DeathPolicy],
        make_listener: Callable[[TrackedKernel], WatchListener],
        on_started: Callable[[TrackedKernel], None],
        on_died: Callable[[TrackedKernel], bool],
        on_stopping: Callable[[str], None],
        on_ended: Callable[[str], None],
        on_interrupted: Callable[[str], None],
    ) -> None:
        self._make_policy = make_policy
        self._make_listener = make_listener
        self._on_started = on_started
        self._on_died = on_died
        self._on_stopping = on_stopping
        self._on_ended = on_ended
        self._on_interrupted = on_interrupted
        self._kernels: dict[str, TrackedKernel] = {}
        self._waiting: dict[str, WaitingProcess] = {}

    def get(self, kernel_id: str) -> TrackedKernel | None:
        """The kernel of this id, if it runs below a supervisor."""
        return self._kernels.get(kernel_id)

    def __iter__(self) -> Iterator[TrackedKernel]:
        return iter(list(self._kernels.values()))

    def offer(self, kernel_id: str, process: WaitingProcess) -> None:
        """Let the next launch of this kernel adopt a restored process."""
        self._waiting[kernel_id] = process

    def withdraw(self, kernel_id: str) -> None:
        """Take back an offer that nobody took."""
        self._waiting.pop(kernel_id, None)

    def close(self) -> None:
        """Stop listening to all kernels."""
        for kernel in self:
            kernel.deafen()

    # -- KernelObserver ------------------------------------------------------------------

    def take_restored(self, kernel_id: str) -> WaitingProcess | None:
        """The restored process to adopt instead of launching."""
        return self._waiting.pop(kernel_id, None)

    def kernel_started(
        self, provisioner: GpuCkptProvisioner, restored: WaitingProcess | None
    ) -> None:
        """A process runs, a fresh one or one adopted at launch."""
        kernel = self._kernels.get(provisioner.kernel_id)
        if kernel is None or kernel.provisioner is not provisioner:
            if kernel is not None:
                kernel.deafen()
            kernel = TrackedKernel(provisioner, self._make_policy(), self._make_listener)
            self._kernels[kernel.kernel_id] = kernel
            # Jupyter Server lists the kernel a moment before it sets this, and fails without.
            kernel.km.last_activity = datetime.now(timezone.utc)
        if restored is None:
            kernel.policy.started_fresh()
            kernel.restored_from = None
        before = kernel.watch
        watch = kernel.listen(restored.activity if restored is not None else None)
        if restored is None:
            watch.expect(is_new=watch is not before)
        self._on_started(kernel)

    def kernel_watched(self, kernel_id: str) -> None:
        """The server listens to the kernel: one socket for both."""
        kernel = self._kernels.get(kernel_id)
        if kernel is not None and kernel.watch is not None:
            kernel.watch.share()

    def kernel_died(self, provisioner: GpuCkptProvisioner, code: int) -> bool:
        """The process ended though nobody asked."""
        kernel = self._kernels.get(provisioner.kernel_id)
        if kernel is None or kernel.provisioner is not provisioner:
            return False
        return self._on_died(kernel)

    def kernel_stopping(self, provisioner: GpuCkptProvisioner) -> None:
        """Somebody asked for the kernel's end."""
        self._on_stopping(provisioner.kernel_id)

    def kernel_interrupted(self, kernel_id: str) -> None:
        """Somebody interrupts the kernel."""
        self._on_interrupted(kernel_id)

    def kernel_ended(self, provisioner: GpuCkptProvisioner, restart: bool) -> None:
        """The kernel was shut down in order; ``restart``: a fresh one follows."""
        kernel = self._kernels.get(provisioner.kernel_id)
        if restart or kernel is None or kernel.provisioner is not provisioner:
            return
        del self._kernels[kernel.kernel_id]
        kernel.deafen()
        self._on_ended(kernel.kernel_id)
