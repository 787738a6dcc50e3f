"""How provisioners and the keeper of one server find and hear of each other."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from jupyter_client.provisioning import KernelProvisionerFactory

from .capture.supervisor import Supervisor

if TYPE_CHECKING:
    from .provisioner import GpuCkptProvisioner


#: Name of the provisioner's entry point.
PROVISIONER: Final = "gpu-ckpt-provisioner"


class Restored(Protocol):
    """A restored process that waits for its kernel manager to be made."""

    supervisor: Supervisor
    connection: dict[str, Any]


class RestoreToken:
    """Identity of one attempt to restore; see :meth:`.GpuCkptProvisioner.begin_restore`."""


class KernelObserver(Protocol):
    """What provisioners tell the keeper, and ask it. Called on the event loop."""

    def kernel_started(self, provisioner: GpuCkptProvisioner, restored: Any) -> None:
        """A process runs: a fresh one (``None``), or the restored one adopted at launch."""

    def kernel_died(self, provisioner: GpuCkptProvisioner, code: int) -> bool:
        """The process ended though nobody asked; true when the keeper brings it back."""

    def kernel_stopping(self, provisioner: GpuCkptProvisioner) -> None:
        """Somebody asked for the end of the kernel; a restore under way is pointless."""

    def kernel_ended(self, provisioner: GpuCkptProvisioner, restart: bool) -> None:
        """The kernel was shut down in order; ``restart`` when a fresh one follows at once."""

    def kernel_watched(self, kernel_id: str) -> None:
        """The server listens to what this kernel says, anew if it did before."""

    def kernel_interrupted(self, kernel_id: str) -> None:
        """Somebody interrupts the kernel, whether its process is there or not."""

    def take_restored(self, kernel_id: str) -> Restored | None:
        """The restored process to adopt instead of launching, if one waits for this id."""


_observers: WeakKeyDictionary[Any, KernelObserver] = WeakKeyDictionary()
_secret: WeakKeyDictionary[Any, frozenset[str]] = WeakKeyDictionary()


def observe(kernel_manager: Any, observer: KernelObserver) -> None:
    """Let ``observer`` hear of the kernels of this multi-kernel manager; the keeper calls it."""
    if kernel_manager not in _observers:
        _tell_of(kernel_manager, "start_watching_activity", "kernel_watched")
        _tell_of(kernel_manager, "interrupt_kernel", "kernel_interrupted")
    _observers[kernel_manager] = observer


def _tell_of(kernel_manager: Any, method: str, tell: str) -> None:
    """Let the observer hear of a method's calls, which have a kernel's id as first argument."""
    original: Callable[..., Any] | None = getattr(kernel_manager, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def called(kernel_id: str, *args: Any, **kwargs: Any) -> Any:
        result = original(kernel_id, *args, **kwargs)
        observer = observer_of(kernel_manager)
        if observer is not None:
            getattr(observer, tell)(kernel_id)
        return result

    setattr(kernel_manager, method, called)


def observer_of(kernel_manager: Any) -> KernelObserver | None:
    """Who observes the kernels of this multi-kernel manager; provisioners call it."""
    try:
        return _observers.get(kernel_manager)
    except TypeError:  # none, or one that cannot be referred to weakly
        return None


def keep_from_kernels(kernel_manager: Any, variables: Iterable[str]) -> None:
    """Let no kernel of this multi-kernel manager inherit these variables; the keeper calls it."""
    _secret[kernel_manager] = frozenset(variables)


def kept_from_kernels(kernel_manager: Any) -> frozenset[str]:
    """Names of environment variables that no kernel inherits; provisioners call it."""
    try:
        return _secret.get(kernel_manager, frozenset())
    except TypeError:  # none, or one that cannot be referred to weakly
        return frozenset()


def make_default(kernel_manager: Any) -> None:
    """Launch kernels with our provisioner where nobody chose one.

    Called by the keeper when the server loads the extension. A choice is a kernelspec's own,
    ``c.KernelProvisionerFactory.default_provisioner_name``, or the environment variable
    JUPYTER_DEFAULT_PROVISIONER_NAME. (A server reads only the list of extensions from the
    configuration that a package ships, so this cannot be said there.)
    """
    factory = KernelProvisionerFactory.instance(parent=kernel_manager)
    chosen = "default_provisioner_name" in kernel_manager.config.KernelProvisionerFactory
    if not chosen and factory.default_provisioner_name_env not in os.environ:
        factory.default_provisioner_name = PROVISIONER
