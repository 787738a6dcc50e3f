"""``drill``: how long it takes until a notebook's kernel serves again after a failure.

All of it happens in kernels that the drill starts for itself: the notebook's own kernel, its
session and its states are left alone.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import msgspec
import psutil
from rich.console import Console

from ..models import AutoSaves, Operation, State
from ..moments import read_moment
from . import drill_report, follow, show
from .client import Server
from .drill_report import Check, Recovery, Report
from .errors import CliError
from .kernel import OwnKernel
from .options import server_options, timeout_option
from .select import Target, api_path

#: Seconds within which the server has to begin with the restore of a kernel that was killed.
DETECTION_TIMEOUT: Final = 30.0
#: Seconds between two looks at the restore. Its own times are exact, whatever this is.
_POLL: Final = 0.02
#: Seconds for an expression, and for what is left of the drill to go away.
_CHECK_TIMEOUT: Final = 300.0
_CLEAN_UP_TIMEOUT: Final = 60.0
#: Which phases of a restore belong to which row.
_ROWS: Final = {"read": "reading", "placement": "checking", "restore": "restoring"}


class _Notebook(msgspec.Struct):
    """A notebook as the contents API has it, as far as it matters here."""

    path: str
    kernel: str
    cells: list[dict[str, Any]]


@click.command()
@click.argument("notebook")
@click.option("--check", "checks", multiple=True, metavar="EXPR", help="Must stay equal.")
@click.option("--no-rerun", is_flag=True, help="Compare with the first run, not with another one.")
@click.option(
    "--report",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the JSON there too.",
)
@timeout_option("How long a run of the notebook, the save and the recovery may take each.")
@server_options
def drill(
    target: Target,
    as_json: bool,
    notebook: str,
    checks: tuple[str, ...],
    no_rerun: bool,
    file: Path | None,
    timeout: float,
) -> None:
    """Measure how soon NOTEBOOK's kernel would serve again after a failure.

    Runs the notebook from the top in a kernel of the drill's own, saves that, kills its processes
    and waits for its recovery. What the notebook does to files and services it does once more.
    Exit code 1: a --check differs, or something failed.
    """
    found = _Drill(target.one(), checks, timeout).carry_out(notebook, rerun=not no_rerun)
    if file is not None:
        try:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        except OSError as error:
            message = f"The report cannot be written: {error.strerror}: {file}"
            raise CliError(message, "bad_request") from None
    if as_json:
        show.as_json(found)
    else:
        drill_report.show_report(found)
    if not found.same:
        raise click.exceptions.Exit(1)


class _Drill:
    """One drill in one server."""

    def __init__(self, server: Server, checks: Sequence[str], timeout: float) -> None:
        self._server = server
        self._checks = checks
        self._timeout = timeout
        self._console = Console(stderr=True)

    def carry_out(self, path: str, *, rerun: bool) -> Report:
        """Run, save, kill, recover, compare; nothing of it stays."""
        book = self._read(path)
        with _signals_interrupt():
            began = time.monotonic()
            with self._kernel(book) as kernel:
                self._run(kernel, book)
                run_seconds = time.monotonic() - began
                before = self._evaluate(kernel)
                saved = self._save(kernel)
                recovery = self._recover(kernel)
                after = self._evaluate(kernel)
            again = run_seconds
            if rerun:
                began = time.monotonic()
                with self._kernel(book) as kernel:
                    self._run(kernel, book)
                    again = time.monotonic() - began
        assert saved.result is not None
        compared = [
            Check(expression, old, new, old == new)
            for expression, old, new in zip(self._checks, before, after, strict=True)
        ]
        return Report(
            path=book.path,
            cells=len(book.cells),
            state_bytes=saved.result.size,
            save_seconds=saved.result.seconds,
            frozen_seconds=saved.result.frozen_seconds or 0.0,
            run_seconds=round(run_seconds, 3),
            recovery=recovery,
            rerun_seconds=round(again, 3),
            rerun_measured=rerun,
            checks=compared,
            same=all(check.same for check in compared),
        )

    def _read(self, path: str) -> _Notebook:
        path = api_path(path, self._server.root_dir)
        try:
            answer = self._server.jupyter("GET", f"contents/{quote(path)}")
        except CliError as error:
            if error.reason not in ("no_server", "unknown_path"):
                raise
            raise CliError(f"The server has no notebook {path}.", "unknown_path") from None
        content = self._server.decode(dict[str, Any], answer).get("content")
        if not isinstance(content, dict) or "cells" not in content:
            raise CliError(f"{path} is not a notebook.", "bad_request", exit_code=2)
        spec = content.get("metadata", {}).get("kernelspec", {}).get("name")
        if not spec:
            raise CliError(
                f"{path} does not say which kernel it wants.",
                "bad_request",
                hint="Open it once, choose a kernel, and save it.",
            )
        cells = [c for c in content["cells"] if c["cell_type"] == "code" and _source(c).strip()]
        return _Notebook(path, spec, [c for c in cells if "skip-execution" not in _tags(c)])

    @contextlib.contextmanager
    def _kernel(self, book: _Notebook) -> Iterator[OwnKernel]:
        """A kernel for the block; nothing of it is left afterwards, whatever happens."""
        self._say("Starting a kernel")
        kernel = OwnKernel(self._server, book.kernel, book.path)
        try:
            # The states are the drill's business here, as far as the administrator lets it.
            with contextlib.suppress(CliError):
                choice = {"enabled": False}
                self._server.put(AutoSaves, "kernels", kernel.id, "autosave", body=choice)
            yield kernel
        finally:
            # Ctrl-C once more must not keep the rest from being tidied up; a third one does.
            with follow.Interrupt().installed():
                self._clean_up(kernel)

    def _clean_up(self, kernel: OwnKernel) -> None:
        self._say("Tidying up")
        try:
            self._end_operations(kernel)
            # Before the kernel ends, so that not even a record of it is left.
            self._delete_states(kernel)
        finally:
            kernel.end()
        self._delete_states(kernel)

    def _end_operations(self, kernel: OwnKernel) -> None:
        deadline = time.monotonic() + _CLEAN_UP_TIMEOUT
        while running := [
            o for o in self._operations(kernel) if o.status in ("pending", "running")
        ]:
            if time.monotonic() > deadline:
                raise CliError("The server is still busy with the drill's kernel.", "timeout")
            # What cannot be cancelled any more ends by itself in a moment.
            with contextlib.suppress(CliError):
                self._server.delete("operations", running[0].id)
            time.sleep(0.1)

    def _delete_states(self, kernel: OwnKernel) -> None:
        for state in self._server.get(list[State], "states", kernel=kernel.id):
            self._server.delete("states", state.id)

    def _operations(self, kernel: OwnKernel) -> list[Operation]:
        found = self._server.get(list[Operation], "operations")
        return [operation for operation in found if operation.kernel_id == kernel.id]

    def _run(self, kernel: OwnKernel, book: _Notebook) -> None:
        """Run the notebook from the top."""
        deadline = time.monotonic() + self._timeout
        for number, cell in enumerate(book.cells, 1):
            self._say(f"Running the notebook: cell {number} of {len(book.cells)}")
            left = max(0.1, deadline - time.monotonic())
            came = kernel.run(_source(cell), timeout=left, history=True)
            if came.error is not None and "raises-exception" not in _tags(cell):
                raise CliError(
                    f"The code cell {number} of {book.path} failed: {came.error}",
                    "bad_request",
                    hint="The notebook must run from the top without help.",
                )

    def _evaluate(self, kernel: OwnKernel) -> list[str]:
        printed = []
        for expression in self._checks:
            came = kernel.run(expression, timeout=_CHECK_TIMEOUT)
            if came.error is not None:
                message = f"--check '{expression}' failed: {came.error}"
                raise CliError(message, "bad_request")
            printed.append(came.text.rstrip("\n"))
        return printed

    def _save(self, kernel: OwnKernel) -> Operation:
        self._say("Saving")

        def start() -> Operation:
            body = {"label": "drill"}
            return self._server.post(Operation, "kernels", kernel.id, "save", body=body)

        return follow.run(self._server, start, wait=True, timeout=self._timeout)

    def _recover(self, kernel: OwnKernel) -> Recovery:
        self._say("Killing the kernel, and waiting for it to serve again")
        killed, began = time.time(), time.monotonic()
        _kill(kernel.id)
        operation = self._restored(kernel, began)
        reply = kernel.run("", timeout=max(0.1, began + self._timeout - time.monotonic()))
        total = time.monotonic() - began
        if reply.error is not None:
            raise CliError(f"The kernel does not work: {reply.error}", "restore_failed")
        # The server's clock is this machine's: it killed a process of its own.
        started = _moment(operation.started) - killed
        steps = list(operation.phases.items())
        ends = [*(after for _, after in steps[1:]), total - started]
        lengths = {name: end - at for (name, at), end in zip(steps, ends, strict=True)}
        seconds = {row: max(0.0, round(lengths.get(p, 0.0), 3)) for row, p in _ROWS.items()}
        detection = max(0.0, round(started + (steps[0][1] if steps else 0.0), 3))
        reply_seconds = round(total - detection - sum(seconds.values()), 3)
        return Recovery(
            detection=detection, **seconds, first_reply=reply_seconds, total=round(total, 3)
        )

    def _restored(self, kernel: OwnKernel, began: float) -> Operation:
        """Wait for the end of the restore that the death of the kernel brings about."""
        while True:
            found = [o for o in self._operations(kernel) if o.kind == "restore"]
            waited = time.monotonic() - began
            if found and found[0].status == "done":
                return found[0]
            if found and found[0].status in ("failed", "cancelled"):
                error = found[0].error
                why = error.message if error is not None else "It was cancelled."
                raise CliError(
                    f"The kernel did not come back. {why}",
                    error.reason if error is not None else "cancelled",
                    details=error.details if error is not None else None,
                )
            if not found and waited > DETECTION_TIMEOUT:
                raise CliError(
                    f"The server did not begin to restore the kernel within {DETECTION_TIMEOUT:g}"
                    " s.",
                    "timeout",
                    hint="Is c.GpuCkpt.restore_on_death off? Then it starts kernels empty.",
                )
            if waited > self._timeout:
                raise CliError("The restore is not over yet.", "timeout")
            time.sleep(_POLL)

    def _say(self, what: str) -> None:
        if self._console.is_terminal:
            self._console.print(f"{what}...", markup=False, highlight=False)


def _moment(iso: str) -> float:
    return read_moment(iso).timestamp()


def _kill(kernel_id: str) -> None:
    """SIGKILL the processes of a kernel, which its connection file gives away."""
    victims: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        line = process.info["cmdline"] or []
        if any(f"kernel-{kernel_id}.json" in word for word in line) and not _supervises(line):
            with contextlib.suppress(psutil.NoSuchProcess):
                victims += [process, *process.children(recursive=True)]
    if not victims:
        raise CliError(
            "The processes of the kernel are not on this machine.",
            "unreachable",
            hint="Run the drill where the server runs, in a terminal of JupyterLab, say.",
        )
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _supervises(line: Sequence[str]) -> bool:
    return Path(line[0]).name == "kernel-capture"


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and the end of the terminal tidy up as Ctrl-C does."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(source) if isinstance(source, list) else str(source)


def _tags(cell: dict[str, Any]) -> list[str]:
    return list(cell.get("metadata", {}).get("tags", []))
