"""Everything about one row: result, attempts, tool calls, parents, children, and the transcript."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bagent.report.queries import ReportDb
from bagent.store.journal.turns import turns_of_row
from bagent.store.run_dir import RunDir
from bagent.types import Message, Turn
from bagent.view.rows import RowKey

MOST_ATTEMPTS = 200
MOST_RELATIVES = 100
DEEPEST = 12
"""Generations of parents that are read."""

_JSON = ("output", "input", "logprobs")
_RELATIVE = "row, stage, answer, id, status, error_kind, error, text, output, parents"


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


class RowDetails(msgspec.Struct, frozen=True):
    """One row of ``results`` with all that belongs to it."""

    key: RowKey
    result: dict[str, Any]
    attempts: list[dict[str, Any]]
    tool_calls: list[dict[str, Any]]
    parents: list[dict[str, Any]]
    """The results that it was made of, and theirs; ``depth`` is 1 for the nearest."""

    children: list[dict[str, Any]]
    more_parents: int = 0


def find_row(db: ReportDb, key: RowKey) -> RowDetails | None:
    """Return a row; None if it is not there."""
    condition, parameters = key.sql()
    results = _select(db, f"select * from results where {condition} limit 1", parameters)
    if not results:
        return None
    result = results[0]
    attempts = _select(
        db,
        f"select * from attempts where {condition} order by turn, try, sent limit {MOST_ATTEMPTS}",
        parameters,
    )
    tools = _select(
        db,
        f"select * from tool_calls where {condition} order by turn, started limit {MOST_ATTEMPTS}",
        parameters,
    )
    names = result["parents"] or []
    parents = list(_ancestors(db, names))
    own = f"{key.stage}:{key.id}:{key.answer}"
    children = _select(
        db,
        f"select {_RELATIVE} from results where list_contains(parents, ?)"
        f" order by row, stage, answer, id limit {MOST_RELATIVES}",
        [own],
    )
    more = max(0, len(names) - MOST_RELATIVES)
    return RowDetails(key, result, attempts, tools, parents, children, more)


def find_same(db: ReportDb, key: RowKey) -> dict[str, Any] | None:
    """Return the result of another run with the same stage, id and answer.

    A row without an id is compared by its number.
    """
    rows = _select(
        db,
        "select * from results where stage = ? and answer = ? and id is not distinct from ?"
        " and (id is not null or row = ?) limit 1",
        [key.stage, key.answer, key.id, key.row],
    )
    return rows[0] if rows else None


def _ancestors(db: ReportDb, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for depth in range(1, DEEPEST + 1):
        names = [name for name in names[:MOST_RELATIVES] if name not in seen]
        following: list[str] = []
        for name in names:
            seen.add(name)
            parent = _find_parent(db, name)
            if parent is not None:
                parent["depth"] = depth
                following += parent["parents"] or []
                yield parent
        names = following
        if not names:
            return


def _find_parent(db: ReportDb, name: str) -> dict[str, Any] | None:
    stage, _, rest = name.partition(":")
    row_id, _, answer = rest.rpartition(":")
    if not answer.isdecimal():
        return None
    rows = _select(
        db,
        f"select {_RELATIVE} from results where stage = ? and id = ? and answer = ? limit 1",
        [stage, row_id, int(answer)],
    )
    return rows[0] if rows else None


def _select(db: ReportDb, sql: str, parameters: list[Any]) -> list[dict[str, Any]]:
    cursor = db.connection.execute(sql, parameters)
    names = [column[0] for column in cursor.description or []]
    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    for row in rows:
        for name in _JSON:
            if isinstance(row.get(name), str):
                row[name] = _decoded(row[name])
    return rows


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
