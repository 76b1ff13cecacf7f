"""Python functions as tools: how they are found, called, stopped and gathered."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bagent.errors import UsageError
from bagent.tools import ToolResult
from support.jumping_loop import in_event_loop, skip, turns
from support.tool_pools import abandoned_runs, answers, asked, once, opened

SOURCE = '''
from __future__ import annotations
import asyncio, dataclasses, functools, sys, threading
import neighbour

@dataclasses.dataclass
class Ship:
    name: str
    built: int | None = None

def look_up(ship: Ship, tags: list[str] = [], exact: bool = False) -> dict:
    """Look a ship up.

    Args:
        ship: which one
    """
    return {"ship": ship, "tags": tags, "exact": exact, "kind": type(ship).__name__}

def near() -> str:
    return neighbour.WORD

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

ERRORS = {"exit": SystemExit, "stop": StopIteration, "key": KeyError, "mute": Mute}

def fails(kind: str) -> str:
    raise ERRORS[kind]("bad")

async def fails_async(kind: str) -> str:
    await asyncio.sleep(0)
    raise ERRORS[kind]("bad")

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

async def twice(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x

gate = threading.Event()

def wait_for_gate(x: int) -> int:
    gate.wait()
    return x

async def block(x: int) -> int:
    if x:
        gate.wait()
    return x

batches = []

def prices(ids: list[int], unit: str = "EUR") -> list[str]:
    batches.append(ids)
    return [f"{n} {unit}" for n in ids]

def prices_by_id(ids: list[int]) -> dict[int, str]:
    batches.append(ids)
    return {n: f"{n} EUR" for n in ids if n < 100}

async def prices_async(ids: list[int]) -> list[int]:
    batches.append(ids)
    return ids

def seen() -> list:
    return batches

plain = 5

class Thing:
    pass
'''


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("WORD = 'next door'\n")
    return tmp_path


def entry(function: str, **keys: Any) -> dict[str, Any]:
    return {"python": f"tools.py:{function}", **keys}


def gate(base: Path) -> threading.Event:
    """The gate in the file that was imported last."""
    file = str(base / "tools.py")
    modules = list(sys.modules.values())
    event: threading.Event
    *_, event = [one.gate for one in modules if getattr(one, "__file__", None) == file]
    return event


def test_a_function_gets_its_types_or_does_not_run_and_its_result_is_json(base: Path) -> None:
    ship = {"name": "Vasa", "built": 1628}
    result = once(base, entry("look_up"), {"ship": ship, "exact": True})
    assert json.loads(result.text) == {"ship": ship, "tags": [], "exact": True, "kind": "Ship"}
    for wrong in ({}, {"ship": {"name": 5}}, {"ship": {"name": "x"}, "exact": 1}):
        assert once(base, entry("look_up"), wrong).error == "bad_arguments"


@in_event_loop
async def test_the_definition_comes_from_signature_and_docstring(base: Path) -> None:
    async with opened(base, entry("look_up"), entry("twice", name="t2", description="d")) as p:
        first, second = [one["function"] for one in p.definitions]
    assert (first["name"], first["description"]) == ("look_up", "Look a ship up.")
    assert first["parameters"]["properties"]["ship"]["description"] == "which one"
    assert first["parameters"]["required"] == ["ship"]
    assert (second["name"], second["description"]) == ("t2", "d")


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        ("near", {}, "next door"),
        ("twice", {"x": 4}, "8"),
        ("wrapped", {"x": 4}, "[4]"),
        ("fails", {"kind": "exit"}, "error: SystemExit: bad"),
        ("fails", {"kind": "stop"}, "error: StopIteration: bad"),
        ("fails", {"kind": "mute"}, "error: Mute"),
        ("fails_async", {"kind": "exit"}, "error: SystemExit: bad"),
        ("fails_async", {"kind": "key"}, "error: KeyError: 'bad'"),
    ],
)
def test_what_a_function_returns_or_raises_goes_back(
    base: Path, function: str, arguments: dict[str, Any], text: str
) -> None:
    result = once(base, entry(function), arguments)
    assert (result.text, result.error == "failed") == (text, text.startswith("error: "))


@in_event_loop
async def test_a_blocking_function_is_left_at_its_time_limit_and_counted(base: Path) -> None:
    async with opened(base, entry("wait_for_gate", timeout=60)) as pool:
        hanging = asyncio.ensure_future(pool.call(asked("wait_for_gate", x=1)))
        await turns()
        skip(61)
        first = await hanging
        abandoned = abandoned_runs(pool, "wait_for_gate")
        gate(base).set()
        async with asyncio.timeout(20):
            while abandoned_runs(pool, "wait_for_gate"):
                await asyncio.sleep(0.01)
        second = await pool.call(asked("wait_for_gate", x=2))
    assert (first.error, abandoned) == ("timeout", 1)
    assert second.text == "2"


@in_event_loop
async def test_a_tool_whose_calls_all_hang_is_not_started_for_ever(base: Path) -> None:
    async with opened(base, entry("wait_for_gate", timeout=0.2, concurrency=100)) as pool:
        hung = await answers(pool, "wait_for_gate", [{"x": x} for x in range(64)])
        refused = await pool.call(asked("wait_for_gate", x=100))
        gate(base).set()
    assert {result.error for result in hung} == {"timeout"}
    assert refused.error == "overloaded"


@pytest.mark.parametrize(
    ("kind", "text"), [("stop", "stop"), ("raise", "error: KeyboardInterrupt"), ("task", "task")]
)
@in_event_loop
async def test_a_coroutine_that_ends_its_event_loop_ends_no_other_call(
    base: Path, kind: str, text: str
) -> None:
    async with opened(base, entry("ends_its_loop", timeout="20s")) as pool:
        first = await pool.call(asked("ends_its_loop", kind=kind))
        second = await pool.call(asked("ends_its_loop", kind="later"))
    assert first.text == text
    assert (second.error, second.text) == (None, "later")


@in_event_loop
async def test_a_coroutine_that_blocks_stops_neither_the_run_nor_later_calls(base: Path) -> None:
    async with opened(base, entry("block", timeout=60)) as pool:
        blocked = asyncio.ensure_future(pool.call(asked("block", x=1)))
        await turns()
        skip(61)
        first = await blocked
        async with asyncio.timeout(20):
            while not abandoned_runs(pool, "block"):
                await asyncio.sleep(0.01)
        second = await pool.call(asked("block", x=0))
        gate(base).set()
        abandoned = abandoned_runs(pool, "block")
    assert (first.error, second.text, abandoned) == ("timeout", "0", 1)


# --- gathering --------------------------------------------------------------------------------


def gathered(
    base: Path, function: str, calls: list[dict[str, Any]], **keys: Any
) -> tuple[list[ToolResult], list[list[int]]]:
    """The results of calls that come together, and the lists that the function got."""

    async def main() -> tuple[list[ToolResult], list[list[int]]]:
        entries = (entry(function, batch="ids", **keys), entry("seen"))
        async with opened(base, *entries) as pool:
            results = await answers(pool, function, calls)
            return results, json.loads((await pool.call(asked("seen"))).text)

    return asyncio.run(main())


@pytest.mark.parametrize("function", ["prices", "prices_by_id", "prices_async"])
def test_lists_of_calls_that_come_together_are_one_list(base: Path, function: str) -> None:
    calls: list[dict[str, Any]] = [{"ids": [1, 2]}, {"ids": [3]}, {"ids": []}, {"ids": [2, 1]}]
    results, batches = gathered(base, function, calls, coalesce=True)
    assert batches == [[1, 2, 3]]
    unit = "" if function == "prices_async" else " EUR"
    numbers = [["1", "2"], ["3"], [], ["2", "1"]]
    found = [[str(item) for item in json.loads(result.text)] for result in results]
    assert found == [[number + unit for number in one] for one in numbers]


def test_items_are_asked_as_often_as_they_were_named_unless_calls_may_be_shared(base: Path) -> None:
    results, batches = gathered(base, "prices_by_id", [{"ids": [1]}, {"ids": [1, 1, 100]}])
    assert batches == [[1, 1, 1, 100]]
    # An item that a mapping lacks is null.
    assert [json.loads(result.text) for result in results] == [["1 EUR"], ["1 EUR"] * 2 + [None]]


def test_calls_that_differ_in_other_arguments_are_called_apart(base: Path) -> None:
    calls: list[dict[str, Any]] = [{"ids": [1]}, {"ids": [2], "unit": "USD"}, {"ids": [3]}]
    results, batches = gathered(base, "prices", calls, coalesce=True)
    assert batches == [[1, 3], [2]]
    assert [json.loads(result.text) for result in results] == [["1 EUR"], ["2 USD"], ["3 EUR"]]


# --- what is found before the run -------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"python": "nope.py:f"}, "nope.py: no such file"),
        ({"python": "tools.py:look_down"}, "no function look_down (did you mean look_up?)"),
        ({"python": "tools.py:plain"}, "not a function: plain"),
        ({"python": "tools.py:Thing"}, "not a function: Thing"),
        ({"python": "bare.py:f"}, "bare.py:3: f cannot be a tool: its parameter x has no"),
        ({"python": "syntax.py:f"}, "syntax.py:2:"),
        ({"python": "raises.py:f"}, "raises.py:2: importing it fails: ValueError: no"),
        ({"python": "missing.py:f"}, "missing.py:1: no module named surely_not_here (pip install"),
        ({"python": "exits.py:f"}, "exits.py:1: importing it fails: SystemExit: 3"),
        ({"python": "tools.py:prices", "batch": "unit"}, "its lists: ids"),
        ({"python": "tools.py:prices", "name": "a.b"}, "letters, digits"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_told_with_its_place(
    base: Path, keys: dict[str, Any], words: str
) -> None:
    (base / "bare.py").write_text("import os\n\ndef f(x): ...\n")
    (base / "syntax.py").write_text("x = 1\ndef f(:\n")
    (base / "raises.py").write_text("x = 1\nraise ValueError('no')\n")
    (base / "missing.py").write_text("import surely_not_here.sub\n")
    (base / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UsageError) as caught:
        once(base, keys, {})
    assert words in str(caught.value)


@in_event_loop
async def test_two_tools_of_one_name_are_told(base: Path) -> None:
    with pytest.raises(UsageError, match="two tools are named near"):
        async with opened(base, entry("near"), {"name": "near", "command": ["true"]}):
            raise AssertionError("they were opened")
