"""Every public name of the package says what it is, and packages how their parts work."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.sources import PACKAGE, nodes, trees

Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MAX_LINES = 25
SECTIONS = re.compile(r"^(How [^\n]+)\n-+\n(.*?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
FUNCTION = re.compile(r"`([\w/]+\.py):([\w.]+)`")
TITLES = {"a retry works", "a hostfile reload works", "a row runs", "an agent runs"}
TITLES |= {"a run starts", "a run resumes", "a report is made"}


def test_modules_classes_functions_and_methods_that_are_public_have_a_docstring() -> None:
    found = {path: silent(tree) for path, tree in trees().items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_docstring_of_a_package_names_its_modules() -> None:
    """Commands have a file each by their names, and README names the packages."""
    named = folders() - {PACKAGE / "cli" / "commands"}
    missing = {str(folder.relative_to(PACKAGE)): unnamed(folder) for folder in named}
    assert {package: names for package, names in missing.items() if names} == {}


def folders() -> set[Path]:
    """The folders of packages."""
    return {(PACKAGE / path).parent for path in trees()} - {PACKAGE}


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
    gone = {folder.name: listed(docstring(folder)) - modules(folder) for folder in folders()}
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


def test_the_sections_how_things_work_are_short_and_name_functions_that_exist() -> None:
    found = [
        (folder, title, text)
        for folder in folders()
        for title, text in SECTIONS.findall(docstring(folder))
    ]
    assert {title.removeprefix("How ") for _, title, _ in found} >= TITLES
    for folder, title, text in found:
        assert len(text.splitlines()) <= MAX_LINES
        functions = FUNCTION.findall(text)
        assert len(functions) >= 3
        for file, name in functions:
            path = folder / file if (folder / file).is_file() else PACKAGE / file
            inside = nodes()[path.relative_to(PACKAGE).as_posix()]
            names = {node.name for node in inside if isinstance(node, Named)}
            assert names >= set(name.split(".")), f"{title}: {file} has no {name}"
