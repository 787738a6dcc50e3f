"""After a restore the notebook says which cells are undone, and runs them again if asked to."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.test_kernel_dies import SAVED, kernel_pid
from tests.harness.browser import NotebookPage
from tests.harness.server import Home, JupyterServer

pytestmark = pytest.mark.browser

CELLS = ["print(x)", "x = x * 2", "x = 20; import os; print(os.getpid())", "x = x + 1", "# old"]


def test_cells_that_ran_after_the_save_are_marked_and_run_again_in_their_order(
    home: Home, open_page: Callable[[JupyterServer], NotebookPage]
) -> None:
    path = home.add_notebook("work.ipynb", CELLS)
    file = home.notebooks / path
    # Of an earlier kernel, with a counter that this one has not come to.
    file.write_text(
        file.read_text().replace(
            '"cell-4", "execution_count": null', '"cell-4", "execution_count": 4'
        )
    )
    assert '"execution_count": 4' in file.read_text()
    with JupyterServer(home, app="lab") as server:
        page = open_page(server)
        page.open(path)
        page.run_cell(2)
        page.press_save()
        page.notification(SAVED)
        for cell in (3, 1, 0):  # 21, 42; not from top to bottom
            page.run_cell(cell)
        page.wait_output(0, "42")

        os.kill(kernel_pid(page, 2), signal.SIGKILL)

        # One notice says all of it.
        toast = page.notification(re.compile(r"The kernel died .* went back to .*: 3 cells ran"))
        expect(toast.get_by_role("button", name="Start Fresh Instead")).to_be_visible()
        undone = page.notebook.locator(".jp-gpu-ckpt-undone-note")
        expect(undone).to_have_count(3)
        expect(undone.first).to_contain_text("Undone: ran after the kernel was saved at")
        expect(page.cells.nth(2).locator(".jp-gpu-ckpt-undone-note")).to_have_count(0)
        expect(page.cells.nth(4).locator(".jp-gpu-ckpt-undone-note")).to_have_count(0)

        # A cell that is run by hand is not undone any more, also where the page is opened anew.
        page.run_cell(3, wait=False)  # it gets the number that it had
        expect(undone).to_have_count(2)
        page.page.keyboard.press("Control+s")
        expect(page.page.locator(".jp-Notebook-footer")).to_be_visible()
        page.page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
        page.page.close()
        page = open_page(server)
        page.open(path)
        toast = page.notification(re.compile("Kernel went back to .*: 2 cells ran after that"))
        undone = page.notebook.locator(".jp-gpu-ckpt-undone-note")
        expect(undone).to_have_count(2)

        toast.get_by_role("button", name="Run These Again").click()

        expect(undone).to_have_count(0)
        expect(page.page.locator(".Toastify__toast").filter(has_text="went back")).to_have_count(0)
        assert [page.prompt(cell) for cell in (1, 0)] == ["[3]:", "[4]:"]
        page.run_cell(0)
        assert page.output(0) == "42"
