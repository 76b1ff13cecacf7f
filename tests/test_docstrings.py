"""Every public name of the package says what it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.sources import PACKAGE, trees

Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_modules_classes_functions_and_methods_that_are_public_have_a_docstring() -> None:
    found = {path: silent(tree) for path, tree in trees().items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_docstring_of_a_package_names_its_modules() -> None:
    """Commands have a file each by their names, and README names the packages."""
    missing = {
        str(folder.relative_to(PACKAGE)): names
        for folder in {(PACKAGE / path).parent for path in trees()}
        - {PACKAGE, PACKAGE / "cli" / "commands"}
        if (names := unnamed(folder))
    }
    assert missing == {}


def unnamed(folder: Path) -> list[str]:
    """The modules and packages in a folder that its docstring does not name."""
    text = docstring(folder)
    return [name for name in sorted(modules(folder)) if not re.search(rf"\b{name}\b", text)]


def docstring(folder: Path) -> str:
    """The docstring of a package."""
    init = (folder / "__init__.py").relative_to(PACKAGE).as_posix()
    return ast.get_docstring(trees()[init]) or ""


def modules(folder: Path) -> set[str]:
    """The names of the modules and packages in a folder."""
    inner = {path.parent.name for path in folder.glob("*/__init__.py")}
    return inner | {path.stem for path in folder.glob("[a-z]*.py")}


def test_the_docstring_of_a_package_lists_no_module_that_is_gone() -> None:
    folders = {(PACKAGE / path).parent for path in trees()} - {PACKAGE}
    gone = {folder.name: listed(docstring(folder)) - modules(folder) for folder in folders}
    assert {package: names for package, names in gone.items() if names} == {}


def listed(text: str) -> set[str]:
    """The names in a line such as ``name, other   what they are``, or in a list of quoted names."""
    columns = re.findall(r"^([a-z_]+(?:, [a-z_]+)*)  +\w", text, re.MULTILINE)
    items = re.findall(r"(?:^- |; )(``[a-z_]+``(?:, ``[a-z_]+``)*):", text, re.MULTILINE)
    return {name.strip("`") for head in columns + items for name in head.split(", ")}


def test_what_is_silent_is_found_by_name_and_private_names_may_be() -> None:
    text = "class A:\n  def b(self): ...\n  def _c(self): ...\nclass _D:\n  def e(self): ...\n"
    assert silent(ast.parse(text)) == ["the module", "A", "A.b"]


def silent(tree: ast.Module) -> list[str]:
    """Return the public names of a module without a docstring, methods by class and name."""
    found = ["the module"] if ast.get_docstring(tree) is None else []
    return found + [name for name, node in _public(tree, "") if ast.get_docstring(node) is None]


def _public(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Named]]:
    for inner in node.body:
        if isinstance(inner, Named) and not inner.name.startswith("_"):
            yield prefix + inner.name, inner
            if isinstance(inner, ast.ClassDef):
                yield from _public(inner, f"{prefix}{inner.name}.")
