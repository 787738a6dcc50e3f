"""A browser for each module, a fresh page for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser

from tests.harness.browser import NotebookPage, chromium
from tests.harness.server import JupyterServer


@pytest.fixture
def jp_asyncio_loop() -> None:
    """No event loop for each test, as pytest-jupyter makes: Playwright's runs for all."""


@pytest.fixture
def jp_server_cleanup() -> None:
    """No server in this process."""


@pytest.fixture(scope="module")  # not longer: its event loop is in the way of other tests
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def open_page(
    browser: Browser, request: pytest.FixtureRequest
) -> Iterator[Callable[[JupyterServer], NotebookPage]]:
    """Open a tab on a server: a function, as a test may have several."""
    contexts = []
    pages: list[NotebookPage] = []
    request.node.open_pages = pages

    def open_one(server: JupyterServer) -> NotebookPage:
        context = browser.new_context()
        contexts.append(context)
        page = NotebookPage(context.new_page(), server)
        pages.append(page)
        return page

    yield open_one
    pages.clear()
    for context in contexts:
        context.close()
