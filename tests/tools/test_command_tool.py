"""Programs as tools, and code that a model wrote, in real processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bagent.errors import UsageError
from bagent.tools import CallContext
from support.jumping_loop import in_event_loop, skip
from support.tool_pools import ENV, answers, asked, once, opened

SHOW = (
    "import json,os,sys; print(json.dumps([sys.argv[1:], json.load(sys.stdin), dict(os.environ)]))"
)
TEXT = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}


def python(code: str, *words: str, **keys: Any) -> dict[str, Any]:
    """A command that runs Python code."""
    argv = [sys.executable, "-c", code, *words]
    return {"name": "p", "command": argv, "parameters": {"type": "object"}, **keys}


def test_arguments_stand_on_stdin_as_one_object_and_in_their_places(tmp_path: Path) -> None:
    parameters = {
        "type": "object",
        "properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
    }
    entry = python(SHOW, "--q={q}", "{n}", "{o}", "{{else}}", "{q}{q}", parameters=parameters)
    given = {"q": "a b; $(id) {n}", "n": 5, "o": {"x": [1, None]}}
    argv, stdin, _ = json.loads(once(tmp_path, entry, given).text)
    assert stdin == given
    assert argv == ["--q=a b; $(id) {n}", "5", '{"x":[1,null]}', "{else}", "a b; $(id) {n}" * 2]
    assert json.loads(once(tmp_path, entry, {}).text)[0] == ["--q=", "", "", "{else}", ""]


@in_event_loop
async def test_a_command_without_parameters_has_those_of_its_places(tmp_path: Path) -> None:
    entry = {"name": "g", "command": [sys.executable, "-c", SHOW, "{pattern}", "{file}"]}
    async with opened(tmp_path, entry) as pool:
        assert pool.definitions[0]["function"]["parameters"] == {
            "type": "object",
            "properties": {"pattern": {"type": "string"}, "file": {"type": "string"}},
            "required": ["pattern", "file"],
            "additionalProperties": False,
        }


def test_no_secret_reaches_a_command_unless_it_is_named(tmp_path: Path) -> None:
    env = {**ENV, "OPENAI_API_KEY": "k", "LANG": "C.UTF-8", "AWS_SESSION_TOKEN": "t"}
    entry = python(SHOW)
    seen = json.loads(once(tmp_path, entry, {}, env=env).text)[2]
    assert set(seen) <= {"PATH", "HOME", "LANG", "LC_CTYPE", "PWD", "SHLVL", "_"}
    named = {**entry, "env": {"OPENAI_API_KEY": "k"}}
    seen = json.loads(once(tmp_path, named, {}, env=env).text)[2]
    assert seen["OPENAI_API_KEY"] == "k"
    assert "AWS_SESSION_TOKEN" not in seen


def test_an_end_other_than_0_is_a_fault_with_the_ends_of_stderr_and_output(tmp_path: Path) -> None:
    code = "import sys; sys.stderr.write('x' * 100_000 + ' the end'); print('out'); sys.exit(3)"
    result = once(tmp_path, python(code), {})
    assert result.error == "failed"
    assert "it ended with code 3" in result.text
    assert result.text.endswith("the end; out")
    assert len(result.text) < 2100
    result = once(tmp_path, python("import os; os.kill(os.getpid(), 9)"), {})
    assert (result.error, result.text) == ("failed", "error: it ended with signal 9")


def test_a_program_that_writes_without_end_is_stopped_and_its_start_kept(tmp_path: Path) -> None:
    entry = {"name": "y", "command": ["yes"], "max_tokens": 1_000_000}
    result = once(tmp_path, entry, {})
    assert result.error is None
    assert result.text.startswith("y\ny\n")
    assert result.text.endswith("[cut: the program wrote more and was stopped]")
    assert len(result.text) == pytest.approx(1 << 20, rel=0.001)


def test_a_program_need_not_read_its_input(tmp_path: Path) -> None:
    result = once(tmp_path, python("print('done')"), {"q": "x" * 1_000_000})
    assert result.text == "done\n"


@pytest.mark.parametrize(
    ("how", "setsid"),
    [("timeout", ""), ("deadline", "setsid"), ("cancelled", "setsid")],
    ids=["timeout", "deadline, own session", "cancelled, own session"],
)
@in_event_loop
async def test_the_program_and_what_it_started_are_killed(
    tmp_path: Path, how: str, setsid: str
) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    # The grandchild holds the pipe open: it is at its end only when both are dead.
    code = f"exec 3>{fifo}; {setsid} sleep 1000 & printf started >&3; sleep 1000"
    limit = 60 if how == "timeout" else 500
    entry = {"name": "p", "command": ["sh", "-c", code], "timeout": limit}
    aside = asyncio.get_running_loop().run_in_executor
    async with opened(tmp_path, entry) as pool:
        deadline = asyncio.get_running_loop().time() + 60 if how == "deadline" else None
        call = asyncio.ensure_future(pool.call(asked("p"), CallContext(deadline)))
        with await aside(None, fifo.open) as pipe:
            assert await aside(None, pipe.read, 7) == "started"
            if how == "cancelled":
                call.cancel()
            else:
                skip(61)
            assert await aside(None, pipe.read) == ""
        await asyncio.wait((call,))
        result = None if how == "cancelled" else call.result()
    assert result is None or result.error == "timeout"


def test_what_a_program_leaves_in_the_background_neither_lives_on_nor_holds_the_call(
    tmp_path: Path,
) -> None:
    entry = {"name": "b", "command": ["sh", "-c", "sleep 1000 & echo $!"]}
    result = once(tmp_path, entry, {}, deadline=20)
    assert result.error is None
    assert result.latency_ms < 10_000
    state = Path(f"/proc/{int(result.text)}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_preambles_of_headers_are_dropped_where_the_job_says_so(tmp_path: Path) -> None:
    code = "print('x-anthropic-billing: 1\\nX-Amz-Id: 2\\n\\nthe answer\\nx-amz-later: 3')"
    kept = once(tmp_path, python(code), {}).text
    assert kept.startswith("x-anthropic-billing")
    dropped = once(tmp_path, python(code, strip_preamble=True), {}).text
    assert dropped == "the answer\nx-amz-later: 3\n"
    other = once(tmp_path, python("print('x-other: 1\\nbody')", strip_preamble=True), {}).text
    assert other == "x-other: 1\nbody\n"


def test_claude_code_gets_its_task_as_text_and_works_in_the_folder_of_the_job(
    tmp_path: Path,
) -> None:
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\ncat\necho\npwd\n')
    program.chmod(0o755)
    env = {**ENV, "PATH": f"{program.parent}:{ENV['PATH']}"}
    result = once(tmp_path, {"command": "claude_code"}, {"prompt": "Fix it.\nNow."}, env=env)
    folder = os.path.realpath(tmp_path)
    assert result.text == f"--print --output-format text\nFix it.\nNow.\n{folder}\n"
    own = once(tmp_path, {"name": "own", "command": ["bin/claude"]}, {})
    assert own.text.endswith(f"{folder}\n")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "n", "command": ["no-such-program-here"]}, "no such program"),
        ({"name": "n", "command": ["./plain.txt"]}, "chmod +x ./plain.txt"),
        ({"command": "claude_code"}, "cannot run claude"),
        ({"name": "n", "command": ["true"], "parameters": {"type": "string"}}, "object"),
        ({"name": "a b", "command": ["true"]}, "letters, digits"),
        ({"name": "n", "command": ["true"], "parameters": {"properties": {"q": 1}}}, "not a JSON"),
    ],
)
def test_a_command_that_cannot_work_is_found_before_the_run(
    tmp_path: Path, entry: dict[str, Any], words: str
) -> None:
    (tmp_path / "plain.txt").write_text("")
    with pytest.raises(UsageError) as caught:
        once(tmp_path, entry, {})
    assert words in str(caught.value)


def test_an_argument_with_a_nul_character_is_a_fault(tmp_path: Path) -> None:
    entry = {"name": "e", "command": ["echo", "{q}"], "parameters": TEXT}
    result = once(tmp_path, entry, {"q": "a\0b"})
    assert result.error == "bad_arguments"


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
