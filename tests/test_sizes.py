"""Files and functions stay small enough to be read whole."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from support.sources import nodes, texts

FILE_LINES = 600
FUNCTION_LINES = 60


def test_no_file_and_no_function_is_too_long() -> None:
    offenders = []
    for path, text in texts().items():
        lines = len(text.splitlines())
        offenders += [f"{path}: {lines} lines"] * (lines > FILE_LINES)
        offenders += [f"{path}: {function}" for function in too_long(nodes()[path])]
    assert offenders == []


def test_a_function_that_is_too_long_is_found_by_name() -> None:
    text = "def short():\n    pass\n\ndef long():\n" + "    pass\n" * FUNCTION_LINES
    assert too_long(ast.walk(ast.parse(text))) == [f"long: {FUNCTION_LINES + 1} lines"]


def too_long(among: Iterable[ast.AST]) -> list[str]:
    """Return the functions with too many lines, from ``def`` to their end."""
    functions = (node for node in among if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    sizes = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    return [f"{name}: {lines} lines" for name, lines in sizes.items() if lines > FUNCTION_LINES]
