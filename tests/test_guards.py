"""Data meets shells, SQL, code and the terminal only in the modules that guard the place."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from support.sources import PACKAGE, nodes

ROOT = PACKAGE.parent

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


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Return each call of the package: its module, the dotted name that it calls, its node."""
    return [
        (module, ast.unparse(node.func), node)
        for module, inside in nodes().items()
        for node in inside
        if isinstance(node, ast.Call)
    ]


@pytest.mark.parametrize(("pattern", "guards"), CALLS.values(), ids=CALLS)
def test_only_the_guard_of_a_place_calls_what_acts_on_data(pattern: str, guards: set[str]) -> None:
    callers = {module for module, name, _ in calls() if re.fullmatch(pattern, name)}
    assert callers <= guards


def test_no_program_is_started_by_a_shell_and_clients_follow_no_redirect() -> None:
    for module, name, node in calls():
        values = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert values.get("shell", "False") == "False", (module, node.lineno)
        if name.endswith(("session.get", "session.post", "_opened().get")):
            assert values.get("allow_redirects") == "False", (module, node.lineno)


SHELLS = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
ARGV_OF_A_SHELL = {
    "backends/keys.py": "api_key_command of the job",
    "tools/command_tool.py": "limits before exec, arguments as arguments",
    "tools/builtin/code.py": "the tool shell, for jobs that allow code",
    "hpc/allocation.py": "shell lines of the job",
}


def test_every_argv_that_begins_with_a_shell_is_known() -> None:
    result = {
        module
        for module, inside in nodes().items()
        for node in inside
        if isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1
        if isinstance(node.elts[0], ast.Constant) and isinstance(node.elts[0].value, str)
        if SHELLS.fullmatch(node.elts[0].value) and "-c" in ast.unparse(node)
    }
    assert result <= ARGV_OF_A_SHELL.keys()


def test_the_page_on_trust_names_files_that_are_there() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    named = re.findall(r"`((?:bagent|tests)/[\w/.]+\.py)`", text)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert "SECURITY.md" in (ROOT / "README.md").read_text("utf-8")
