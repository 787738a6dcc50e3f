"""The button's faces, in JupyterLab and in Notebook 7."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from jupyter_gpu_ckpt.capture.native import find_kernel_capture
from tests.browser.test_kernel_dies import SAVED
from tests.harness.browser import NotebookPage
from tests.harness.node import Node
from tests.harness.server import Home, JupyterServer
from tests.harness.user import User

pytestmark = pytest.mark.browser

OpenPage = Callable[[JupyterServer], NotebookPage]


@pytest.mark.timeout(180)
def test_in_notebook_7(home: Home, open_page: OpenPage) -> None:
    path = home.add_notebook(
        "work.ipynb", ["x = 41; import os; print(os.getpid())", "print(x + 1)"]
    )
    with JupyterServer(home, app="notebook") as server:
        page = open_page(server)
        page.page.clock.install()
        page.open(path, app="notebook")
        page.run_cell(0)
        expect(page.button).to_have_attribute("data-state", "ready")
        page.press_save()
        page.notification(SAVED)
        (state,) = server.client.states(path=path)
        assert state["path"] == path
        # The state grows old while the page is looked at.
        expect(page.button).to_contain_text("Saved just now")
        page.page.clock.fast_forward("05:10")
        expect(page.button).to_contain_text("Saved 5 min. ago")

        page.menu("Kernel", "Restore Kernel State…")
        dialog = page.dialog("Restore Kernel State")
        expect(dialog.get_by_role("option")).to_contain_text("5 minutes ago")
        with page.page.expect_popup() as popup:
            dialog.get_by_role("button", name="Open as New Kernel").click()
        copy = NotebookPage(popup.value, server)
        copy.wait_idle()
        copy.type_into(0, "print(x + 1)")
        copy.run_cell(0)
        copy.wait_output(0, "42")
        copy.page.close()

        os.kill(int(page.output(0)), signal.SIGKILL)
        page.notification("The kernel died and was restored to its state saved 5 minutes ago.")
        page.run_cell(1)
        page.wait_output(1, "42")
        page.page.close()
        server.kill()
    with JupyterServer(home, app="notebook", port=server.port) as server:
        server.client.wait_lost(1)
        page = open_page(server)
        page.page.goto(f"{server.base_url}tree?token={server.token}")
        prompt = page.dialog("Restore Lost Kernels")
        expect(prompt).to_contain_text(path)
        prompt.get_by_role("button", name="Restore", exact=True).click()
        page.notification(re.compile("^Kernel state restored"))
        page.open(path, app="notebook")
        page.run_cell(1)
        page.wait_output(1, "42")


@pytest.mark.root
def test_without_rights_it_says_why(shared: Path, open_page: OpenPage) -> None:
    home = Home(shared / "home", User())
    program = shared / "plain" / "kernel-capture"
    program.parent.mkdir()
    found = find_kernel_capture(None)
    assert found is not None
    shutil.copy(found, program)
    os.chmod(program, 0o755)
    path = home.add_notebook("work.ipynb", ["print(6 * 7)"])
    with (
        Node("node-a", [shared], for_users=True) as node,
        JupyterServer(
            home,
            node=node,
            app="lab",
            config={"GpuCkptProvisioner": {"kernel_capture": str(program)}},
        ) as server,
    ):
        page = open_page(server)
        page.open(path)
        expect(page.button).to_have_attribute("data-state", "unavailable")
        label = page.button.get_by_role("button")
        expect(label).to_have_attribute("aria-label", re.compile("^Cannot save kernel state: "))
        expect(label).to_have_attribute("aria-disabled", "true")
        page.press_save()
        dialog = page.dialog("Cannot Save Kernel State")
        expect(dialog).to_contain_text("cap_checkpoint_restore")
        dialog.get_by_role("button").last.click()
        page.run_cell(0)
        page.wait_output(0, "42")


def test_a_failed_save_says_why_and_has_the_details(
    home: Home, shared: Path, open_page: OpenPage
) -> None:
    # Half of a connection cannot be saved: the other half belongs to a service outside.
    service = socket.socket(socket.AF_UNIX)
    with service:
        service.bind(str(shared / "service"))
        service.listen()
        address = str(shared / "service")
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({address!r})"
        path = home.add_notebook("work.ipynb", ["x = 41", code, "print(x + 1)"])
        with JupyterServer(home, app="lab") as server:
            page = open_page(server)
            page.open(path)
            page.run_cell(0)
            page.run_cell(1)
            peer, _ = service.accept()
            with peer:
                page.press_save()
                notice = page.notification("Unix socket")
                notice.get_by_role("button", name="Details").click()
                dialog = page.dialog("Saving Kernel State Failed")
                expect(dialog.locator(".jp-gpu-ckpt-details pre")).to_contain_text("Error (criu/")
                dialog.locator("button").last.click()
                page.run_cell(2)
                page.wait_output(2, "42")
                expect(page.button).to_have_attribute("data-state", "ready")
                assert server.client.states() == []
