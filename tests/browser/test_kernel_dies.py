"""The main job on a real page: press the button, let the kernel die, go on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from tests.harness.browser import NotebookPage
from tests.harness.client import wait_for
from tests.harness.server import Home, JupyterServer

pytestmark = pytest.mark.browser

SAVED = re.compile(r"Kernel state saved \([\d.]+ [kMG]i?B in [\d.]+ s\)")
RESTORED = re.compile("The kernel died and was restored to its state saved")

OpenPage = Callable[[JupyterServer], NotebookPage]


@pytest.fixture
def server(home: Home) -> Iterator[JupyterServer]:
    with JupyterServer(home, app="lab") as running:
        yield running


def kernel_of(server: JupyterServer, path: str) -> str:
    """Return the id of the kernel that the notebook is attached to."""
    sessions = server.client.get("api/sessions")
    return str(next(s["kernel"]["id"] for s in sessions if s["path"] == path))


def kernel_pid(page: NotebookPage, cell: int) -> int:
    """Return the kernel's PID, which `cell` has printed."""
    return int(re.sub(r"\D", "", page.output(cell)))


def test_the_button_saves_and_a_killed_kernel_goes_on_on_the_same_page(
    server: JupyterServer, open_page: OpenPage
) -> None:
    path = server.home.add_notebook(
        "work.ipynb", ["x = 41", "import os; print(os.getpid())", "print(x + 1)"]
    )
    page = open_page(server)
    page.open(path)
    page.run_cell(0)
    page.run_cell(1)
    expect(page.button).to_have_attribute("data-state", "ready")
    page.press_save()
    page.notification(SAVED)
    expect(page.button).to_have_attribute("data-state", "saved")
    kernel_id = kernel_of(server, path)

    os.kill(kernel_pid(page, 1), signal.SIGKILL)

    page.notification(RESTORED)
    page.run_cell(2)
    page.wait_output(2, "42")
    assert page.prompt(2) == "[3]:"
    page.expect_status("idle")
    assert kernel_of(server, path) == kernel_id
    # JupyterLab never thought that the kernel was gone.
    expect(page.page.locator(".jp-Dialog")).to_have_count(0)
    assert "Session/line number" not in page.output(2)


def test_a_cell_saved_while_it_runs_ends_with_its_number(
    server: JupyterServer, open_page: OpenPage
) -> None:
    lines = 300
    path = server.home.add_notebook(
        "count.ipynb",
        [
            "import os, time; print(os.getpid())",
            f"for i in range({lines}):\n    print(f'<{{i}}>', flush=True); time.sleep(.03)",
            "print('last', i)",
        ],
    )
    page = open_page(server)
    page.open(path)
    page.run_cell(0)
    pid = kernel_pid(page, 0)
    page.run_cell(1, wait=False)
    page.wait_output(1, "<30>")
    page.press_save()
    page.notification(SAVED)
    saved = server.client.states()[0]
    assert saved["execution_state"] == "busy"
    shown = page.output(1).count("<")
    page.wait_output(1, f"<{shown + 20}>")

    os.kill(pid, signal.SIGKILL)

    page.notification(RESTORED)
    page.wait_output(1, f"<{lines - 1}>", timeout=60)
    expect(page.cells.nth(1).locator(".jp-InputArea-prompt")).to_have_text(re.compile(r"\[2\]:"))
    page.expect_status("idle")
    numbers = [int(n) for n in re.findall(r"<(\d+)>", page.output(1))]
    back = next(i for i in range(1, len(numbers)) if numbers[i] <= numbers[i - 1])
    assert numbers[:back] == list(range(back))
    assert numbers[back:] == list(range(numbers[back], lines))
    page.run_cell(2)
    page.wait_output(2, f"last {lines - 1}")
    assert page.prompt(2) == "[3]:"


