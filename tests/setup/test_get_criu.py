"""get-criu finds the Debian mirror in the machine's own apt sources, however they are written."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "native/scripts/get-criu"
SUITES = {"bookworm", "sid"}


@pytest.fixture(scope="module")
def get_criu() -> ModuleType:
    """The script, as a module."""
    loader = importlib.machinery.SourceFileLoader("get_criu", str(SCRIPT))
    spec = importlib.util.spec_from_loader("get_criu", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "deb http://mirror.example/debian bookworm main contrib\n",
            "http://mirror.example/debian",
        ),
        (
            "deb [arch=arm64 signed-by=/k] https://m.example/debian/ bookworm main",
            "https://m.example/debian/",
        ),
        ("# deb http://m.example/debian bookworm main\n", None),
        ("deb-src http://m.example/debian bookworm main\n", None),
        ("deb http://m.example/debian-security bookworm-security main\n", None),
        ("deb http://apt.example/tool cloud-bookworm main\n", None),
    ],
)
def test_one_line_sources(get_criu: ModuleType, text: str, expected: str | None) -> None:
    assert get_criu.one_line_sources(text, SUITES) == ([expected] if expected else [])


def test_deb822_sources(get_criu: ModuleType) -> None:
    text = """\
# the distribution's own
Types: deb deb-src
# a comment within
URIs: http://m.example/debian
 mirror+file:/etc/apt/mirrors/debian.list
Suites: bookworm bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBF
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://m.example/debian-security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""
    assert get_criu.deb822_sources(text, SUITES) == [
        "http://m.example/debian",
        "mirror+file:/etc/apt/mirrors/debian.list",
    ]


def test_a_criu_that_fits_is_taken_as_it_is() -> None:
    """What the tests themselves run on: nothing is fetched when it is there."""
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--print"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).name == "criu"


def test_one_clear_message_without_apt(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--prefix", str(tmp_path / "criu")],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": str(tmp_path)},
    )
    assert result.returncode == 1
    assert "apt-get is missing" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "criu").exists()


def test_versions_of_the_parts_agree() -> None:
    """The wheel takes its version from the front end, the program from Meson."""
    root = SCRIPT.parents[2]
    package = (root / "labextension/package.json").read_text()
    meson = (root / "native/meson.build").read_text()
    version = package.split('"version": "')[1].split('"')[0]
    assert f"version: '{version}'" in meson
