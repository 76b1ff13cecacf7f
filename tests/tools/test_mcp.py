"""Tools of MCP servers: real servers, over pipes and over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bagent.errors import UsageError
from bagent.tools import ToolResult
from bagent.tools.mcp import McpConfig, McpServer
from support.jumping_loop import in_event_loop, skip
from support.tool_pools import asked, opened

pytestmark = [
    pytest.mark.slow,  # each test starts a real server
    pytest.mark.skipif(find_spec("mcp") is None, reason="needs the package mcp"),
]
SERVER = str(Path(__file__).parents[1] / "support/mcp_server.py")


def small(folder: Path, **keys: Any) -> dict[str, Any]:
    """The entry of the small server over pipes."""
    return {"mcp": {"command": [sys.executable, SERVER, "stdio", str(folder)]}, **keys}


def call(
    base: Path, name: str, entry: dict[str, Any] | None = None, **arguments: Any
) -> ToolResult:
    async def main() -> ToolResult:
        async with opened(base, entry or small(base)) as pool:
            return await pool.call(asked(name, **arguments))

    return asyncio.run(main())


def starts(folder: Path) -> list[int]:
    """The process ids of all starts of the small server."""
    return [int(line) for line in (folder / "starts").read_text().splitlines()]


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"


@in_event_loop
async def test_the_tools_of_a_server_are_listed_and_called_and_it_sees_no_secret(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, small(tmp_path, env={"NAMED": "x"})) as pool:
        assert {"add", "fail", "dotted_name", "environment"} <= set(pool.names)
        reading = [name for name in pool.names if not pool.has_side_effects(name)]
        definition = pool.definitions[0]["function"]
        added = await pool.call(asked("add", a=2, b=3))
        failed = await pool.call(asked("fail", words="no such ship"))
        dotted = await pool.call(asked("dotted_name"))
        environment = (await pool.call(asked("environment"))).text.split()
    assert reading == ["add", "die_once"]
    assert definition["description"] == "Add two numbers."
    assert definition["parameters"]["required"] == ["a", "b"]
    assert (added.text, added.error) == ("5", None)
    assert failed.error == "failed"
    assert "no such ship" in failed.text
    assert dotted.text == "dotted"
    assert "SECRET" not in environment
    assert {"PATH", "NAMED"} <= set(environment)
    # It is started once and ends with the pool.
    (process,) = starts(tmp_path)
    assert is_gone(process)


def test_tools_are_chosen_and_named_by_their_entry(tmp_path: Path) -> None:
    entry = small(tmp_path, name="my")
    entry["mcp"]["tools"] = ["add"]
    assert call(tmp_path, "my_add", entry, a=1, b=1).text == "2"
    entry["mcp"]["tools"] = ["nope"]
    with pytest.raises(UsageError, match=r"has no tool nope \(it has add "):
        call(tmp_path, "nope", entry)


@in_event_loop
async def test_a_server_that_died_is_started_once_more(tmp_path: Path) -> None:
    async with opened(tmp_path, small(tmp_path)) as pool:
        first = await pool.call(asked("add", a=1, b=1))
        os.kill(starts(tmp_path)[-1], signal.SIGKILL)
        again = await pool.call(asked("add", a=2, b=2))
        os.kill(starts(tmp_path)[-1], signal.SIGKILL)
        last = await pool.call(asked("add", a=3, b=3))
    assert (first.text, again.text) == ("2", "4")
    assert last.error == "failed"
    assert "restarted 1 time" in last.text
    assert len(starts(tmp_path)) == 2


@in_event_loop
async def test_a_call_with_side_effects_in_which_the_server_dies_is_not_run_again(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, small(tmp_path)) as pool:
        died, after = await pool.call(asked("die")), await pool.call(asked("add", a=1, b=1))
    assert died.error == "failed"
    assert "may have run" in died.text
    assert after.text == "2"
    assert len(starts(tmp_path)) == 2


def test_a_call_that_only_reads_is_run_again_when_its_server_died(tmp_path: Path) -> None:
    assert call(tmp_path, "die_once").text == "alive"
    assert len(starts(tmp_path)) == 2


@in_event_loop
async def test_calls_run_side_by_side_and_one_that_hangs_is_left(tmp_path: Path) -> None:
    async with opened(tmp_path, small(tmp_path, timeout=60)) as pool:
        hanging = asyncio.ensure_future(pool.call(asked("hang")))
        beside = await pool.call(asked("add", a=1, b=1))
        skip(61)
        hung = await hanging
        after = await pool.call(asked("add", a=2, b=2))
    assert (beside.text, hung.error, after.text) == ("2", "timeout", "4")
    assert len(starts(tmp_path)) == 1


LISTING = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        info = {"name": "odd", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif asked["method"] == "tools/list":
        if sys.argv[1] == "die":
            sys.exit("no licence left")
        schema = {"type": "object"}
        if sys.argv[1] == "odd":
            schema["properties"] = {"a": {"type": "int"}}
        result = {"tools": [{"name": name, "inputSchema": schema} for name in sys.argv[2:]]}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
"""A server that lists tools as its arguments say."""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["sh", "-c", "echo no key given >&2; exit 1"], "no key given"),
        (["no-such-server"], "no such program"),
        ([sys.executable, "-c", LISTING, "die"], "no licence left"),
    ],
    ids=["ends", "no program", "ends while it lists"],
)
def test_a_server_that_does_not_start_is_told_with_its_words(
    tmp_path: Path, command: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        call(tmp_path, "x", {"mcp": {"command": command}})
    assert message in str(caught.value)


@in_event_loop
async def test_a_server_that_hangs_at_its_start_is_given_up_and_ended(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo $$ > pid; exec sleep 1000"]
    server = McpServer(McpConfig(command=command, cwd=tmp_path, start_seconds=4))
    with pytest.raises(UsageError, match="no answer in 4 s"):
        await server.open()
    assert is_gone(int((tmp_path / "pid").read_text()))


@in_event_loop
async def test_what_a_server_writes_among_its_messages_is_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, str(Path(SERVER).with_name("odd_mcp_server.py")), str(tmp_path)]
    async with opened(tmp_path, {"mcp": {"command": command}}) as pool:
        assert pool.names == ["stays", "goes"]
        first, gone, again = [await pool.call(asked(name)) for name in ("stays", "goes", "stays")]
    assert (first.text, again.text) == ("still here", "still here")
    assert (gone.error, gone.text) == ("failed", "error: Unknown tool")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "words",
    [("object", "fine", "x" * 65), ("object", "fine", "a.b", "a_b"), ("odd", "fine")],
    ids=["long name", "equal names", "no schema"],
)
def test_what_a_server_lists_and_cannot_be_offered_is_told_with_the_way_to_choose(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        call(tmp_path, "fine", {"mcp": {"command": [sys.executable, "-c", LISTING, *words]}})
    assert "tools: [...]" in caught.value.hint


@in_event_loop
async def test_nothing_stays_open_when_another_tool_cannot_be_opened(tmp_path: Path) -> None:
    bad = {"name": "n", "command": ["no-such-program"]}
    with pytest.raises(UsageError, match="no-such-program"):
        async with opened(tmp_path, small(tmp_path), bad):
            raise AssertionError("it was opened")
    assert not (tmp_path / "starts").exists() or all(map(is_gone, starts(tmp_path)))


# --- over HTTP --------------------------------------------------------------------------------


@asynccontextmanager
async def http_server(folder: Path) -> AsyncIterator[str]:
    """The address of the small server over HTTP."""
    process = subprocess.Popen([sys.executable, SERVER, "http", str(folder)])
    try:
        until = time.monotonic() + 30
        while not (folder / "port").exists():
            assert process.poll() is None
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{(folder / 'port').read_text()}/mcp"
    finally:
        process.kill()
        process.wait()


@in_event_loop
async def test_a_server_is_called_over_http_with_its_headers(tmp_path: Path) -> None:
    async with http_server(tmp_path) as url:
        entry = {"mcp": {"url": url, "headers": {"X-Key": "k-1"}}}
        async with opened(tmp_path, entry) as pool:
            added = await pool.call(asked("add", a=2, b=3))
            key = await pool.call(asked("header"))
            failed = await pool.call(asked("fail", words="w"))
    assert (added.text, key.text, failed.error) == ("5", "k-1", "failed")


def test_an_address_that_nobody_serves_is_told_without_its_query(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        call(tmp_path, "x", {"mcp": "http://127.0.0.1:1/mcp?key=k-1"})
    assert "mcp: http://127.0.0.1:1/mcp:" in str(caught.value)
    assert "k-1" not in str(caught.value)
