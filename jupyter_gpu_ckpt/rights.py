"""What works with the rights that a server has, and what more of them would add."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from .capture.protocol import Probe
from .models import Rights, RightsRow

#: Without one of these nothing can be captured.
NEEDED: Final = ("CHECKPOINT_RESTORE", "NET_ADMIN", "SETPCAP")


class _Row(NamedTuple):
    """What works in a row, and what this row adds to the one before it."""

    works: str
    adds: str
    takes: tuple[str, ...] = ()


#: From the least to the most, as in docs/install.md; tests/setup/test_least_privilege.py tries it.
_ROWS: Final[dict[RightsRow, _Row]] = {
    "none": _Row("Kernels run as ever. None can be saved or restored.", ""),
    "minimal": _Row(
        "Kernels are saved, and restored in their own place, after a death and on another node.",
        "kernels can be saved and restored",
        NEEDED,
    ),
    "sys_ptrace": _Row(
        "Kernels are saved, also where kernel.yama.ptrace_scope is 1, and restored in their own "
        "place, after a death and on another node.",
        "saving where kernel.yama.ptrace_scope is 1",
        ("SYS_PTRACE",),
    ),
    "sys_admin": _Row(
        "Kernels are saved, also with processes that have a seccomp filter of their own, and "
        "restored, also as a second kernel and where their process numbers are taken.",
        "a second kernel of a state, states whose process numbers are taken (PID namespaces), and "
        "kernels with processes that have a seccomp filter of their own",
        ("SYS_ADMIN",),
    ),
    "root": _Row(
        "Everything works, and after a move the monotonic clock goes on evenly.",
        "a monotonic clock that goes on evenly after a move (time namespaces)",
    ),
}


def rights(probe: Probe) -> Rights:
    """The row of the table that a server is in, and what the next one would add.

    Parameters
    ----------
    probe
        From :meth:`.native.KernelCapture.probe`.
    """
    capabilities = msgspec.structs.asdict(probe.capabilities)
    have = {name.upper() for name, has in capabilities.items() if has}
    row = _row(probe, have)
    works = _ROWS[row].works
    following = dict(pairwise(_ROWS)).get(row)
    if following is None or not _ROWS[following].takes:  # no capability leads there
        return Rights(row=row, works=works, missing=[], adds=None)
    more = _ROWS[following]
    missing = [name for name in more.takes if name not in have]
    return Rights(row=row, works=works, missing=missing, adds=more.adds)


def _row(probe: Probe, have: set[str]) -> RightsRow:
    # SYS_ADMIN includes what CHECKPOINT_RESTORE allows.
    if not have.issuperset(NEEDED[1:]) or not have & {NEEDED[0], "SYS_ADMIN"}:
        return "none"
    if probe.time_namespaces:
        return "root"
    if "SYS_ADMIN" in have:
        return "sys_admin"
    return "sys_ptrace" if "SYS_PTRACE" in have else "minimal"
