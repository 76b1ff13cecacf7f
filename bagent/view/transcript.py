"""The transcript of an agent's row: its messages, tool calls with results, and their times."""

from __future__ import annotations

from typing import Any

import msgspec

from bagent.store.journal.turns import turns_of_row
from bagent.store.run_dir import RunDir
from bagent.types import Message, Turn
from bagent.view.rows import RowKey


class TranscriptCall(msgspec.Struct, frozen=True):
    """One tool call with its result."""

    name: str
    arguments: str
    result: str | None
    ms: float | None = None
    error: str | None = None
    cached: bool = False


class TranscriptTurn(msgspec.Struct, frozen=True):
    """One turn: what the model wrote, which tools it called, and other messages added."""

    number: int
    at: float | None
    text: str
    reasoning: str
    calls: list[TranscriptCall]
    others: list[tuple[str, str]] = []


def read_transcript(
    run: RunDir, key: RowKey, tool_calls: list[dict[str, Any]]
) -> list[TranscriptTurn]:
    """Return the turns with tools of a row; the last answer is the row's own text.

    Args:
        run: the run directory.
        key: the row.
        tool_calls: its rows of ``tool_calls``, in order.
    """
    by_key = turns_of_row(run.path, key.row, key.stage, key.answer)
    if len(by_key) != 1:  # several rows of one input row cannot be told apart without their key
        return _from_calls(tool_calls)
    (turns,) = by_key.values()
    times = list(tool_calls)
    return [_turn(turn, times) for turn in turns if turn.messages]


def _turn(turn: Turn, times: list[dict[str, Any]]) -> TranscriptTurn:
    results = {
        str(message.get("tool_call_id")): content_text(message)
        for message in turn.messages
        if message.get("role") == "tool"
    }
    texts, reasoning, calls, others = [], [], [], []
    for message in turn.messages:
        role = str(message.get("role"))
        if role == "assistant":
            texts.append(content_text(message))
            reasoning.append(str(message.get("reasoning_content") or ""))
            made = message.get("tool_calls") or ()
            calls += [_call(call, results, turn.turn, times) for call in made]
        elif role != "tool":
            others.append((role, content_text(message)))
    return TranscriptTurn(
        turn.turn, turn.at, "\n".join(filter(None, texts)), "\n".join(reasoning), calls, others
    )


def _call(
    call: Message, results: dict[str, str], turn: int, times: list[dict[str, Any]]
) -> TranscriptCall:
    function = call.get("function") or {}
    name, arguments = str(function.get("name") or ""), str(function.get("arguments") or "")
    record = next((r for r in times if r["turn"] == turn and r["name"] == name), None)
    if record is not None:
        times.remove(record)
    return TranscriptCall(
        name,
        arguments,
        results.get(str(call.get("id"))),
        record["latency_ms"] if record else None,
        record["error"] if record else None,
        bool(record and record["cached"]),
    )


def _from_calls(tool_calls: list[dict[str, Any]]) -> list[TranscriptTurn]:
    """Return the calls alone, without messages and results."""
    turns: dict[int, list[TranscriptCall]] = {}
    for record in tool_calls:
        call = TranscriptCall(
            record["name"],
            record["arguments"],
            None,
            record["latency_ms"],
            record["error"],
            bool(record["cached"]),
        )
        turns.setdefault(record["turn"], []).append(call)
    return [TranscriptTurn(number, None, "", "", calls) for number, calls in turns.items()]


def content_text(message: Message) -> str:
    """Return the text of a message; parts that are no text are named."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return msgspec.json.encode(content).decode()
    parts = []
    for part in content:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(part, dict):
            parts.append(f"[{part.get('type') or 'part'}]")
    return "\n".join(parts)
