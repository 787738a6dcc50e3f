"""How the command line fails: one line of what, one of what to do, an exit code."""

from __future__ import annotations

from typing import IO, Any

import click

from ..errors import CkptError


class CliError(click.ClickException):
    """A failure to tell the user about.

    Parameters
    ----------
    message
        What did not work.
    reason
        For programs: a reason of the REST API, or ``no_server``, ``unreachable``,
        ``ambiguous``, which only the command line has.
    hint, details
        What to do about it; technical text. ``None`` for nothing.
    exit_code
        1 when it failed, 2 when the command line has to be written differently; kept as
        ``code``.
    """

    def __init__(
        self,
        message: str,
        reason: str,
        *,
        hint: str | None = None,
        details: str | None = None,
        exit_code: int = 1,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.hint = hint
        self.details = details
        self.code = exit_code

    @classmethod
    def of(cls, error: CkptError) -> CliError:
        """The same failure, raised by this package's own code."""
        return cls(error.message, error.reason, hint=error.hint, details=error.details)

    def as_dict(self) -> dict[str, str | None]:
        """What ``--json`` prints."""
        return {
            "message": self.message,
            "reason": self.reason,
            "hint": self.hint,
            "details": self.details,
        }

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it to stderr; called by :func:`jupyter_gpu_ckpt.cli.main`."""
        click.echo(f"Error: {self.message}", file=file, err=file is None)
        if self.hint:
            click.echo(f"Hint: {self.hint}", file=file, err=file is None)
        if self.details:
            for line in self.details.splitlines():
                click.echo(f"  {line}", file=file, err=file is None)
