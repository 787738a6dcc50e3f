"""The one error type that every layer raises and every face (REST, CLI, UI) shows."""

from __future__ import annotations

from typing import Final

#: HTTP status for each reason a REST client can see. Reasons are stable: clients may match on them.
STATUS: Final[dict[str, int]] = {
    "bad_request": 400,
    "forbidden": 403,
    "unknown_kernel": 404,
    "unknown_state": 404,
    "unknown_operation": 404,
    "unknown_path": 404,
    "busy": 409,
    "cancelled": 409,
    "not_savable": 422,
    "not_restorable": 422,
    "pid_in_use": 422,
    "state_damaged": 422,
    "key_missing": 422,
    "wrong_key": 422,
    "dump_failed": 500,
    "restore_failed": 500,
    "internal": 500,
    "cannot_capture": 503,
    "store_unavailable": 503,
    "timeout": 504,
    "no_space": 507,
    "over_quota": 507,
}


class CkptError(Exception):
    """Something went wrong in a way the user should be told.

    Parameters
    ----------
    reason
        One of the keys of :data:`STATUS`; stable, for programs.
    message
        One or two sentences in a user's words: what did not work.
    hint
        What to do about it, or ``None``.
    details
        Technical text for a "details" fold (CRIU's own lines, say), or ``None``.
        Never holds memory contents, environment values or keys.
    """

    def __init__(
        self, reason: str, message: str, *, hint: str | None = None, details: str | None = None
    ) -> None:
        if reason not in STATUS:
            raise ValueError(f"unknown error reason {reason!r}")
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.hint = hint
        self.details = details

    @property
    def status(self) -> int:
        """HTTP status code for this error."""
        return STATUS[self.reason]

    def in_a_line(self) -> str:
        """What a log says of it: what, what to do, and where (the first line of the details)."""
        line = " ".join(part for part in (self.message, self.hint) if part)
        where = (self.details or "").partition("\n")[0]
        return f"{line} ({where})" if where else line

    def as_dict(self) -> dict[str, str | None]:
        """The JSON body that REST answers and operations carry."""
        return {
            "message": self.message,
            "reason": self.reason,
            "hint": self.hint,
            "details": self.details,
        }
