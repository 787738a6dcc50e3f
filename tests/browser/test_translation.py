"""The page's texts in another language: those of a language pack, as JupyterLab loads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.harness.browser import NotebookPage
from tests.harness.server import Home, JupyterServer

pytestmark = pytest.mark.browser

TEXTS = {
    "Save kernel state": "Konservi la staton de la kerno",
    "Save Kernel State": "Konservi Kernostaton",
    "Restore Kernel State…": "Restarigi Kernostaton…",
    "Restore Kernel State": "Restarigi Kernostaton",
    "Kernel state saved (%1 in %2)": "Stato konservita (%1 en %2)",
    "Saved %1": "Konservita %1",
}


def add_language_pack(site: Path) -> None:
    """Install a pack for Esperanto with texts of this extension, and of nothing else."""
    package = site / "pack_eo"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    head = {"domain": "jupyter_gpu_ckpt", "language": "eo", "version": "1",
            "plural_forms": "nplurals=2; plural=(n != 1);"}  # fmt: skip
    texts = {"": head, **{text: [other] for text, other in TEXTS.items()}}
    (package / "jupyter_gpu_ckpt.json").write_text(json.dumps(texts))
    info = site / "pack_eo-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pack-eo\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[jupyterlab.languagepack]\neo = pack_eo\n")


def test_a_language_pack_reaches_the_button_the_menu_and_the_notices(
    home: Home, tmp_path: Path, open_page: Callable[[JupyterServer], NotebookPage]
) -> None:
    site = tmp_path / "site"
    add_language_pack(site)
    chosen = home.config / "lab" / "user-settings" / "@jupyterlab" / "translation-extension"
    chosen.mkdir(parents=True)
    (chosen / "plugin.jupyterlab-settings").write_text(json.dumps({"locale": "eo"}))
    path = home.add_notebook("laboro.ipynb", ["x = 41"])
    with JupyterServer(home, app="lab", environment={"PYTHONPATH": str(site)}) as server:
        page = open_page(server)
        page.open(path)
        page.run_cell(0)
        named = page.button.get_by_role("button", name=TEXTS["Save kernel state"])
        expect(named).to_be_visible()
        page.menu("Kernel", TEXTS["Save Kernel State"])
        page.notification("Stato konservita (")
        expect(page.button).to_contain_text("Konservita ")
        page.menu("Kernel", TEXTS["Restore Kernel State…"])
        expect(page.dialog(TEXTS["Restore Kernel State"])).to_be_visible()
