"""Every way to the commands, and the dialogs by keyboard, by name and by their looks.

One page in one JupyterLab for all: what a test needs it makes, and it closes what it opened.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
from playwright.sync_api import Browser, Locator, expect

from tests.browser.test_kernel_dies import RESTORED as DIED
from tests.browser.test_kernel_dies import SAVED
from tests.harness.browser import NotebookPage
from tests.harness.client import wait_for
from tests.harness.contrast import contrasts
from tests.harness.server import Home, JupyterServer, shared_folder

pytestmark = pytest.mark.browser

NOTEBOOK = "work.ipynb"
RESTORED = re.compile("^Kernel state restored")


@pytest.fixture(scope="module")
def lab() -> Iterator[JupyterServer]:
    with shared_folder("controls") as path, JupyterServer(Home(path / "home"), app="lab") as server:
        yield server


@pytest.fixture(scope="module")
def opened(browser: Browser, lab: JupyterServer) -> Iterator[NotebookPage]:
    cells = [
        "x = 41",
        "x = 0",
        "print(x + 1)",
        "import os; data = os.urandom(200 << 20)",
        "del data",
        "import socket; database = socket.create_connection(('127.77.0.2', 5432)); "
        "log = open('work.log', 'a')",
    ]
    path = lab.home.add_notebook(NOTEBOOK, cells)
    context = browser.new_context()
    page = NotebookPage(context.new_page(), lab)
    page.open(path)
    # Notices that are closed are gone at once.
    page.page.add_style_tag(content=".Toastify__toast { animation-duration: 1ms !important; }")
    yield page
    context.close()


@pytest.fixture
def page(opened: NotebookPage, request: pytest.FixtureRequest) -> Iterator[NotebookPage]:
    request.node.open_pages = [opened]
    opened.page.get_by_role("tab", name=NOTEBOOK).click()
    yield opened
    opened.close_dialogs()


@pytest.fixture
def a_state(page: NotebookPage, lab: JupyterServer) -> str:
    """A state of the notebook that holds ``x = 41``."""
    page.run_cell(0)
    page.press_save()
    page.notification(SAVED)
    page.close_dialogs()
    return str(lab.client.states(path=NOTEBOOK)[0]["id"])


def named_dialog(page: NotebookPage, name: str) -> Locator:
    """The dialog that a screen reader announces by this name."""
    dialog = page.page.get_by_role("dialog", name=name)
    expect(dialog).to_be_visible()
    return dialog


# --- the ways to the commands ---------------------------------------------------------------


def test_from_the_command_palette(page: NotebookPage, lab: JupyterServer) -> None:
    before = len(lab.client.states())
    page.palette("Save Kernel State")
    page.notification(SAVED)
    assert len(lab.client.states()) == before + 1

    page.palette("Restore Kernel State…")
    named_dialog(page, "Restore Kernel State").press("Escape")

    page.palette("Restore Lost Kernels…")
    expect(page.dialog("Restore Lost Kernels")).to_contain_text("No kernel was lost.")


def test_from_the_kernel_menu_a_kernel_is_rolled_back(page: NotebookPage) -> None:
    page.run_cell(0)
    page.menu("Kernel", "Save Kernel State")
    page.notification(SAVED)
    page.run_cell(1)

    page.menu("Kernel", "Restore Kernel State…")
    named_dialog(page, "Restore Kernel State").get_by_role("button", name="Roll Back").click()
    question = page.dialog("Roll Back Kernel?")
    expect(question).to_contain_text("Everything it did since then is lost")
    question.get_by_role("button", name="Roll Back").click()

    page.notification(RESTORED)
    page.run_cell(2)
    page.wait_output(2, "42")


def test_from_the_running_panel(page: NotebookPage, lab: JupyterServer) -> None:
    before = [state["id"] for state in lab.client.states()]
    page.running_kernel_menu(NOTEBOOK, "Save Kernel State")
    page.notification(SAVED)
    (new,) = [s["id"] for s in lab.client.states() if s["id"] not in before]

    # The list comes back after a state was deleted.
    page.running_kernel_menu(NOTEBOOK, "Restore Kernel State…")
    dialog = named_dialog(page, "Restore Kernel State")
    expect(dialog.get_by_role("option")).to_have_count(len(before) + 1)
    dialog.get_by_role("button", name="Delete").click()
    page.dialog("Delete Saved State?").get_by_role("button", name="Delete").click()
    if before:
        expect(dialog.get_by_role("option")).to_have_count(len(before))
    else:
        expect(dialog).to_contain_text("No saved state yet.")
    assert new not in [state["id"] for state in lab.client.states()]


# --- a save on its way ----------------------------------------------------------------------


@contextmanager
def held_save(page: NotebookPage, server: JupyterServer) -> Iterator[psutil.Process]:
    """A save by the button whose dump is stopped midway, until it is resumed."""
    page.press_save()

    def stopped() -> psutil.Process | None:
        for child in server.process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.name() == "kernel-capture" and child.cmdline()[1] == "dump":
                    child.suspend()
                    return child
        return None

    dump = wait_for("the dump", stopped, 30, interval=0.005)
    try:
        yield dump
    finally:
        with suppress(psutil.NoSuchProcess):
            dump.resume()


def cancelled_by(page: NotebookPage, button: Locator, dump: psutil.Process) -> None:
    with page.page.expect_response(lambda r: r.request.method == "DELETE"):
        button.click()
    dump.resume()
    page.notification("Saving the kernel state was cancelled. The kernel runs on.")
    expect(page.button).not_to_have_attribute("data-state", "saving")


def test_a_save_is_cancelled_from_the_button_and_from_the_notice(
    page: NotebookPage, lab: JupyterServer
) -> None:
    page.run_cell(3)  # enough to save that there is time to stop it
    states = lab.client.states()
    face = page.button.get_attribute("data-state")
    button = page.button.get_by_role("button")

    with held_save(page, lab) as dump:
        expect(page.button).to_have_attribute("data-state", "saving")
        expect(page.button).to_contain_text(re.compile(r"\d+%"))
        name = re.compile(r"^Saving kernel state: \d+% \(click to cancel\)$")
        expect(button).to_have_attribute("aria-label", name)
        page.press_save()
        question = page.dialog("Cancel Saving?")
        question.get_by_role("button", name="Keep Saving").click()
        expect(question).to_have_count(0)
        page.press_save()
        cancelled_by(page, question.get_by_role("button", name="Cancel Save"), dump)
    page.close_dialogs()

    with held_save(page, lab) as dump:
        notice = page.notification("Saving kernel state…")
        cancelled_by(page, notice.get_by_role("button", name="Cancel"), dump)

    assert lab.client.states() == states
    expect(page.button).to_have_attribute("data-state", str(face))
    page.run_cell(4)
    page.press_save()
    page.notification(SAVED)


# --- the restore dialog ---------------------------------------------------------------------


def test_the_restore_dialog_by_keyboard(
    page: NotebookPage, lab: JupyterServer, a_state: str
) -> None:
    press = page.page.keyboard.press
    page.press_save()  # a second state
    page.notification(SAVED)
    page.close_dialogs()
    page.cells.nth(0).locator(".cm-content").click()
    states = [state["id"] for state in lab.client.states(path=NOTEBOOK)]

    page.palette("Restore Kernel State…")
    dialog = named_dialog(page, "Restore Kernel State")
    expect(dialog).to_have_attribute("aria-modal", "true")
    options = dialog.get_by_role("listbox", name="Saved states").get_by_role("option")
    expect(dialog.get_by_role("listbox")).to_be_focused()
    # When, how large, why, and on which node.
    expect(options.first).to_have_text(
        re.compile(r"just now.*\d MB.*Saved by you.*" + states_node(lab))
    )
    for key, selected in (
        ("ArrowDown", 1), ("End", -1), ("Home", 0), ("ArrowUp", 0), ("ArrowDown", 1)
    ):  # fmt: skip
        press(key)
        expect(options.nth(selected)).to_have_attribute("aria-selected", "true")
        expect(dialog.locator("[aria-selected=true]")).to_have_count(1)
    active = dialog.get_by_role("listbox").get_attribute("aria-activedescendant")
    assert active == options.nth(1).get_attribute("id")
    expect(dialog.get_by_role("status").first).to_contain_text("execution count")

    # Tab goes round within the dialog, both ways.
    around = [
        "Saved states", "Pinned: kept until it is deleted by hand", "Verify", "Details",
        "Delete", "Cancel", "Open as New Kernel", "Roll Back",
    ]  # fmt: skip
    assert tabbed(page, "Tab", 9) == [*around, "Saved states"]
    names = tabbed(page, "Shift+Tab", 3)
    assert names[0] == "Saved states" and set(names) <= set(around)

    # Escape leaves everything as it was, and gives the focus back.
    press("Escape")
    expect(dialog).to_have_count(0)
    expect(page.cells.nth(0)).to_be_focused()

    # Enter takes the selected state, after a question that Escape answers with no.
    page.palette("Restore Kernel State…")
    expect(dialog.get_by_role("listbox")).to_be_focused()
    press("Enter")
    question = named_dialog(page, "Roll Back Kernel?")
    press("Escape")
    expect(question).to_have_count(0)
    assert [state["id"] for state in lab.client.states(path=NOTEBOOK)] == states
    assert all(op["kind"] == "save" for op in recent(lab)[:2])


def states_node(lab: JupyterServer) -> str:
    return re.escape(lab.client.states()[0]["node"]["hostname"])


def recent(lab: JupyterServer) -> list[dict[str, str]]:
    return list(lab.client.get("gpu-ckpt/api/operations"))


def tabbed(page: NotebookPage, key: str, count: int) -> list[str]:
    """What has the focus now and after each press but the last."""
    names = []
    for _ in range(count):
        names.append(page.focus())
        page.page.keyboard.press(key)
    page.page.keyboard.press("Shift+Tab" if key == "Tab" else "Tab")
    return names


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_everything_can_be_read_in_both_themes(
    page: NotebookPage, a_state: str, theme: str
) -> None:
    execute = "([id, args]) => window.jupyterapp.commands.execute(id, args)"
    page.page.evaluate(execute, ["apputils:change-theme", {"theme": theme}])
    expect(page.page.locator("body")).to_have_attribute("data-jp-theme-name", theme)
    icon = page.button.locator("svg path").evaluate("e => getComputedStyle(e).fill")
    assert (min(map(int, re.findall(r"\d+", icon)[:3])) > 128) is ("Dark" in theme)
    with socket.create_server(("127.77.0.2", 5432)):
        page.run_cell(5)
        page.press_save()
        page.notification(SAVED)
    page.close_dialogs()
    page.menu("Kernel", "Restore Kernel State…")
    dialog = named_dialog(page, "Restore Kernel State")
    facts = dialog.get_by_role("status").first
    expect(facts).to_contain_text("execution count")
    dialog.get_by_role("button", name="Verify").click()
    expect(dialog.get_by_role("status").last).to_contain_text("The state is whole")
    gone = "connection to 127.77.0.2:5432 (postgresql)"
    expect(facts).to_contain_text(f"Will not come back: {gone}")
    dialog.get_by_text("Not in the state (2)").click()
    expect(dialog.get_by_role("list", name="Will not come back:")).to_have_text(gone)
    needed = dialog.get_by_role("list", name="Opened again as it is then, and has to be there:")
    expect(needed).to_contain_text("work.log (appended to)")
    dialog.get_by_text("Details", exact=True).click()
    expect(dialog.get_by_role("rowheader", name="Python heap")).to_be_visible()
    found = contrasts(page.page, ".jp-gpu-ckpt-button, .jp-gpu-ckpt-RestoreBody")
    assert len(found) >= 5
    assert all(ratio >= 4.5 for ratio in found.values()), found


# --- consoles -------------------------------------------------------------------------------


def test_a_console_does_not_wait_for_what_its_restored_kernel_does_not_know(
    page: NotebookPage,
) -> None:
    page.page.get_by_role("button", name="New Launcher").click()
    page.page.locator(".jp-LauncherCard[data-category=Console]").first.click()
    console = page.page.locator(".jp-ConsolePanel:not(.lm-mod-hidden)")
    cells = console.locator(".jp-CodeConsole-content .jp-CodeCell")
    prompts = console.locator(".jp-CodeConsole-content .jp-CodeCell .jp-InputArea-prompt")

    def enter(code: str) -> None:
        console.locator(".jp-CodeConsole-promptCell .cm-content").click()
        page.page.keyboard.type(code)
        page.page.keyboard.press("Shift+Enter")

    expect(page.page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible()
    enter("import os, time; x = 41; print(os.getpid())")
    expect(prompts.last).to_have_text("[1]:")
    pid = int(cells.last.locator(".jp-OutputArea-output").inner_text())
    page.menu("Kernel", "Save Kernel State")
    page.notification(SAVED)
    enter("time.sleep(300)")
    enter("print('next')")
    expect(prompts).to_have_text(["[1]:", "[*]:", "[*]:"])

    os.kill(pid, signal.SIGKILL)

    page.notification(DIED)
    expect(prompts).to_have_text(["[1]:", "[ ]:", "[ ]:"])
    enter("print(x + 1)")
    expect(prompts.last).to_have_text("[2]:")
    expect(cells.last).to_contain_text("42")


# --- kernels of another server --------------------------------------------------------------


def test_a_kernel_of_another_server_is_copied_and_when_lost_restored(
    page: NotebookPage, lab: JupyterServer
) -> None:
    press = page.page.keyboard.press
    with JupyterServer(lab.home) as other:
        kernel = other.client.start(lab.home.add_notebook("other.ipynb", ["print(x + 1)"]))
        kernel.run("x = 41")
        other.client.save(kernel)

        # It runs there: here it can only be had as a second kernel.
        execute = "path => void window.jupyterapp.commands.execute('gpu-ckpt:restore', { path })"
        page.page.evaluate(execute, "other.ipynb")
        dialog = named_dialog(page, "Restore Kernel State")
        said = dialog.get_by_role("status").first
        expect(said).to_contain_text("can only be opened as a new kernel")
        expect(said).to_contain_text("still runs, in another Jupyter server")
        expect(dialog.get_by_role("button", name="Roll Back")).to_be_disabled()
        press("Enter")
        expect(dialog).to_be_visible()
        assert "Open as New Kernel" in tabbed(page, "Tab", 7)
        dialog.get_by_role("button", name="Open as New Kernel").click()
        page.notification(RESTORED)
        expect(page.cells).to_have_count(1)
        page.wait_idle()
        page.type_into(0, "print(x + 1)")
        page.run_cell(0)
        page.wait_output(0, "42")
        page.close_dialogs()
        other.kill()

    # The page is told that the kernel was lost.
    prompt = named_dialog(page, "Restore Lost Kernels")
    expect(prompt.get_by_role("button", name="Restore", exact=True)).to_be_focused()
    box = prompt.get_by_role("checkbox", name=re.compile("other.ipynb"))
    expect(box).to_be_checked()
    around = {"Not Now", "Dismiss", "Restore"}
    assert around < set(tabbed(page, "Tab", 5))
    box.focus()
    press("Space")
    expect(prompt.get_by_role("button", name="Restore", exact=True)).to_be_disabled()
    expect(prompt).to_contain_text("No kernel is selected.")
    press("Escape")
    expect(prompt).to_have_count(0)
    assert [lost["kernel_id"] for lost in lab.client.lost()] == [kernel.id]

    page.palette("Restore Lost Kernels…")
    expect(prompt.get_by_role("button", name="Restore", exact=True)).to_be_focused()
    press("Enter")
    page.notification(RESTORED)
    # Its notebook was not open; now it is in front.
    expect(page.cells).to_have_count(1)
    expect(page.cells).to_contain_text("print(x + 1)")
    page.wait_idle()
    page.run_cell(0)
    page.wait_output(0, "42")
    assert kernel.id in [running["id"] for running in lab.client.get("api/kernels")]
