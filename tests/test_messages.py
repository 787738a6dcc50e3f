"""What users are told when something fails: sentences, and what to do about it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.test_imports import modules, relative

#: Of this nothing is to be done: somebody wanted it so, or there is nothing to do it with.
NOTHING_TO_DO = re.compile(
    r"^cancelled$|uses no GPU: there is nothing to park"
    r"|is parked already|is not (?:parked|hibernated)"
    r"|^Days are a number"  # says it already
)


class Told(NamedTuple):
    """One error, as it stands in the code; what is known later only reads as ``…``."""

    where: str
    is_clis: bool
    reason: str | None
    message: str | None
    hint: str | None
    has_hint: bool


def text_of(node: ast.expr | None) -> str | None:
    """The text of a literal; ``None`` for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in node.values)
    return None


def told() -> Iterator[Told]:
    """All errors for users that the package makes."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in ("CkptError", "CliError") or len(node.args) != 2:
                continue
            is_clis = node.func.id == "CliError"
            reason, message = node.args[:: -1 if is_clis else 1]
            hint = next((word.value for word in node.keywords if word.arg == "hint"), None)
            yield Told(
                f"{relative(path)}:{node.lineno}",
                is_clis,
                text_of(reason),
                text_of(message),
                text_of(hint),
                hint is not None and not (isinstance(hint, ast.Constant) and hint.value is None),
            )


def test_errors_say_in_sentences_what_is_so_and_what_to_do() -> None:
    seen = 0
    for where, is_clis, reason, message, hint, has_hint in told():
        for text in (message, hint):
            if text is not None:
                assert re.match(r"[A-Z…'`-]", text), f"{where}: {text}"
                # A command, or a cause in another program's words, ends as it ends.
                ends = r"[.?…)]$" if text is message else r"[.?…)\w]$"
                assert re.search(ends, text), f"{where}: {text}"
                assert "  " not in text and "\n" not in text, f"{where}: {text}"
        if message is not None:
            seen += 1
            plain = is_clis or NOTHING_TO_DO.search(f"{reason}") or NOTHING_TO_DO.search(message)
            assert has_hint or plain, f"{where}: what can be done about it? {message}"
    assert seen > 150
