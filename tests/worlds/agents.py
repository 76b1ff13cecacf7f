"""Agents of a world: what their models ask for, and the tools that answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec

from bagent.tools import threads
from worlds.clock import WorldClock
from worlds.spec import RowSpec

Json = Any

MAX_TURNS = 6
"""``agent.max_turns`` of the job."""

TOOL_SECONDS = 5.0
"""Time limit of a tool."""

TOOL_TOKENS = 200
"""``max_tokens`` of a tool."""

TOOLS_FILE = b"from worlds.agents import act, look\n"

NOTES = {f"note{number}": f"note {number}" for number in range(3)}
"""The files that the tool ``read`` reads, which has no side effects."""

FAULTY = frozenset({"fail", "exit", "hang", "junk", "object"})
"""What a call does where its answer is an error."""


def job_keys(rate: float | None = None) -> dict[str, Json]:
    """Return the keys of a job with tools, of which ``act`` may run so often a second."""
    paced = {} if rate is None else {"rate_limit": f"{rate:g}/s"}
    policy = {"timeout": TOOL_SECONDS, "max_tokens": TOOL_TOKENS}
    return {
        "agent": {
            "max_turns": MAX_TURNS,
            "tools": [
                {"python": "tools.py:act", **policy, **paced},
                {"python": "tools.py:look", "coalesce": True, "cache": 10, **policy},
                {"builtin": "read_file", "name": "read", "root": "notes", **policy},
            ],
        }
    }


# --- the model ------------------------------------------------------------------------------------


def tool_calls(row: RowSpec, number: int, version: int, turn: int) -> list[dict[str, Json]]:
    """Return the calls that the model asks for in a turn, in the form of a chat answer.

    Servers differ in ids: some send good ones, some the same for all calls, some none.
    """
    entries = []
    for index, call in enumerate(row.calls[turn]):
        tool, _, does = call.partition(":")
        arguments: dict[str, Json] = {"topic": index, "does": does}
        if tool == "read":
            arguments = {"path": "missing" if does == "fail" else f"note{index}"}
        elif tool != "look":
            arguments = {
                "row": number, "version": version, "turn": turn, "number": index, "does": does,
            }  # fmt: skip
        text = '{"row": ' if does == "junk" else msgspec.json.encode(arguments).decode()
        name = (f"c{turn}-{index}", "call_0", "")[number % 3]
        function = {"name": tool, "arguments": text}
        entries.append({"id": name, "type": "function", "function": function})
    return entries


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to one call as a later request holds it."""

    turn: int
    call: int
    """The number of the call, as its arguments say; where they do not, its position."""
    tool: str
    arguments: str
    text: str


def read_conversation(messages: list[dict[str, Json]]) -> tuple[int, list[ToolAnswer], str]:
    """Return the turns of a conversation, the answers to their calls, and what is wrong with it."""
    answers: list[ToolAnswer] = []
    turns, pending, wrong, ids = 0, list[dict[str, Json]](), "", set[str]()
    for message in messages[1:]:
        if message["role"] == "assistant":
            wrong = wrong or (f"{pending} have no answer" if pending else "")
            pending = list(message.get("tool_calls") or ())
            for call in pending:
                if not call["id"] or call["id"] in ids:
                    wrong = wrong or f"the id of {call} is not its own"
                ids.add(call["id"])
            turns += 1
            total = len(pending)
        elif message["role"] == "tool" and pending:
            call = pending.pop(0)
            if call["id"] != message["tool_call_id"]:
                wrong = wrong or f"{message} answers {call}"
            function = call["function"]
            answers.append(
                ToolAnswer(
                    turns - 1,
                    _number(function["arguments"], total - len(pending) - 1),
                    function["name"],
                    function["arguments"],
                    message["content"],
                )
            )
        else:
            wrong = wrong or f"{message} answers nothing"
    return turns, answers, wrong or (f"{pending} have no answer" if pending else "")


