"""Functions of users that do what no function of a tool should."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bagent.tools import ToolResult
from support.tool_pools import asked, opened

SOURCE = """
import asyncio, functools, sys

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def mute(kind: str) -> int:
    raise Mute

async def ends_its_loop(kind: str) -> str:
    loop = asyncio.get_running_loop()
    if kind == "stop":
        loop.stop()
    if kind == "raise":
        raise KeyboardInterrupt
    if kind == "task":
        async def leave():
            sys.exit(3)
        beside = loop.create_task(leave())
        await asyncio.sleep(0.01)
    return kind

def plainly(function):
    @functools.wraps(function)
    def wrapper(*args, **named):
        return function(*args, **named)
    return wrapper

@plainly
async def wrapped(x: int) -> list[int]:
    await asyncio.sleep(0)
    return [x]
"""


def results(folder: Path, function: str, *calls: dict[str, object]) -> list[ToolResult]:
    """What calls of one function of the source gave, one after the other."""
    (folder / "odd.py").write_text(SOURCE)

    async def main() -> list[ToolResult]:
        async with opened(folder, {"python": f"odd.py:{function}", "timeout": "20s"}) as pool:
            return [await pool.call(asked(function, **one)) for one in calls]

    return asyncio.run(main())


def test_an_exception_that_fails_to_say_its_words_is_a_fault_like_any_other(tmp_path: Path) -> None:
    (result,) = results(tmp_path, "mute", {"kind": "x"})
    assert (result.error, result.text) == ("failed", "error: Mute")


@pytest.mark.parametrize(
    ("kind", "text"), [("stop", "stop"), ("raise", "error: KeyboardInterrupt"), ("task", "task")]
)
def test_a_coroutine_that_ends_its_event_loop_ends_no_other_call(
    tmp_path: Path, kind: str, text: str
) -> None:
    first, second = results(tmp_path, "ends_its_loop", {"kind": kind}, {"kind": "later"})
    assert first.text == text
    assert (second.error, second.text) == (None, "later")


def test_a_coroutine_function_behind_a_plain_decorator_is_awaited(tmp_path: Path) -> None:
    (result,) = results(tmp_path, "wrapped", {"x": 4})
    assert (result.error, result.text) == (None, "[4]")
