"""Code that a model wrote, in real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bagent.errors import UsageError
from support.jumping_loop import in_event_loop
from support.tool_pools import ENV, answers, once, opened

PYTHON = {"builtin": "python_eval"}
SHELL = {"builtin": "shell"}


@pytest.mark.parametrize("name", ["python_eval", "shell"])
def test_code_runs_only_where_the_job_allows_it(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, {"builtin": name}):
            raise AssertionError("it was opened")

    with pytest.raises(UsageError, match="allow_code"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("entry", "arguments", "text"),
    [
        (PYTHON, {"code": "x = 2\nprint('a')\nx + 1"}, "a\n3\n"),
        (PYTHON, {"code": "None"}, ""),
        (PYTHON, {"code": "if __name__ == '__main__':\n    print('main')"}, "main\n"),
        (SHELL, {"command": "cat; echo a | tr a b; exit"}, "b\n"),
    ],
)
def test_code_gives_what_it_prints_and_python_its_last_value(
    tmp_path: Path, entry: dict[str, Any], arguments: dict[str, Any], text: str
) -> None:
    result = once(tmp_path, entry, arguments)
    assert (result.text, result.error) == (text, None)


@pytest.mark.parametrize(
    ("entry", "arguments"),
    [
        (PYTHON, {"code": "import os; print(dict(os.environ))"}),
        (SHELL, {"command": "env"}),
    ],
)
def test_code_sees_no_secrets_and_not_the_home_of_the_user(
    tmp_path: Path, entry: dict[str, Any], arguments: dict[str, Any]
) -> None:
    env = {**ENV, "API_KEY": "k-123"}
    shown = once(tmp_path, entry, arguments, env=env).text
    assert not any(word in shown for word in ("k-123", "s3cret", "/nonexistent"))
    named = {**entry, "env": {"API_KEY": "k-123"}}
    assert "k-123" in once(tmp_path, named, arguments, env=env).text


@in_event_loop
async def test_every_call_has_an_empty_folder_of_its_own_that_is_gone_after_it(
    tmp_path: Path,
) -> None:
    call = {"command": "ls -A; touch left-behind; pwd"}
    async with opened(tmp_path, SHELL, allow_code=True) as pool:
        results = await answers(pool, "shell", [call, call])
    folders = [Path(result.text.strip()) for result in results]
    assert len(set(folders)) == 2
    assert not any(folder.exists() or folder.parent.exists() for folder in folders)


def test_code_runs_in_the_root_of_the_tool_where_it_has_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("")
    assert once(tmp_path, {**SHELL, "root": "data"}, {"command": "ls"}).text == "a.txt\n"
    with pytest.raises(UsageError, match="no such folder"):
        once(tmp_path, {**SHELL, "root": "nope"}, {"command": "ls"})


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("x = bytearray(16 << 30)", "failed", "MemoryError"),
        ("open('big', 'wb').truncate(1 << 30)", "failed", ""),
        ("while True: pass", "timeout", ""),
    ],
)
def test_memory_files_and_time_of_code_are_bounded(
    tmp_path: Path, code: str, error: str, words: str
) -> None:
    limit = 3 if error == "timeout" else 100
    result = once(tmp_path, {**PYTHON, "timeout": limit}, {"code": code})
    assert result.error == error
    assert words in result.text
