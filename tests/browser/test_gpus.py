"""Kernels with memory on GPUs, on the page: simulated GPUs (`tests/simgpu`), real CRIU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.harness.browser import NotebookPage
from tests.harness.contrast import contrasts
from tests.harness.gpus import PRELUDE, GpuNode
from tests.harness.server import Home, JupyterServer, shared_folder
from tests.simgpu.simgpu import gpu

pytestmark = [pytest.mark.browser, pytest.mark.root]

MIB = 1 << 20
CELLS = [
    f"{PRELUDE}\ngpu = Gpu(0); data = gpu.upload(bytes(range(256)) * 4096)",
    "gpu.use(); print(gpu.checksum(data, MIB))",
]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with shared_folder("page-gpus") as folder:
        yield folder


@pytest.fixture(scope="module")
def node(place: Path) -> Iterator[GpuNode]:
    with GpuNode("gpu-page", place, gpu(0), gpu(1)) as one:
        yield one


@pytest.fixture(scope="module")
def page(place: Path, node: GpuNode, browser: Browser) -> Iterator[NotebookPage]:
    with JupyterServer(Home(place / "home"), node=node, app="lab") as server:
        context = browser.new_context()
        page = NotebookPage(context.new_page(), server)
        page.open(server.home.add_notebook("work.ipynb", CELLS))
        page.run_cell(0)
        page.run_cell(1)
        yield page
        context.close()


def test_the_gpu_to_restore_onto_is_chosen_by_keyboard(page: NotebookPage, node: GpuNode) -> None:
    checksum = page.output(1)
    assert (node.machine.used(0), node.machine.used(1)) == (MIB, 0)
    page.press_save()
    page.notification("Kernel state saved")
    page.close_dialogs()
    page.menu("Kernel", "Restore Kernel State…")
    dialog = page.dialog("Restore Kernel State")
    choice = dialog.get_by_label("Restore GPU 1 (")
    expect(choice).to_be_visible()
    expect(choice.locator("option:checked")).to_have_text("Automatic")
    found = contrasts(page.page, ".jp-gpu-ckpt-gpus")
    assert found and min(found.values()) >= 4.5, found
    choice.focus()
    page.page.keyboard.type("GPU 1")
    expect(choice.locator("option:checked")).to_have_text(re.compile(r"^GPU 1: .+ free$"))
    dialog.get_by_role("button", name="Roll Back").click()
    page.dialog("Roll Back Kernel?").get_by_role("button", name="Roll Back").click()
    page.notification("Kernel state restored")
    assert (node.machine.used(0), node.machine.used(1)) == (0, MIB)
    page.run_cell(1)
    assert page.output(1) == checksum


def test_a_parked_kernel_frees_its_gpu_and_a_cell_gets_it_back(
    page: NotebookPage, node: GpuNode
) -> None:
    def used() -> int:
        return node.machine.used(0) + node.machine.used(1)

    page.close_dialogs()
    page.run_cell(1)
    checksum = page.output(1)
    assert used() >= MIB
    page.wait_idle()
    node.machine.faults("cuCheckpointProcessCheckpoint * delay 1000")
    page.menu("Kernel", "Park GPU")
    expect(page.button).to_contain_text("Parking…")
    page.notification("GPU parked (")
    node.machine.faults()
    button = page.button.locator(".jp-ToolbarButtonComponent")
    expect(button).to_have_text("Parked")
    expect(button).to_have_attribute("aria-label", re.compile("^GPU parked: .+ in host memory"))
    expect(page.button.get_by_role("status")).to_have_text("GPU parked")
    found = contrasts(page.page, ".jp-gpu-ckpt-button")
    assert found and min(found.values()) >= 4.5, found
    assert used() == 0

    page.run_cell(1)
    assert page.output(1) == checksum
    expect(button).not_to_have_text("Parked")
    assert used() >= MIB

    # By the keyboard alone, there and back; the one command takes the place of the other.
    page.wait_idle()
    page.palette("Park GPU")
    expect(button).to_have_text("Parked")
    page.palette("Unpark GPU")
    page.notification("GPU unparked (")
    assert used() >= MIB
    # What is said of it is one notice at a time.
    expect(page.page.locator(".Toastify__toast").filter(has_text="parked")).to_have_count(1)
