"""`.ci/test` passes only where all that it runs is known to have passed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.node import REPOSITORY

#: The programs that the sections run; in `tests` they say so, and that is all.
PROGRAMS = ("ruff", "mypy", "cppcheck", "jlpm", "meson", "pytest")
#: Where `.ci/test` notes the verdicts, from a program that it runs.
FOLDER = '"$TMPDIR"/tmp.*'


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    """A folder with `.ci/test` in which every program passes."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "test", tmp_path / ".ci" / "test")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for folder in ("labextension", "temporary"):
        (tmp_path / folder).mkdir()
    for name in PROGRAMS:
        program(tmp_path, name, f"echo {name} has run")
    return tmp_path


def program(tests: Path, name: str, does: str) -> None:
    path = tests / ".venv" / "bin" / name
    path.write_text(f"#!/bin/bash\n{does}\n")
    path.chmod(0o755)


def run(tests: Path, *parts: str) -> tuple[int, str]:
    done = subprocess.run(
        [tests / ".ci" / "test", *parts],
        env={**os.environ, "TMPDIR": str(tests / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_it_passes_where_all_sections_pass(tests: Path) -> None:
    code, said = run(tests)
    assert code == 0, said
    assert said.count(" passed ") == 8
    assert all(f"{name} has run" in said for name in PROGRAMS)
    assert list((tests / "temporary").iterdir()) == []
    code, said = run(tests, "front-end", "python", "python")
    assert (code, said.count(" passed ")) == (0, 2), said
    code, said = run(tests, "no-such-part")
    assert code == 2 and "no such part" in said


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_fails_where_one_fails(tests: Path, name: str) -> None:
    program(tests, name, "exit 3")
    code, said = run(tests)
    assert code == 1, said
    assert "FAILED" in said and "pytest" in said


@pytest.mark.parametrize(
    "parts",
    [("lint", "native", "front-end"), ("lint", "native", "front-end", "python")],
    ids=["in turn", "beside others"],
)
def test_a_verdict_that_cannot_be_noted_is_none(tests: Path, parts: tuple[str, ...]) -> None:
    """As on a disk that is full for a while; and then where all verdicts are gone."""
    program(tests, "meson", f"cd {FOLDER} && mv table kept && mkdir table; exit 1")
    back = "rmdir table && mv kept table"
    program(tests, "jlpm", f"cd {FOLDER}; if [ -e kept ]; then {back}; fi")
    code, said = run(tests, *parts)
    assert code == 1, said
    assert "jest         passed" in said and "meson  " not in said
    program(tests, "meson", f"rm {FOLDER}/table")
    program(tests, "jlpm", "exit 0")
    code, said = run(tests, *parts)
    assert code == 1, said


def test_what_runs_beside_the_tests_may_not_be_killed(tests: Path) -> None:
    # The shell that runs the others one after the other is the parent of the first of them.
    program(tests, "ruff", "kill -9 $PPID")
    code, said = run(tests)
    assert code == 1, said
    assert "pytest has run" in said


def test_nothing_runs_without_a_place_for_verdicts(tests: Path) -> None:
    (tests / "temporary").rmdir()
    code, said = run(tests)
    assert code == 2 and "has run" not in said
