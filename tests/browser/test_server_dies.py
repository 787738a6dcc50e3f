"""The server dies with its kernels; the page is asked what to do when a new one is there."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.test_kernel_dies import SAVED, kernel_of
from tests.harness.browser import NotebookPage
from tests.harness.client import wait_for
from tests.harness.node import Node
from tests.harness.server import Home, JupyterServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

OpenPage = Callable[[JupyterServer], NotebookPage]
RESTORED = re.compile("^Kernel state restored")
CELLS = ["x = 41", "print(x + 1)"]


def save(server: JupyterServer, open_page: OpenPage, path: str) -> tuple[NotebookPage, str]:
    """Save a notebook's kernel by the button; the open page, and the kernel's id."""
    page = open_page(server)
    page.open(path)
    page.run_cell(0)
    page.press_save()
    page.notification(SAVED)
    return page, kernel_of(server, path)


def save_and_kill(home: Home, open_page: OpenPage, node: Node | None) -> tuple[str, str, int]:
    """Save a notebook's kernel by the button and kill server and kernels; id, path and port."""
    with JupyterServer(home, node=node, app="lab") as server:
        path = home.add_notebook("work.ipynb", CELLS)
        page, kernel_id = save(server, open_page, path)
        page.page.close()
        if node is not None:
            node.kill()
        else:
            server.kill()
        return kernel_id, path, server.port


@pytest.mark.root
@pytest.mark.parametrize("what", ["the server and its kernels", "the node"])
def test_restore_attaches_the_notebook_to_the_same_kernel(
    home: Home, open_page: OpenPage, what: str
) -> None:
    shared = [home.path.parent]
    node_a = Node("node-a", shared) if what == "the node" else None
    kernel_id, path, port = save_and_kill(home, open_page, node_a)
    node_b = Node("node-b", shared) if what == "the node" else None
    try:
        with JupyterServer(home, node=node_b, app="lab", port=port) as server:
            server.client.wait_lost(1)
            page = open_page(server)
            page.visit(path)
            prompt = page.dialog("Restore Lost Kernels")
            expect(prompt).to_contain_text(path)
            expect(prompt).to_contain_text("Saved by you")
            page.wait_idle()  # the page has a fresh kernel until then
            prompt.get_by_role("button", name="Restore", exact=True).click()
            # Run at once: it is not the fresh kernel that takes it.
            page.run_cell(1, wait=False)
            page.notification(RESTORED)
            page.wait_output(1, "42")
            assert page.prompt(1) == "[2]:"
            assert kernel_of(server, path) == kernel_id
    finally:
        if node_b is not None:
            node_b.kill()


def test_an_open_page_is_asked_when_the_new_server_is_there(
    home: Home, open_page: OpenPage
) -> None:
    path = home.add_notebook("work.ipynb", CELLS)
    with JupyterServer(home, app="lab") as server:
        page, kernel_id = save(server, open_page, path)
        server.kill()
        port = server.port
    with JupyterServer(home, app="lab", port=port) as server:
        prompt = page.dialog_behind_others("Restore Lost Kernels", timeout=90)
        prompt.get_by_role("button", name="Restore", exact=True).click()
        expect(page.page.locator(".jp-Dialog .jp-gpu-ckpt-LostBody")).to_have_count(0)
        page.wait_idle(60)
        page.run_cell(1)
        page.wait_output(1, "42")
        assert kernel_of(server, path) == kernel_id


def test_an_open_page_goes_on_by_itself_where_kernels_are_always_restored(
    home: Home, open_page: OpenPage
) -> None:
    path = home.add_notebook("work.ipynb", CELLS)
    with JupyterServer(home, app="lab") as server:
        page, kernel_id = save(server, open_page, path)
        server.kill()
        port = server.port
    always = {"GpuCkpt": {"restore_on_start": "always"}}
    with JupyterServer(home, app="lab", port=port, config=always) as server:

        def connected() -> bool:
            return any(k["connections"] for k in server.client.get("api/kernels"))

        wait_for("the page is connected to the kernel", connected, 90)
        page.close_dialogs()  # JupyterLab's own, about the server
        page.wait_idle(60)
        page.run_cell(1)
        page.wait_output(1, "42")
        assert page.prompt(1) == "[2]:"
        assert kernel_of(server, path) == kernel_id
        expect(page.page.locator(".jp-gpu-ckpt-LostBody")).to_have_count(0)


def test_dismiss_keeps_the_state_and_does_not_ask_again(home: Home, open_page: OpenPage) -> None:
    kernel_id, path, port = save_and_kill(home, open_page, None)
    with JupyterServer(home, app="lab", port=port) as server:
        page = open_page(server)
        page.visit(path)
        page.dialog("Restore Lost Kernels").get_by_role("button", name="Dismiss").click()
        expect(page.page.locator(".jp-gpu-ckpt-LostBody")).to_have_count(0)
        page.wait_idle()  # it has its fresh kernel: the next page will not start another
        page.page.close()

        page = open_page(server)
        page.open(path)  # waits for the notebook's kernel, a fresh one
        assert server.client.lost() == []
        expect(page.page.locator(".jp-gpu-ckpt-LostBody")).to_have_count(0)
        # The state is still there, to be restored by hand.
        page.menu("Kernel", "Restore Kernel State…")
        dialog = page.dialog("Restore Kernel State")
        expect(dialog.get_by_role("option")).to_have_count(1)
        (state,) = server.client.states(path=path)
        assert state["kernel_id"] == kernel_id
        dialog.get_by_role("button", name="Open as New Kernel").click()
        page.notification(RESTORED)
        # It opens in a notebook of its own, beside the one with the fresh kernel.
        expect(page.cells).to_have_count(1)
        page.wait_idle()
        page.type_into(0, CELLS[1])
        page.run_cell(0)
        page.wait_output(0, "42")
        assert len(server.client.get("api/kernels")) == 2