def _number(arguments: str, position: int) -> int:
    values = msgspec.json.decode(arguments)
    return values.get("number", values.get("topic", position))


# --- tools ----------------------------------------------------------------------------------------


@dataclass
class ToolRun:
    """One run of a tool."""

    start: int
    tool: str
    arguments: dict[str, Json]
    began: float
    ended: float | None = None
    """None: it was stopped, or its process died."""


@dataclass
class ToolBox:
    """Runs tools in the event loop of a world, and notes their runs."""

    clock: WorldClock
    runs: list[ToolRun] = field(default_factory=list)
    start: int = 0

    async def run(self, tool: str, arguments: dict[str, Json], text: str) -> str:
        """Do what a call says."""
        run = ToolRun(self.start, tool, arguments, self.clock.now)
        self.runs.append(run)
        does = arguments["does"]
        await asyncio.sleep({"slow": 4.0, "hang": 1000.0, "quick": 0.0}.get(does, 0.3))
        run.ended = self.clock.now
        if does == "fail":
            raise RuntimeError(f"no luck with {text}")
        if does == "exit":
            raise SystemExit(text)
        if does == "object":
            return object()  # type: ignore[return-value]
        return f"{text} " + "much " * 5000 if does == "much" else text

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have the tools of jobs run here, without threads."""
        global _box
        with (
            mock.patch.object(threads.EventLoopThread, "run", _run_coroutine),
            mock.patch.object(threads.AbandonableThreads, "run", _run_function),
        ):
            _box = self
            try:
                yield
            finally:
                _box = None


_box: ToolBox | None = None


async def _run_coroutine(_: object, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return await threads._called(make)


async def _run_function(_: object, function: Callable[[], Any]) -> Any:
    await asyncio.sleep(0.3)
    try:
        return function()
    except BaseException as error:
        raise threads.in_future(error) from error


async def act(row: int, version: int, turn: int, number: int, does: str) -> str:
    """Do something that must not be done twice.

    Args:
        row: the number of the row.
        version: how often the row was edited.
        turn: the turn that asks for it.
        number: which of the turn's calls it is.
        does: how it ends.
    """
    assert _box is not None
    arguments = {"row": row, "version": version, "turn": turn, "number": number, "does": does}
    return await _box.run("act", arguments, f"did {row}.{version}.{turn}.{number}")


async def look(topic: int, does: str) -> str:
    """Look something up.

    Args:
        topic: what to look up.
        does: how it ends.
    """
    assert _box is not None
    return await _box.run("look", {"topic": topic, "does": does}, f"topic {topic}")


def answers_right(answer: ToolAnswer, call: str, row: int, version: int) -> bool:
    """Return whether the model is told of a call what it did.

    Args:
        call: the call in the script of the row.
    """
    tool, _, does = call.partition(":")
    text = f"topic {answer.call}" if tool == "look" else f"did {row}.{version}.{answer.turn}"
    if tool == "none":
        return "there is no tool" in answer.text
    if tool == "read" and does == "ok":
        return answer.text == f"note {answer.call}"
    if does == "much":
        return answer.text.startswith(text) and "[cut" in answer.text
    if does not in FAULTY:
        exact = text if tool == "look" else f"{text}.{answer.call}"
        return answer.text == exact
    luck = "missing" if tool == "read" else "no luck"
    said = {"fail": luck, "hang": f"longer than {TOOL_SECONDS:g} s"}.get(does, "")
    return answer.text.startswith("error") and said in answer.text


def expected_end(row: RowSpec) -> str:
    """Return the kind of failure that the calls of a row lead to, or an empty text."""
    failed = 0
    for turn, calls in enumerate(row.calls, 1):
        if turn >= MAX_TURNS:
            return "max_turns"
        every = all(call.startswith("none") or call.partition(":")[2] in FAULTY for call in calls)
        failed = failed + 1 if every else 0
        if failed >= 5:
            return "tool"
    return ""
