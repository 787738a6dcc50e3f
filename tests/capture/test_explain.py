"""CRIU's words in a user's words. The lines are CRIU 4.2.1's own."""

from __future__ import annotations

from typing import Literal

import pytest

from jupyter_gpu_ckpt.capture.explain import explain

_CASES: list[tuple[Literal["save", "restore"], str, str, str]] = [
    (
        "save",
        "Error (criu/sk-unix.c:881): unix: Can't dump half of stream unix connection. "
        "name: (null); peer name: /run/postgresql/.s.PGSQL.5432",
        "not_savable",
        "/run/postgresql/.s.PGSQL.5432",
    ),
    (
        "save",
        "Error (criu/files-ext.c:94): Can't dump file 61 of that type [20660] (chr 195:255)",
        "not_savable",
        "GPU",
    ),
    (
        "save",
        "Error (criu/files-ext.c:94): Can't dump file 61 of that type [20660] (chr 10:232)",
        "not_savable",
        "of a kind",
    ),
    (
        "save",
        "Error (criu/files-ext.c:94): Can't dump file 61 of that type [600] "
        "(anon anon_inode:[perf_event])",
        "not_savable",
        "perf_event",
    ),
    (
        "save",
        "Error (criu/tty.c:410): tty: Found slave peer index 0 without correspond master peer",
        "not_savable",
        "terminal",
    ),
    (
        "save",
        "Error (criu/namespaces.c:460): Can't dump nested pid namespace for 23851",
        "not_savable",
        "sandbox",
    ),
    (
        "save",
        "Error (criu/cr-dump.c:389): Can't get rlimit 0: Operation not permitted",
        "not_savable",
        "another user",
    ),
    (
        "save",
        "Error (criu/cr-dump.c:478): Task 1 with SysVIPC shmem map @7f3f8f5d8000 doesn't live in "
        "IPC ns",
        "not_savable",
        "System V",
    ),
    (
        "save",
        "Error (criu/files-reg.c:1790): Can't lookup mount=21 for fd=61 path=/queue",
        "not_savable",
        "file system",
    ),
    (
        "save",
        "Error (criu/sk-inet.c:137): inet: Unsupported proto 262 for socket 50c55",
        "not_savable",
        "network socket",
    ),
    (
        "save",
        "Error (criu/files-reg.c:1031): Can't dump ghost file /home/a/big of 73400320 size, "
        "increase limit",
        "not_savable",
        "too large",
    ),
    (
        "save",
        "Error (criu/files-reg.c:1165): trim failed: @link_remap.135@",
        "not_savable",
        "another name",
    ),
    (
        "save",
        "Error (criu/files-reg.c:1184): Can't link remap to /dev/shm/sem.I: File exists",
        "not_savable",
        "sem.I",
    ),
    ("save", "Error (criu/pagemap.c:1): write: No space left on device", "no_space", "space"),
    (
        "restore",
        "Error (criu/files-reg.c:2255): File home/a/lib.so has bad size 10 (expect 12)",
        "not_restorable",
        "/home/a/lib.so",
    ),
    (
        "restore",
        " 20001: Error (criu/files-reg.c:2311): Can't open file home/a/data on restore: "
        "No such file or directory",
        "not_restorable",
        "home/a/data",
    ),
    (
        "restore",
        "Error (criu/cr-restore.c:1234): Can't fork for 4711: File exists",
        "pid_in_use",
        "number",
    ),
    (
        "restore",
        "pie: 9: Error (criu/pie/restorer.c:2147): Unable to create a thread: -17",
        "pid_in_use",
        "number",
    ),
    (
        "restore",
        "Error (criu/sk-inet.c:1070): inet: Can't bind inet socket (id 93): Address in use",
        "not_restorable",
        "port",
    ),
    (
        "restore",
        "Error (criu/pstree.c:969): Can't restore sub-task in NS (cflags 40000000)",
        "not_restorable",
        "sandbox",
    ),
]


@pytest.mark.parametrize(("doing", "line", "reason", "words"), _CASES)
def test_lines_of_criu(
    doing: Literal["save", "restore"], line: str, reason: str, words: str
) -> None:
    lines = ["Error (criu/cr-dump.c:1545): Dump files (pid: 13646) failed with -1", line]
    error = explain({"reason": "criu_failed", "message": "", "criu_errors": lines}, doing=doing)
    assert (error.reason, error.hint is not None) == (reason, True)
    assert words in error.message
    assert "{" not in error.message
    assert "criu" not in error.message.lower()
    assert line in str(error.details)


def test_unknown_lines_are_in_the_details() -> None:
    event = {"reason": "criu_failed", "message": "Status 1.", "criu_errors": ["Error: odd"]}
    save = explain(event, doing="save")
    assert save.reason == "dump_failed"
    assert "runs on" in save.message
    assert save.details == "Status 1.\nError: odd"
    assert explain(event, doing="restore").reason == "restore_failed"


@pytest.mark.parametrize("doing", ["save", "restore"])
@pytest.mark.parametrize(
    ("reason", "ours"),
    [
        ("no_criu", "cannot_capture"),
        ("no_capability", "cannot_capture"),
        ("not_yours", "not_savable"),
        ("no_process", "not_savable"),
        ("timeout", "timeout"),
        ("cancelled", "cancelled"),
        ("no_space", "no_space"),
        ("internal", None),
        ("usage", None),
        ("something new", None),
    ],
)
def test_reasons_of_kernel_capture(
    doing: Literal["save", "restore"], reason: str, ours: str | None
) -> None:
    error = explain({"reason": reason, "message": "Technical."}, doing=doing)
    failed = "dump_failed" if doing == "save" else "restore_failed"
    expected = ours or failed
    if doing == "restore" and expected == "not_savable":
        expected = "not_restorable"
    assert error.reason == expected
    assert error.details == "Technical."


def test_taken_pids_are_named() -> None:
    pids = [{"pid": 7, "comm": "sshd"}, {"pid": 8}, "odd", {"comm": "no pid"}]
    error = explain({"reason": "pid_in_use", "pids": pids}, doing="restore")
    assert error.reason == "pid_in_use"
    assert "7 (sshd), 8." in error.message
    assert explain({"reason": "pid_in_use", "pids": None}, doing="restore").reason == "pid_in_use"
    many = [{"pid": pid} for pid in range(1, 7)]
    for pids, end in ((many[:5], "1, 2, 3, 4, 5."), (many, "1, 2, 3, 4, 5 and others.")):
        message = explain({"reason": "pid_in_use", "pids": pids}, doing="restore").message
        assert message.endswith(f": {end}")


def test_odd_events_do_no_harm() -> None:
    for event in ({}, {"reason": None, "criu_errors": None}, {"reason": 5, "message": 7}):
        assert explain(event, doing="save").reason == "dump_failed"
