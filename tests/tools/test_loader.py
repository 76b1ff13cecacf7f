"""From a job's entries to a pool: defaults, order, what is loaded, what is refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bagent.errors import MissingPackage
from bagent.tools import ToolPolicy
from support.jumping_loop import in_event_loop
from support.tool_pools import ENV, asked, opened

ENTRIES: dict[str, dict[str, Any]] = {
    "http_get": {"builtin": "http_get", "allow_hosts": ["example.org"]},
    "read_file": {"builtin": "read_file", "root": "."},
    "web_search": {"builtin": "web_search"},
    "sql": {"builtin": "sql", "files": ["a.csv"]},
    "python_eval": {"builtin": "python_eval"},
    "shell": {"builtin": "shell"},
    "f": {"python": "tools.py:f"},
    "run": {"name": "run", "command": ["true"]},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "tools.py").write_text(
        "import asyncio\n"
        "def f(x: int = 0) -> int:\n    return x\n"
        "async def loop_a() -> int:\n    return id(asyncio.get_running_loop())\n"
        "loop_b = loop_a\n"
    )
    return tmp_path


def policies(base: Path, **keys: Any) -> dict[str, tuple[ToolPolicy, bool]]:
    """The policy of every kind of tool, and whether it has side effects."""

    async def main() -> dict[str, tuple[ToolPolicy, bool]]:
        entries = [{**entry, **keys} for entry in ENTRIES.values()]
        env = {**ENV, "BRAVE_API_KEY": "k"}
        async with opened(base, *entries, env=env, allow_code=True) as pool:
            tools = [pool.tool(name) for name in pool.names]
            return {tool.name: (tool.policy, tool.side_effects) for tool in tools if tool}

    return asyncio.run(main())


def test_only_tools_without_side_effects_share_and_keep_by_default(base: Path) -> None:
    found = policies(base)
    reads = {"http_get", "read_file", "web_search", "sql"}
    assert {name for name, (_, effects) in found.items() if not effects} == reads
    assert {name for name, (policy, _) in found.items() if policy.coalesce} == reads
    kept = {name for name, (policy, _) in found.items() if policy.cache_seconds}
    assert kept == reads - {"read_file"}


def test_what_the_job_says_goes_before_the_defaults(base: Path) -> None:
    keys = {"cache": "5m", "coalesce": True, "timeout": "3s", "rate_limit": "30/m"}
    keys |= {"max_tokens": 7, "concurrency": 2}
    for policy, _ in policies(base, **keys).values():
        assert policy == ToolPolicy(3.0, 0.5, 300.0, True, 7, 2)
    for policy, _ in policies(base, cache=False, coalesce=False).values():
        assert (policy.cache_seconds, policy.coalesce) == (None, False)
    for policy, _ in policies(base, cache=True, timeout="none").values():
        assert (policy.cache_seconds, policy.timeout) == (60.0, None)


@in_event_loop
async def test_functions_of_one_file_share_an_event_loop_also_under_two_names(base: Path) -> None:
    entries = [{"python": f"tools.py:{name}"} for name in ("loop_a", "loop_b", "loop_a")]
    entries[2]["name"] = "again"
    async with opened(base, *entries) as pool:
        first, second, third = [
            (await pool.call(asked(name))).text for name in ("loop_a", "loop_b", "again")
        ]
    assert first == second == third


PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from bagent.job.spec.agent import ToolSpec
from bagent.job.validation import LoadContext
from bagent.tools import open_tools
base = Path(sys.argv[1])
context = LoadContext(base, base, {})
specs = [ToolSpec.model_validate(one, context=context) for one in json.loads(sys.argv[2])]
async def main():
    async with open_tools(specs, base, {"PATH": "/bin:/usr/bin"}) as pool:
        print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
asyncio.run(main())
"""


@pytest.mark.process("environment")
def test_packages_are_loaded_only_by_tools_that_need_them(base: Path) -> None:
    entries = [ENTRIES["http_get"], ENTRIES["read_file"], ENTRIES["f"]]
    command = [sys.executable, "-c", PROGRAM, str(base), json.dumps(entries)]
    loaded = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    heavy = {"duckdb", "mcp", "httpx2", "httpx", "openai", "boto3", "rich", "numpy"}
    assert heavy.isdisjoint(loaded)


@pytest.mark.parametrize(
    ("package", "entry", "hint"),
    [
        ("duckdb", ENTRIES["sql"], "pip install duckdb"),
        ("mcp", {"mcp": ["true"]}, "pip install 'mcp>=2.3,<3'"),
    ],
)
@in_event_loop
async def test_a_package_that_is_missing_is_told_with_the_command_that_mends_it(
    base: Path, monkeypatch: pytest.MonkeyPatch, package: str, entry: dict[str, Any], hint: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage) as caught:
        async with opened(base, entry):
            raise AssertionError("it was opened")
    assert hint in str(caught.value)