def test_input_is_still_asked_for_and_taken(server: JupyterServer, open_page: OpenPage) -> None:
    path = server.home.add_notebook(
        "ask.ipynb",
        ["import os; print(os.getpid())", "name = input('Name? ')", "print('Hello', name)"],
    )
    page = open_page(server)
    page.open(path)
    page.run_cell(0)
    pid = kernel_pid(page, 0)
    page.run_cell(1, wait=False)
    box = page.cells.nth(1).locator("input.jp-Stdin-input")
    expect(box).to_be_visible()
    page.press_save()
    page.notification(SAVED)

    os.kill(pid, signal.SIGKILL)

    page.notification(RESTORED)
    box.fill("Ada")
    box.press("Enter")
    expect(page.cells.nth(1).locator(".jp-InputArea-prompt")).to_have_text(re.compile(r"\[2\]:"))
    page.run_cell(2)
    page.wait_output(2, "Hello Ada")


def test_start_fresh_instead(server: JupyterServer, open_page: OpenPage) -> None:
    path = server.home.add_notebook(
        "fresh.ipynb", ["x = 41; import os; print(os.getpid())", "print('x' in globals())"]
    )
    page = open_page(server)
    page.open(path)
    page.run_cell(0)
    page.press_save()
    page.notification(SAVED)
    os.kill(kernel_pid(page, 0), signal.SIGKILL)

    page.notification(RESTORED).get_by_role("button", name="Start Fresh Instead").click()

    wait_for("a fresh kernel", lambda: "False" in run_and_read(page, 1), 60, interval=0.5)
    assert page.prompt(1) == "[1]:"
    assert len(server.client.states()) == 1


def run_and_read(page: NotebookPage, cell: int) -> str:
    page.wait_idle()
    page.run_cell(cell, wait=False)
    expect(page.cells.nth(cell).locator(".jp-InputArea-prompt")).to_have_text(
        re.compile(r"\[\d+\]:")
    )
    return page.output(cell)


def test_a_hibernated_kernel_wakes_for_a_cell_on_the_same_page(
    server: JupyterServer, open_page: OpenPage
) -> None:
    path = server.home.add_notebook("sleepy.ipynb", ["x = 41", "print(x + 1)"])
    page = open_page(server)
    page.open(path)
    page.run_cell(0)
    kernel_id = kernel_of(server, path)
    page.menu("Kernel", "Hibernate Kernel")
    expect(page.button).to_have_attribute("data-state", "hibernated", timeout=30_000)
    expect(page.button).to_contain_text("Hibernated")
    page.run_cell(1)
    page.wait_output(1, "42")
    assert page.prompt(1) == "[2]:"
    expect(page.button).to_have_attribute("data-state", "saved")
    assert kernel_of(server, path) == kernel_id
    expect(page.page.locator(".jp-Dialog")).to_have_count(0)
    page.menu("Kernel", "Hibernate Kernel")
    expect(page.button).to_have_attribute("data-state", "hibernated", timeout=30_000)
    # The page alone wakes it, and no cell can say that this fails.
    state = server.client.states(kernel=kernel_id)[0]["id"]
    (record,) = server.home.store.glob(f"*/kernels/{kernel_id}/states/{state}.json")
    hidden = record.with_suffix(".away")
    record.rename(hidden)
    page.visit(path)
    told = page.notification("The hibernated kernel did not wake")
    told.get_by_role("button", name="Details").click()
    page.dialog("run a cell to try again").press("Escape")
    label = page.button.locator("[aria-label]").first
    expect(label).to_have_attribute("aria-label", re.compile("click to try again"))
    hidden.rename(record)
    page.press_save()
    expect(told).to_have_count(0)
    page.wait_idle()
    page.run_cell(1)
    page.wait_output(1, "42")
    # Another server takes it over: this one's copy is ended, and its page says where it is.
    taken = server.client.save(kernel_id)["state_id"]
    with JupyterServer(server.home) as other:
        other.client.restore(taken, take_over=True)
        page.notification("The kernel was taken over by another server")
        assert [kernel["id"] for kernel in other.client.get("api/kernels")] == [kernel_id]
