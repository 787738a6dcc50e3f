"""The command line as a user runs it: a process of its own, in a home."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from typing import Any

import pexpect

from tests.harness.server import Home

PROGRAM = ("jupyter", "gpu-ckpt")


class Shell:
    """A shell of one user.

    Parameters
    ----------
    home
        Whose home; its running servers are the ones that are found.
    environment
        Variables on top of a fresh login's.
    """

    def __init__(self, home: Home, **environment: str) -> None:
        self.home = home
        self.environment = {**home.environment(), **environment}

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run one command with its output in pipes; fail unless it ends with `code`."""
        done = subprocess.run(
            [*PROGRAM, *arguments],
            env=self.environment,
            cwd=self.home.notebooks,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
        )
        said = f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == code, said
        assert "Traceback" not in done.stderr, said
        return done

    def attempt(self, *arguments: str) -> subprocess.CompletedProcess[str] | None:
        """Run one command; return ``None`` unless it works."""
        try:
            return self.run(*arguments)
        except AssertionError:
            return None

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Run one command with ``--json``; return what it printed."""
        return json.loads(self.run(*arguments, "--json", code=code).stdout)

    def error(self, *arguments: str, code: int = 1) -> str:
        """What a command that must fail says on stderr; it says nothing on stdout."""
        done = self.run(*arguments, code=code)
        assert done.stdout == ""
        return done.stderr

    def into(self, reader: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one command with its output piped into the program `reader`."""
        line = f"{shlex.join([*PROGRAM, *arguments])} | {reader}"
        return subprocess.run(
            ["sh", "-c", line], env=self.environment, capture_output=True, text=True, timeout=90
        )

    def terminal(self, *arguments: str, columns: int = 100) -> pexpect.spawn[str]:
        """Run one command in a terminal, with a terminal's signals whatever the tests ignore."""
        return pexpect.spawn(
            PROGRAM[0],
            [*PROGRAM[1:], *arguments],
            env={**self.environment, "TERM": "xterm-256color"},
            cwd=str(self.home.notebooks),
            encoding="utf-8",
            dimensions=(40, columns),
            timeout=60,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
