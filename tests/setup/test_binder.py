"""What `binder/` makes, as far as that goes without a container: `postBuild` and what comes of it.

The environment is as that of repo2docker: JupyterLab is in it, the extension is not. In it an
ordinary user without any capability runs the script, on a node without a network. What it
fetches on a machine that has nothing, `tests/setup/bare.sh RELEASE binder` tries.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import yaml
from playwright.sync_api import expect

from tests.harness.browser import PATIENCE, chromium
from tests.harness.client import wait_for
from tests.harness.node import REPOSITORY, Node
from tests.harness.ports import free_port
from tests.harness.server import Home
from tests.harness.user import User

BINDER = REPOSITORY / "binder"
PAGE = "/lab/tree/binder/sample.ipynb"


def test_the_environment_has_what_the_set_up_needs() -> None:
    environment = yaml.safe_load((BINDER / "environment.yml").read_text())
    pinned = dict(entry.split("=") for entry in environment["dependencies"] if "=" in entry)
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert f'"Programming Language :: Python :: {pinned["python"]}"' in project
    assert int(pinned["nodejs"]) >= 20
    assert "pip" in environment["dependencies"]
    needed = re.findall(r"^ *need (\S+)", (REPOSITORY / ".ci/setup-system").read_text(), re.M)
    packages = (BINDER / "apt.txt").read_text().split()
    assert {"gcc", "libc6-dev", "debian-archive-keyring"} <= set(packages) <= set(needed)
    for package in packages:
        known = [["dpkg-query", "-W", package], ["apt-cache", "show", package]]
        assert any(subprocess.run(c, capture_output=True).returncode == 0 for c in known), package


@pytest.fixture
def checkout(shared: Path, user: User) -> Path:
    """The repository as it is cloned, and the front end built: that takes minutes otherwise."""
    copy = shared / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    built = "jupyter_gpu_ckpt/labextension"
    shutil.copytree(REPOSITORY / built, copy / built)
    user.own(copy)
    return copy


@pytest.fixture
def environment(shared: Path, user: User) -> Path:
    """An environment with JupyterLab, by reference to that of the tests."""
    prefix = shared / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    packages = sysconfig.get_path("purelib")
    for folder in prefix.glob("lib/python*/site-packages"):
        # What a .pth file of the tests' environment adds, this checkout, is not added here.
        (folder / "tests.pth").write_text(packages)
    for name in ("jupyter", "jupyter-lab", "jupyter-labextension", "jupyter-server"):
        script = (Path(sys.prefix) / "bin" / name).read_text().splitlines()
        lines = [f"#!{prefix}/bin/python", *script[1:], ""]
        (prefix / "bin" / name).write_text("\n".join(lines))
        (prefix / "bin" / name).chmod(0o755)
    for folder in ("etc/jupyter", "share/jupyter"):
        shutil.copytree(
            Path(sys.prefix) / folder,
            prefix / folder,
            ignore=shutil.ignore_patterns("*gpu-ckpt*", "*gpu_ckpt*"),
        )
    user.own(prefix)
    return prefix


@pytest.fixture
def node(shared: Path) -> Iterator[Node]:
    with Node("binder", [shared], for_users=True) as node:
        yield node


@pytest.mark.root
@pytest.mark.browser
@pytest.mark.timeout(180)
def test_the_sample_notebook_opens_and_its_button_says_why_it_cannot_save(
    checkout: Path, environment: Path, users_home: Home, node: Node, user: User
) -> None:
    path = f"{environment}/bin:/usr/local/bin:/usr/bin:/bin"
    variables = {**users_home.environment(), "PATH": path}
    result = node.run(
        ["binder/postBuild"],
        user=user,
        cwd=checkout,
        # Without a network: what builds the package is there already.
        env={**variables, "PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1"},
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout
    assert re.search(r"jupyter_gpu_ckpt .*OK", result.stdout)
    assert re.search(r"jupyter-gpu-ckpt v\S+ .*enabled.*OK", result.stdout)
    # What pip has built and installed is a wheel of this platform, with the program in it.
    (wheel,) = environment.glob("lib/python*/site-packages/jupyter_gpu_ckpt-*.dist-info/WHEEL")
    assert re.search(r"^Root-Is-Purelib: false$", wheel.read_text(), re.M)
    assert re.search(r"^Tag: py3-none-linux_\w+$", wheel.read_text(), re.M)
    program = wheel.parents[1] / "jupyter_gpu_ckpt" / "bin" / "kernel-capture"
    assert program.read_bytes()[:4] == b"\x7fELF" and os.access(program, os.X_OK)

    port, token = free_port(), secrets.token_hex(8)
    address = f"http://127.0.0.1:{port}"
    options = ["--no-browser", f"--port={port}", f"--IdentityProvider.token={token}"]
    log = users_home.path / "lab.log"
    with log.open("wb") as output:
        lab = node.popen(
            [f"{environment}/bin/jupyter", "lab", *options],
            user=user,
            cwd=checkout,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    node.forward(port)

    def answers() -> bool:
        assert lab.poll() is None, log.read_text()
        try:
            return requests.get(f"{address}/api/status?token={token}", timeout=5).ok
        except requests.RequestException:
            return False

    wait_for("JupyterLab answers", answers, 60)
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(f"{address}/?token={token}")
        button = page.locator(".jp-gpu-ckpt-button")
        expect(button).to_have_attribute("data-state", "unavailable", timeout=PATIENCE)
        assert page.url.split("?")[0] == address + PAGE
        name = re.compile(r"^Cannot save kernel state: [^!]*cap_checkpoint_restore")
        expect(button.get_by_role("button")).to_have_attribute("aria-label", name, timeout=PATIENCE)
        expect(page.get_by_role("heading", name="Save this kernel, kill it, go on")).to_be_visible()
        button.locator(".jp-ToolbarButtonComponent").click()
        dialog = page.get_by_role("dialog", name="Cannot Save Kernel State")
        expect(dialog).to_contain_text("cap_checkpoint_restore")
        expect(dialog.get_by_role("button", name="Close")).to_be_focused()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        # The kernel is as good as any other.
        page.locator(".jp-CodeCell .cm-content").first.click()
        page.keyboard.press("Shift+Enter")
        prompt = page.locator(".jp-CodeCell .jp-InputArea-prompt").first
        expect(prompt).to_have_text("[1]:", timeout=PATIENCE)
