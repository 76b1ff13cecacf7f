"""The sections "How ..." of the packages name functions that exist, and are short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from support.sources import PACKAGE, texts, tree

MAX_LINES = 25
SECTIONS = re.compile(r"^(How [^\n]+)\n-+\n(.*?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
FUNCTION = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def sections() -> list[tuple[Path, str, str]]:
    """Folder, title and text of each section in the docstring of a package."""
    found = []
    for path in texts():
        if path.endswith("__init__.py"):
            docstring = ast.get_docstring(tree(path)) or ""
            folder = (PACKAGE / path).parent
            found += [(folder, title, text) for title, text in SECTIONS.findall(docstring)]
    return found


def names_in(path: Path) -> set[str]:
    """The classes, functions and methods of a module."""
    names: set[str] = set()

    def add(node: ast.AST, prefix: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + inner.name)
                if isinstance(inner, ast.ClassDef):
                    add(inner, f"{prefix}{inner.name}.")

    add(tree(path.relative_to(PACKAGE).as_posix()), "")
    return names


TITLES = [
    "How a retry works",
    "How a hostfile reload works",
    "How a row runs",
    "How an agent runs",
    "How a run starts",
    "How a run resumes",
    "How a report is made",
]


def test_the_sections_are_there() -> None:
    assert {title for _, title, _ in sections()} >= set(TITLES)


def test_what_a_section_names_exists() -> None:
    for folder, title, text in sections():
        assert len(text.splitlines()) <= MAX_LINES
        functions = FUNCTION.findall(text)
        assert len(functions) >= 3
        for file, name in functions:
            path = folder / file if (folder / file).is_file() else PACKAGE / file
            assert path.is_file(), f"{title}: there is no {file}"
            assert name in names_in(path), f"{title}: {file} has no {name}"
