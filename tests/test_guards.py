"""Data meets shells, SQL, code and the terminal only in the modules that guard the place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bagent

PACKAGE = Path(bagent.__file__).parent
ROOT = PACKAGE.parent
Trees = dict[str, ast.Module]

CALLS = {
    "a shell": (
        r"os\.(system|popen)|subprocess\.(getoutput|getstatusoutput)|.*create_subprocess_shell",
        set(),
    ),
    "DuckDB": (r"duckdb\.connect", {"duck.py"}),
    "code": (r"eval|exec|compile|pickle\.\w+|marshal\.\w+|yaml\.(load|unsafe_load)", {
        "tools/builtin/_python_runner.py",  # in a process of its own, for jobs that allow code
    }),
    "an archive": (r".*\.extractall", {"hpc/staging.py"}),
    "a guessable file": (r"tempfile\.mktemp|mktemp", set()),
    "a bare print": (r"print|input", {"cli/process.py", "cli/commands/query.py"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def modules() -> Trees:
    """The syntax trees of the package by path."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in PACKAGE.rglob("*.py")
    }


@pytest.fixture(scope="module")
def calls(modules: Trees) -> dict[str, set[str]]:
    """The dotted names that each module calls."""
    return {module: set(called(tree)) for module, tree in modules.items()}


def called(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if re.fullmatch(r"[\w.]+", name):
                yield name


@pytest.mark.parametrize(("pattern", "guards"), CALLS.values(), ids=CALLS)
def test_only_the_guard_of_a_place_calls_what_acts_on_data(
    pattern: str, guards: set[str], calls: dict[str, set[str]]
) -> None:
    callers = {
        module
        for module, names in calls.items()
        if any(re.fullmatch(pattern, name) for name in names)
    }
    assert callers <= guards


def test_no_program_is_started_by_a_shell(modules: Trees) -> None:
    keywords = [
        (module, node.lineno)
        for module, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "shell" and ast.unparse(keyword.value) != "False"
    ]
    assert keywords == []


SHELLS = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
ARGV_OF_A_SHELL = {
    "backends/keys.py": "api_key_command of the job",
    "tools/subprocess_runner.py": "limits before exec, arguments as arguments",
    "tools/builtin/code.py": "the tool shell, for jobs that allow code",
    "hpc/launcher.py": "shell lines of the job",
}


def test_every_argv_that_begins_with_a_shell_is_known(modules: Trees) -> None:
    result = {
        module
        for module, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1
        if isinstance(node.elts[0], ast.Constant) and isinstance(node.elts[0].value, str)
        if SHELLS.fullmatch(node.elts[0].value) and "-c" in ast.unparse(node)
    }
    assert result <= ARGV_OF_A_SHELL.keys()


def test_clients_follow_no_redirect(modules: Trees) -> None:
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("session.get", "session.post", "_opened().get")
            ):
                keyword_values = {
                    keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords
                }
                assert keyword_values.get("allow_redirects") == "False", (module, node.lineno)


def test_the_page_on_trust_names_files_that_are_there() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    named = re.findall(r"`((?:bagent|tests)/[\w/.]+\.py)`", text)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert "SECURITY.md" in (ROOT / "README.md").read_text("utf-8")
