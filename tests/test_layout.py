"""The package keeps its layout: import order, no cycles, one class for each name, plain names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import bagent

PACKAGE = Path(bagent.__file__).parent
LAYERS = """
cli
report
bench check
library
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

TREES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): ast.parse(path.read_text("utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}


def test_imports_go_down_the_layers() -> None:
    upwards = {
        f"{module} imports {imported}"
        for module, tree in TREES.items()
        for imported in imports(ast.walk(tree))
        if module not in ("bagent", "bagent.__main__") and rank(imported) < rank(module)
    }
    assert upwards == set()


def test_no_modules_import_each_other_at_the_top() -> None:
    graph = {module: set(imports(tree.body)) & set(TREES) for module, tree in TREES.items()}
    while removable := [name for name, targets in graph.items() if not targets & set(graph)]:
        for name in removable:
            del graph[name]
    assert graph == {}


def test_no_two_public_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def imports(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    """The modules of the package that the nodes import."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bagent":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in TREES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in TREES)


def rank(module: str) -> int:
    """The layer of a module; modules outside the packages are at the bottom."""
    return RANKS.get(f"{module}.".split(".")[1], BOTTOM)
