"""A real browser on a real page: what the browser tests do and read, in a user's words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from playwright.sync_api import TimeoutError as PageTimeout

from tests.harness.client import wait_for
from tests.harness.server import JupyterServer

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
EXECUTABLE = "/usr/bin/chromium"
PATIENCE = 30_000  # ms
BRIEFLY = 2_000  # ms, for what may be gone when it is reached for


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a running headless browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=EXECUTABLE, headless=True, args=ARGUMENTS
        )
        try:
            yield browser
        finally:
            browser.close()


class NotebookPage:
    """One browser tab with one notebook in it."""

    def __init__(self, page: Page, server: JupyterServer) -> None:
        self.page = page
        self.server = server
        self.console: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.set_viewport_size({"width": 1280, "height": 900})
        page.on("console", lambda m: self.console.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda e: self.console.append(f"page error: {e}"))

    def open(self, path: str, *, app: str = "lab") -> None:
        """Open the notebook and wait for its kernel."""
        self.visit(path, app=app)
        self.wait_idle()

    def visit(self, path: str, *, app: str = "lab") -> None:
        """Open the notebook and wait for the page only."""
        where = f"notebooks/{path}" if app == "notebook" else f"lab/tree/{path}"
        # A workspace of its own, or the page would open the last test's tabs again.
        reset = "" if app == "notebook" else "&reset"
        self.page.goto(f"{self.server.base_url}{where}?token={self.server.token}{reset}")
        expect(self.notebook).to_be_visible(timeout=PATIENCE)

    @property
    def notebook(self) -> Locator:
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    @property
    def cells(self) -> Locator:
        return self.notebook.locator(".jp-CodeCell")

    def wait_idle(self, timeout: float = 30) -> None:
        """Wait until the page shows a kernel and says that it is idle; `timeout` in seconds."""
        # Before it has a kernel the page says "No Kernel", and "idle" too.
        name = self.notebook.locator(".jp-KernelName")
        expect(name).to_have_text(re.compile(r"^(?!No Kernel).+"), timeout=timeout * 1000)
        self.expect_status("idle", timeout)

    def expect_status(self, status: str, timeout: float = 30) -> None:
        """Wait until the kernel's status as the page shows it is `status`."""
        indicator = self.notebook.locator(".jp-Notebook-ExecutionIndicator")
        expect(indicator).to_have_attribute("data-status", status, timeout=timeout * 1000)

    def run_cell(self, number: int, *, wait: bool = True) -> None:
        """Click into cell `number` and press Shift+Enter; wait for its prompt number."""
        before = self.prompt(number)
        self.cells.nth(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        if wait:
            prompt = self.cells.nth(number).locator(".jp-InputArea-prompt")
            expect(prompt).not_to_have_text(before)
            expect(prompt).to_have_text(re.compile(r"\[\d+\]:"), timeout=PATIENCE)

    def type_into(self, number: int, code: str) -> None:
        """Type into an empty cell."""
        self.cells.nth(number).locator(".cm-content").click()
        self.page.keyboard.type(code)

    def prompt(self, number: int) -> str:
        """Return the cell's prompt, such as ``[3]:``."""
        text = self.cells.nth(number).locator(".jp-InputArea-prompt").text_content()
        return (text or "").strip()

    def output(self, number: int) -> str:
        """Return the cell's output as text."""
        return "\n".join(
            self.cells.nth(number).locator(".jp-OutputArea-output").all_inner_texts()
        ).strip()

    def wait_output(self, number: int, text: str | re.Pattern[str], timeout: float = 30) -> None:
        """Wait until the cell's output contains `text`; `timeout` in seconds."""
        outputs = self.cells.nth(number).locator(".jp-OutputArea-child")
        expect(outputs.filter(has_text=text).first).to_be_visible(timeout=timeout * 1000)

    def notification(self, text: str | re.Pattern[str], timeout: float = 30) -> Locator:
        """Return the notification with the given text once it is shown."""
        toast = self.page.locator(".Toastify__toast").filter(has_text=text).first
        expect(toast).to_be_visible(timeout=timeout * 1000)
        return toast

    def dialog(self, text: str | re.Pattern[str], timeout: float = 30) -> Locator:
        """Return the dialog with the given text once it is shown."""
        dialog = self.page.locator(".jp-Dialog").filter(has_text=text).first
        expect(dialog).to_be_visible(timeout=timeout * 1000)
        return dialog

    def dialog_behind_others(self, text: str, timeout: float = 30) -> Locator:
        """Return the dialog with the given text, closing JupyterLab's own before it."""
        wanted = self.page.locator(".jp-Dialog").filter(has_text=text).first
        other = self.page.locator(".jp-Dialog").filter(has_not_text=text).first

        def shown() -> bool:
            if other.is_visible():
                with suppress(PageTimeout):  # it went away by itself
                    other.locator("button").first.click(timeout=BRIEFLY)
            return wanted.is_visible()

        wait_for(f"dialog {text!r}", shown, timeout, interval=0.2)
        return wanted

    def menu(self, menu: str, item: str) -> None:
        """Choose an item of the menu bar."""
        bar = self.page.get_by_role("menubar").first
        bar.get_by_role("menuitem", name=menu, exact=True).click()
        self.page.get_by_role("menuitem", name=item).first.click()

    def palette(self, command: str) -> None:
        """Run a command by the keyboard alone, from the command palette."""
        self.page.keyboard.press("Control+Shift+C")
        palette = self.page.locator("#modal-command-palette")
        expect(palette.locator("input")).to_be_focused()
        self.page.keyboard.type(command)
        first = palette.locator(".lm-CommandPalette-item.lm-mod-active")
        expect(first).to_contain_text(command)
        self.page.keyboard.press("Enter")

    def running_kernel_menu(self, notebook: str, item: str) -> None:
        """Choose an item of the context menu that the notebook's kernel has among the running."""
        kernels = self.page.locator(".jp-RunningSessions-item.jp-mod-kernel")
        if not self.page.locator("#jp-running-sessions").is_visible():
            self.page.get_by_role("tab", name="Running Terminals and Kernels").click()
        kernels.filter(has_text=notebook).first.click(button="right")
        self.page.get_by_role("menuitem", name=item).click()

    def focus(self) -> str:
        """Return the name of what has the keyboard's focus, as a screen reader would say it."""
        return str(
            self.page.evaluate(
                """() => {
                  const at = document.activeElement;
                  const named = at.querySelector('[aria-label]');
                  const label = at.labels?.[0]?.innerText;
                  return at.ariaLabel || named?.ariaLabel || label || at.innerText || at.tagName;
                }"""
            )
        )

    def close_dialogs(self) -> None:
        """Close what a test has left open: dialogs and notifications."""
        dialogs = self.page.locator(".jp-Dialog")

        def closed() -> bool:
            if dialogs.count() > 0:
                with suppress(PageTimeout):  # it went away by itself
                    dialogs.first.press("Escape", timeout=BRIEFLY)
            return dialogs.count() == 0

        wait_for("the dialogs are closed", closed, 30, interval=0.01)
        close = "all => all.forEach(button => button.click())"
        self.page.locator(".jp-Notification-Toast-Close").evaluate_all(close)
        expect(self.page.locator(".Toastify__toast")).to_have_count(0)

    @property
    def button(self) -> Locator:
        """The toolbar button that saves; ``data-state`` is its face."""
        return self.notebook.locator(".jp-gpu-ckpt-button")

    def press_save(self) -> None:
        self.button.locator(".jp-ToolbarButtonComponent").click()

    def screenshot(self, folder: Path, name: str) -> Path:
        """Write what the user sees now."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.png"
        self.page.screenshot(path=path)
        return path
