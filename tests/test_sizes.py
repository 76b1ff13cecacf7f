"""Files and functions stay small enough to be read whole."""

from __future__ import annotations

import ast
from pathlib import Path

import bagent

PACKAGE = Path(bagent.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES = 600
FUNCTION_LINES = 60


def test_no_file_and_no_function_is_too_long() -> None:
    assert len(FILES) > 100
    offenders = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        offenders += [f"{path}: {lines} lines"] * (lines > FILE_LINES)
        offenders += [f"{path}: {function}" for function in too_long(text)]
    assert offenders == []


def test_a_function_that_is_too_long_is_found_by_name() -> None:
    text = "def short():\n    pass\n\ndef long():\n" + "    pass\n" * FUNCTION_LINES
    assert too_long(text) == [f"long: {FUNCTION_LINES + 1} lines"]


def too_long(text: str) -> list[str]:
    """The functions with too many lines, from ``def`` to their end."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                found.append(f"{node.name}: {lines} lines")
    return found
