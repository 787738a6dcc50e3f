"""The layers of docs/design.md, section 2: who may import whom, and how big a module may be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import jupyter_gpu_ckpt

PACKAGE = Path(jupyter_gpu_ckpt.__file__).parent
DESIGN = PACKAGE.parent / "docs" / "design.md"
NAME = "jupyter_gpu_ckpt"
MAX_LINES = 400

# From the top down. A module may import only from layers below its own; the faces and the
# bottom layers do not know their neighbours either.
FACES = {"app", "handlers", "cli", "hub"}
BOTTOM = {"capture", "store"}
#: Below `capture`, which asks whether a state's GPU memory fits.
GPUS = {"gpus"}
WORDS = {"errors", "models", "moments", "outside", "parked", "progress", "saved_gpus"}
GENERATED = {"_version"}
#: Imports between neighbours that the design allows.
ALLOWED = {
    ("app", "handlers"), ("models", "errors"), ("models", "outside"), ("models", "parked"),
    ("models", "saved_gpus"),
}  # fmt: skip

JUPYTER = {
    "jupyter_client", "jupyter_core", "jupyter_events", "jupyter_server", "jupyterlab",
    "ipykernel", "IPython", "notebook", "tornado", "traitlets", "zmq",
}  # fmt: skip


def modules() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.is_relative_to(PACKAGE / "labextension") and path.stem not in GENERATED
    ]


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part(path: Path) -> str:
    """The top-level module or subpackage that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Absolute dotted names that a file imports, and whether that happens when it runs."""
    package = [NAME, *path.relative_to(PACKAGE).parts[:-1]]
    tree = ast.parse(path.read_text())
    only_for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        runs = id(node) not in only_for_types
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, runs
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}", runs


def own_parts(path: Path) -> Iterator[tuple[str, bool]]:
    """Top-level parts of this package that a file imports."""
    for name, runs in imports(path):
        pieces = name.split(".")
        if pieces[0] == NAME and len(pieces) > 1 and not pieces[1].startswith("_"):
            yield pieces[1], runs


def layer(name: str) -> int:
    """0 for the bottom; what is named nowhere belongs to the middle, where things are joined."""
    for number, names in enumerate((WORDS, GPUS, BOTTOM)):
        if name in names:
            return number
    return 4 if name in FACES else 3


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_imports_only_what_is_below(path: Path) -> None:
    me = part(path)
    if me == "__init__":
        # What a server and what a kernel load.
        assert {name for name, _ in own_parts(path)} <= {"app", "magics"}
        return
    for other, _ in own_parts(path):
        if other == me or (me, other) in ALLOWED:
            continue
        if layer(me) == layer(other) == 3:
            continue  # neighbours in the middle: test_the_middle_has_no_cycles
        assert layer(other) < layer(me), f"{relative(path)} may not import {other}"


@pytest.mark.parametrize(
    "path", [p for p in modules() if part(p) in BOTTOM | GPUS | WORDS], ids=relative
)
def test_the_bottom_knows_nothing_of_jupyter(path: Path) -> None:
    assert not {name.split(".")[0] for name, _ in imports(path)} & JUPYTER


def test_the_middle_has_no_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in modules():
        me = part(path)
        graph.setdefault(me, set()).update(
            other for other, runs in own_parts(path) if runs and other != me
        )
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {error.args[1]}")


def test_every_part_is_in_the_design() -> None:
    layers = DESIGN.read_text().split("## 2.")[1].split("## 3.")[0]
    named = set(re.findall(r"\b([a-z_]+)(?:\.py|/)", layers))
    assert {part(path) for path in modules()} - {"__init__", "__main__"} <= named


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_modules_stay_small_and_have_a_subject(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{relative(path)} has {lines} lines: split it by concern"
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}


def test_only_capture_runs_the_native_program() -> None:
    for path in modules():
        if part(path) not in {"capture", "gpus"}:  # these have a program of their own
            starts = [name for name, _ in imports(path) if name.split(".")[0] == "subprocess"]
            text = path.read_text()
            assert "create_subprocess" not in text, relative(path)
            assert not starts or "Popen(" not in text, relative(path)
