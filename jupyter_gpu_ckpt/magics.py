"""The kernel's side: ``%load_ext jupyter_gpu_ckpt`` in an IPython kernel.

Gives ``%save_state``, ``%states`` and ``%autosave_state``, and calls the callbacks of
:mod:`.hooks`. Answers of the server arrive between two cells and change what the magic showed.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from pathlib import Path
from typing import Any, Final

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.display import display, update_display

from . import durations, hooks
from .refresh import MARK
from .talk import COMM_ID

_SECONDS: Final = {"idle", "interval", "long_cell", "hibernate", "park"}
_SWITCHES: Final = {
    "shutdown": "before_shutdown",
    "preemption": "before_preemption",
    "cull": "before_cull",
}


class Server:
    """The kernel's line to its server.

    Parameters
    ----------
    shell
        The IPython shell of the kernel.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        import comm

        self._comm = comm.create_comm(target_name=COMM_ID, comm_id=COMM_ID, primary=False)
        comm.get_comm_manager().register_comm(self._comm)
        self._comm.on_msg(self._heard)
        self._shell = shell
        self._process = _process()
        self._failed: list[str] = []
        hooks.on_before_save_added(self._hello)
        shell.events.register("pre_execute", self._before_execution)
        shell.events.register("pre_run_cell", self._report)
        self._hello()

    def ask(self, what: str, waiting: str, **more: Any) -> None:
        """Ask for something, and show the answer where ``waiting`` is shown until then."""
        number = uuid.uuid4().hex
        display(_text(waiting), raw=True, display_id=number)  # type: ignore[no-untyped-call]
        self._comm.send({"ask": what, "id": number, **more})

    def _hello(self) -> None:
        self._comm.send({"ask": "hello", "hooks": hooks.has_before_save()})

    def _heard(self, msg: dict[str, Any]) -> None:
        data = msg["content"]["data"]
        if "answer" in data:
            text = _text(data["text"])
            update_display(text, raw=True, display_id=data["answer"])  # type: ignore[no-untyped-call]
        elif "before_save" in data:
            failed = hooks.run_before_save()
            self._failed += failed
            self._comm.send({"ask": "ready", "id": data["before_save"], "failed": len(failed)})

    def _before_execution(self) -> None:
        """Look whether the process came out of a state; called before everything it executes."""
        request: dict[str, Any] = self._shell.get_parent()  # type: ignore[attr-defined]
        # The server's own first request sets the environment, and calls this then.
        if not str(request.get("header", {}).get("msg_id", "")).startswith(COMM_ID):
            self.restored()

    def restored(self) -> None:
        """Call the callbacks if the process came out of a state; the server asks for that."""
        process = _process()
        if process != self._process:
            self._process = process
            self._hello()
            self._failed += hooks.run_after_restore()

    def _report(self, *_: Any) -> None:
        """Show which callbacks failed, where the user looks."""
        for text in self._failed:
            print(f"A callback for saves and restores failed:\n{text}", file=sys.stderr)
        self._failed.clear()


@magics_class
class StateMagics(Magics):
    """Line magics that ask the server."""

    def __init__(self, shell: InteractiveShell, server: Server) -> None:
        super().__init__(shell)
        self._server = server

    @line_magic
    def save_state(self, line: str) -> None:
        """Save this kernel's state: ``%save_state [label]``.

        The save begins once the cell has ended, or at once where it goes on for longer than a
        moment; before_save callbacks are called first.
        """
        for text in hooks.run_before_save():
            print(f"A callback for saves failed:\n{text}", file=sys.stderr)
        self._server.ask("save", "Saving the kernel's state…", label=line.strip() or None)

    @line_magic
    def states(self, line: str) -> None:
        """List the saved states of this kernel: ``%states``."""
        if line.strip():
            raise UsageError("%states takes no arguments.")
        self._server.ask("states", "Asking for the states…")

    @line_magic
    def autosave_state(self, line: str) -> None:
        """See or change when this kernel is saved automatically.

        ``%autosave_state`` shows it; ``%autosave_state idle=10m interval=30m long_cell=off``
        changes it (s, m, h); ``shutdown=on|off`` and ``cull=on|off`` say whether it is saved
        before the server stops and before it is culled; ``off`` leaves the kernel alone, ``on``
        takes that back, ``default`` takes back all that was chosen for this kernel.
        """
        change: dict[str, Any] = {}
        reset = False
        for word in line.split():
            if word == "default":
                reset = True
            elif word in ("on", "off"):
                change["enabled"] = word == "on"
            else:
                change.update([_setting(word)])
        self._server.ask("autosave", "Asking the server…", set=change, reset=reset)


def _setting(word: str) -> tuple[str, float | bool]:
    """``idle=10m`` as name and value."""
    name, _, value = word.partition("=")
    if name in _SWITCHES and value in ("on", "off"):
        return _SWITCHES[name], value == "on"
    if name in _SECONDS:
        with contextlib.suppress(ValueError):
            return name, durations.seconds(value)
    raise UsageError(
        f"%autosave_state does not understand {word!r}. Examples: idle=10m, interval=1h, "
        "long_cell=off, shutdown=off, preemption=off, cull=on, off, on, default."
    )


def load(shell: InteractiveShell) -> None:
    """Register the magics; ``%load_ext`` calls it, once more for ``%reload_ext``.

    Raises
    ------
    UsageError
        The shell is not a Jupyter kernel.
    """
    if getattr(shell, "kernel", None) is None:
        raise UsageError("jupyter_gpu_ckpt can be loaded in a Jupyter kernel only.")
    server = getattr(shell, MARK, None)
    if server is None:
        server = Server(shell)
        setattr(shell, MARK, server)
    shell.register_magics(StateMagics(shell, server))


def _text(text: str) -> dict[str, str]:
    return {"text/plain": text}


def _process() -> tuple[str, str]:
    """What changes when the kernel is restored: the boot, and when the process was made."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return Path("/proc/sys/kernel/random/boot_id").read_text(), fields[19]
    except OSError:
        return "", ""
