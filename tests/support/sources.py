"""The source of the package: its texts and syntax trees, read once a process for all tests."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

import bagent

PACKAGE = Path(bagent.__file__).parent


@cache
def texts() -> dict[str, str]:
    """Return the text of each module by its path below the package, as ``fleet/retry.py``."""
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 100
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in paths}


@cache
def tree(path: str) -> ast.Module:
    """Return the syntax tree of a module, given its path below the package."""
    return ast.parse(texts()[path])


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by its path below the package."""
    # The collector would look at all nodes again and again, for twice as long as parsing takes.
    gc.disable()
    try:
        parsed = {path: tree(path) for path in texts()}
    finally:
        gc.freeze()
        gc.enable()
    return parsed


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Return all nodes of each module by its path below the package."""
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}
