"""The package keeps its layout: import order, no cycles, one class for each name, plain names,
and files and functions small enough to be read whole."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

from support.sources import nodes, texts, trees

FILE_LINES = 600
FUNCTION_LINES = 60

LAYERS = """
library
cli
view
report
bench check
runs
proxy
servers
batches sim
stages
agents
analysis hpc observe
fleet
tools store money
backends
answers
job
rows
text
"""
"""Packages from the top to the bottom; a module imports its own layer and those below it."""

RANKS = {name: rank for rank, line in enumerate(LAYERS.split("\n")) for name in line.split()}
BOTTOM = max(RANKS.values())

VAGUE_NAMES = {
    *("asked", "found", "given", "kept", "known", "left", "one", "place"),
    *("shown", "told", "wanted", "words"),
    *("_kept", "_said", "_shown", "_told", "_words"),
}


@cache
def modules() -> dict[str, str]:
    """Return the file of each module by its dotted name."""
    names = {path: path.removesuffix(".py").removesuffix("/__init__") for path in trees()}
    return {
        "bagent" if path == "__init__.py" else f"bagent.{name.replace('/', '.')}": path
        for path, name in names.items()
    }


def test_imports_go_down_the_layers() -> None:
    upwards = {
        f"{module} imports {imported}"
        for module, path in modules().items()
        for imported in imports(nodes()[path])
        if module not in ("bagent", "bagent.__main__") and rank(imported) < rank(module)
    }
    assert upwards == set()


def test_no_modules_import_each_other_at_the_top() -> None:
    graph = {
        module: set(imports(trees()[path].body)) & set(modules())
        for module, path in modules().items()
    }
    while removable := [name for name, targets in graph.items() if not targets & set(graph)]:
        for name in removable:
            del graph[name]
    assert graph == {}


def test_no_two_public_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for module, path in modules().items():
        for node in trees()[path].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_local_names_say_what_a_value_is() -> None:
    """Words that fit any value tell a reader nothing; fields of records may have them."""
    offenders = [
        f"{path}:{node.lineno}: {name}"
        for path, inside in nodes().items()
        if any(VAGUE_NAMES.intersection(bound_names(node)) for node in inside)
        for function in inside
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for name in bound_names(node)
        if name in VAGUE_NAMES
    ]
    assert offenders == []


def bound_names(node: ast.AST) -> list[str]:
    """Return the names that a node of a function binds, with its own if it is a function."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


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


def imports(among: Iterable[ast.AST]) -> Iterator[str]:
    """The modules of the package that the nodes import."""
    for node in among:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bagent":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())


def rank(module: str) -> int:
    """The layer of a module; modules outside the packages are at the bottom."""
    return RANKS.get(f"{module}.".split(".")[1], BOTTOM)
