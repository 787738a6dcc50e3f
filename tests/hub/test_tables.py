"""Tables of what has happened lately: what users write into their records hides no other user."""

from __future__ import annotations

import pytest

from jupyter_gpu_ckpt.hub.service_records import FailureRow, StateRow, StopRow, UserReport
from jupyter_gpu_ckpt.hub.service_tables import tables

#: 2026-01-02T12:00:00Z
NOW = 1767355200.0


def report(user: str, times: list[str]) -> UserReport:
    """A user with a failure, a stop and a saved state at each of these times."""
    return UserReport(
        user=user,
        failures=[
            FailureRow(
                kernel_id=f"kernel-{number}", at=at, since=at, cause="idle", reason="over_quota",
                message="It is full.",
            )
            for number, at in enumerate(times)
        ],
        stops=[
            StopRow(at=at, seconds=1.0, kernels=1, saved=1, server=f"server-{number}")
            for number, at in enumerate(times)
        ],
        states=[
            StateRow(id=f"s{number}", kernel_id="kernel", created=at, reason="shutdown")
            for number, at in enumerate(times)
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    "when",
    ["9999-12-31T23:59:59Z", "9999-12-31T23:59:59-14:00", "2026-01-02T11:59:59Z", "0001-01-01", ""],
)
def test_nobody_fills_a_table_for_all(when: str) -> None:
    reports = [report("mallory", [when] * 200), report("anna", ["2026-01-02T11:00:00Z"])]
    for table in tables(reports, NOW):
        users = [user for user, _ in table.rows]
        assert users.count("anna") == 1, table.id
        assert len(users) <= 11


def test_rows_are_in_the_order_of_time_whatever_its_zone() -> None:
    times = {
        "anna": "2026-01-02T20:00:00+10:00", "bert": "2026-01-02T11:00:00Z",
        "carl": "2026-01-02T08:30:00-03:00", "dora": "2026-01-03T11:00:00Z",  # her clock is ahead
        "erik": "2026-01-03T13:00:00Z",
    }  # fmt: skip
    for table in tables([report(user, [when]) for user, when in times.items()], NOW):
        assert [user for user, _ in table.rows] == ["dora", "carl", "bert", "anna"], table.id
