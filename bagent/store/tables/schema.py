"""The tables of a run: their columns and types, in the order that users see.

Types are given to DuckDB, never guessed from data: a column that is null at first cannot change
its type later. What models wrote stays JSON text, so that no key is ever lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from bagent.duck import (
    column_type,
    file_literal,
    is_nested,
    literal,
    nested_value,
    parse_type,
    quoted,
    type_sql,
)

RESULTS: dict[str, str] = {
    "id": "VARCHAR",
    "row": "BIGINT",
    "source": "VARCHAR",
    "line": "BIGINT",
    "stage": "VARCHAR",
    "answer": "BIGINT",
    "status": "VARCHAR",
    "output": "JSON",
    "text": "VARCHAR",
    "reasoning": "VARCHAR",
    "error_kind": "VARCHAR",
    "error": "VARCHAR",
    "finish_reason": "VARCHAR",
    "model": "VARCHAR",
    "endpoint": "VARCHAR",
    "attempts": "BIGINT",
    "turns": "BIGINT",
    "prompt_tokens": "BIGINT",
    "cached_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "reasoning_tokens": "BIGINT",
    "cost_usd": "DOUBLE",
    "queue_ms": "DOUBLE",
    "ttft_ms": "DOUBLE",
    "latency_ms": "DOUBLE",
    "started_at": "DOUBLE",
    "finished_at": "DOUBLE",
    "input": "JSON",
    "parents": "VARCHAR[]",
    "parents_failed": "BIGINT",
    "copied_from": "VARCHAR",
    "prompt_sha256": "VARCHAR",
    "output_sha256": "VARCHAR",
    "logprobs": "JSON",
}
"""``results``: one row per (stage, row, answer). Times are Unix seconds and milliseconds."""

DEFAULTS: dict[str, str] = {"answer": "0", "attempts": "0", "turns": "0"}
"""What a line leaves out because it has the usual value."""

ATTEMPTS: dict[str, str] = {
    "row": "BIGINT",
    "stage": "VARCHAR",
    "answer": "BIGINT",
    "turn": "BIGINT",
    "try": "BIGINT",
    "endpoint": "VARCHAR",
    "sent": "DOUBLE",
    "first_byte": "DOUBLE",
    "first_token": "DOUBLE",
    "done": "DOUBLE",
    "status_code": "BIGINT",
    "error_kind": "VARCHAR",
    "error": "VARCHAR",
    "prompt_tokens": "BIGINT",
    "cached_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "group": "VARCHAR",
    "group_size": "BIGINT",
    "request_id": "VARCHAR",
    "id": "VARCHAR",
}
"""``attempts``: one row per row and HTTP request; ``group`` is called ``group_id`` there."""

TOOL_CALLS: dict[str, str] = {
    "row": "BIGINT",
    "stage": "VARCHAR",
    "answer": "BIGINT",
    "turn": "BIGINT",
    "name": "VARCHAR",
    "arguments": "VARCHAR",
    "shared": "BOOLEAN",
    "cached": "BOOLEAN",
    "started": "DOUBLE",
    "latency_ms": "DOUBLE",
    "error": "VARCHAR",
    "id": "VARCHAR",
}
"""``tool_calls``: one row per tool call of a row."""

ENDPOINTS: dict[str, str] = {
    "endpoint": "VARCHAR",
    "at": "DOUBLE",
    "healthy": "BOOLEAN",
    "in_flight": "BIGINT",
    "limit": "BIGINT",
    "reason": "VARCHAR",
    "waiting": "BIGINT",
    "running": "BIGINT",
    "kv_usage": "DOUBLE",
    "cache_hits": "BIGINT",
    "cache_queries": "BIGINT",
}
"""``endpoints``: samples of the state of endpoints over time."""

PLAIN_DEFAULTS: dict[str, str] = {"shared": "false", "cached": "false"}
REQUIRED: dict[str, str] = {
    "results": "stage",
    "attempts": "stage",
    "tool_calls": "stage",
    "endpoints": "endpoint",
}
"""A column that every sound line of a table has."""

COLUMNS: dict[str, dict[str, str]] = {
    "results": RESULTS,
    "attempts": ATTEMPTS,
    "tool_calls": TOOL_CALLS,
    "endpoints": ENDPOINTS,
}
"""The columns of the tables that are made from lines."""

RENAMED: dict[str, str] = {"group": "group_id"}
TABLES: tuple[str, ...] = ("results", "answers", "attempts", "tool_calls", "endpoints")
"""The names of the tables and of their Parquet files."""


def column_definitions(columns: dict[str, str]) -> str:
    """Columns as in CREATE TABLE, under their names in the table."""
    return ", ".join(f"{quoted(RENAMED.get(n, n))} {t}" for n, t in columns.items())


def read_json(path: Path, columns: dict[str, str], object_bytes: int) -> str:
    """SQL that reads JSON lines with these columns; a broken line gives a row of nulls.

    Args:
        path: the file.
        columns: names and types, nothing is inferred.
        object_bytes: the longest line that is read, in bytes.
    """
    types = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in columns.items())
    return (
        f"read_json({file_literal(path)}, format='newline_delimited', ignore_errors=true,"
        f" maximum_object_size={object_bytes}, columns={{{types}}})"
    )


def json_select(table: str, path: Path, object_bytes: int) -> str:
    """SQL that reads the lines of a journal file as rows of a table; broken lines give none."""
    columns = COLUMNS[table]
    source = read_json(path, columns, object_bytes)
    defaults = DEFAULTS if table == "results" else PLAIN_DEFAULTS
    return (
        f"SELECT {select_list(columns, defaults)} FROM {source}"
        f" WHERE {quoted(REQUIRED[table])} IS NOT NULL"
    )


def select_list(columns: dict[str, str], defaults: dict[str, str]) -> str:
    """The columns as a SELECT list under their names in the table.

    The usual values are put in where a line left them out.
    """
    return ", ".join(
        (f"coalesce({quoted(n)}, {defaults[n]})" if n in defaults else quoted(n))
        + f" AS {quoted(RENAMED.get(n, n))}"
        for n in columns
    )


def answer_names(properties: Iterable[str]) -> dict[str, str]:
    """Column names of ``answers`` for the properties of a schema.

    DuckDB's names do not tell upper case from lower, so a property whose name is taken (also by
    ``id``, ``stage``, ``answer``) gets ``_2``, ``_3`` ... behind it.
    """
    taken = {"id", "stage", "answer"}
    names: dict[str, str] = {}
    for name in properties:
        shown, number = name or "_", 1
        while shown.casefold() in taken:
            number += 1
            shown = f"{name}_{number}"
        taken.add(shown.casefold())
        names[name] = shown
    return names


def answers_select(columns: Iterable[tuple[str | None, str]], source: str) -> str:
    """SQL for ``answers``: id, stage, answer and a typed column per property, ok rows only.

    The output is parsed once per row; a value of another type becomes null. None in place of a
    property is the whole output, in the column ``value``.
    """
    wanted = [(name, stored_type(kind)) for name, kind in dict(columns).items()]
    names = _names_of(name for name, _ in wanted)
    if not wanted:
        return f"SELECT id, stage, answer FROM {source} WHERE status = 'ok'"
    paths = "[" + ", ".join(literal(pointer(name)) for name, _ in wanted) + "]"
    typed = []
    for place, (name, kind) in enumerate(wanted, 1):
        value = f"parts[{place}]"
        if is_scalar(kind):
            value = f"{value}->>'$'"
        if is_nested(kind):
            value = nested_value(value, kind)
        elif kind.upper() != ("VARCHAR" if is_scalar(kind) else "JSON"):
            value = f"TRY_CAST({value} AS {kind})"
        typed.append(f"{value} AS {quoted(names[name])}")
    return (
        f"SELECT id, stage, answer, {', '.join(typed)} FROM (SELECT id, stage, answer,"
        f" json_extract(output, {paths}) AS parts FROM {source} WHERE status = 'ok')"
    )


def _names_of(properties: Iterable[str | None]) -> dict[str | None, str]:
    names: dict[str | None, str] = {None: "value"}
    names.update(answer_names(name for name in properties if name is not None))
    return names


def table_columns(
    table: str, answer_columns: Iterable[tuple[str | None, str]]
) -> list[tuple[str, str]]:
    """Names and types of a table's columns in their order, as DuckDB tells them."""
    if table != "answers":
        return [(RENAMED.get(name, name), kind) for name, kind in COLUMNS[table].items()]
    wanted = dict(answer_columns)
    names = _names_of(wanted)
    own = [(name, RESULTS[name]) for name in ("id", "stage", "answer")]
    return [*own, *((names[name], stored_type(kind)) for name, kind in wanted.items())]


def json_columns(table: str, answer_columns: Iterable[tuple[str | None, str]]) -> list[str]:
    """The columns of a table that hold JSON; in Parquet files they are text, as others read it."""
    return [name for name, kind in table_columns(table, answer_columns) if kind == "JSON"]


def stored_type(kind: str) -> str:
    """The type of a column of answers in the tables; Parquet has no HUGEINT."""
    if is_nested(kind):
        nested = parse_type(kind)
        return "JSON" if nested is None else type_sql(nested)
    return column_type(kind).replace("HUGEINT", "DECIMAL(38,0)")


def pointer(name: str | None) -> str:
    """JSON pointer (RFC 6901) to a top-level property; None is the whole value."""
    return "" if name is None else "/" + name.replace("~", "~0").replace("/", "~1")


def is_scalar(kind: str) -> bool:
    """Whether a type is neither JSON nor a list or a struct."""
    return kind.upper() != "JSON" and not kind.endswith("]") and not is_nested(kind)


_PLACE: dict[str, str] = {
    "row": "number of the input row, from 0",
    "stage": "name of the stage; `main` where the job has one",
    "answer": "number of the answer to the row, from 0",
}
_ID = "id of the stage's row, as in results; null in runs begun before it was kept"
_TOKENS: dict[str, str] = {
    "prompt_tokens": "tokens of the prompt, cached ones too",
    "cached_tokens": "those that the server's prefix cache knew",
    "completion_tokens": "tokens of the answer, reasoning too",
}


def _spread(prefix: str, words: str) -> dict[str, str]:
    names = (("p50", "median"), ("p90", "90th percentile"), ("p99", "99th"), ("max", "longest"))
    return {f"{prefix}_{name}": f"{words}, {share}" for name, share in names}


COLUMN_DESCRIPTIONS: dict[str, dict[str, str]] = {
    "results": {
        "id": "the row's id as text",
        "row": _PLACE["row"],
        "source": "file that the row came from",
        "line": "its line there, from 1",
        "stage": _PLACE["stage"],
        "answer": _PLACE["answer"],
        "status": "how it ended, see below",
        "output": "the validated answer, JSON",
        "text": "the answer as it came",
        "reasoning": "the model's reasoning, where it is told apart",
        "error_kind": "why it is not ok, see below",
        "error": "the same in words",
        "finish_reason": "why the model stopped: stop, length, tool_calls ...",
        "model": "the model that answered",
        "endpoint": "the endpoint that answered last",
        "attempts": "tries of all its turns",
        "turns": "requests of its conversation",
        **_TOKENS,
        "reasoning_tokens": "those of the reasoning",
        "cost_usd": "US dollars; null where a price or a count is unknown",
        "queue_ms": "waiting before it was sent",
        "ttft_ms": "from sending to the first token, where something streamed",
        "latency_ms": "from the first sending to the whole answer",
        "started_at": "when it was sent first",
        "finished_at": "when it ended",
        "input": "the input row, JSON",
        "parents": "what it was made of: STAGE:ID:ANSWER",
        "parents_failed": "how many rows behind it had failed",
        "copied_from": "the id of the equal request whose answer this is",
        "prompt_sha256": "hash of what was sent",
        "output_sha256": "hash of the answer",
        "logprobs": "log probabilities, where asked for, JSON",
    },
    "answers": {
        "id": "the row's id as text",
        "stage": _PLACE["stage"],
        "answer": _PLACE["answer"],
    },
    "attempts": {
        **_PLACE,
        "turn": "number of the request in its conversation, from 1",
        "try": "number of the try of that turn, from 1",
        "endpoint": "where it was sent",
        "sent": "when it was sent",
        "first_byte": "when the answer began",
        "first_token": "when its first token came, where it streamed",
        "done": "when it was whole, or had failed",
        "status_code": "HTTP status",
        "error_kind": "why it failed; null: it did not",
        "error": "the same in words",
        **_TOKENS,
        "group_id": "the HTTP request that carried it",
        "group_size": "rows in that request",
        "request_id": "the server's own name of the request",
        "id": _ID,
    },
    "tool_calls": {
        **_PLACE,
        "turn": "number of the turn that asked for it",
        "name": "the tool",
        "arguments": "its arguments as the model wrote them",
        "shared": "whether it was answered by an equal call in flight",
        "cached": "whether it was answered from the cache",
        "started": "when it began",
        "latency_ms": "how long it took",
        "error": "why it failed, with the line of its code; null: it did not",
        "id": _ID,
    },
    "endpoints": {
        "endpoint": "the endpoint",
        "at": "when it was looked at",
        "healthy": "whether it takes requests",
        "in_flight": "rows of this run in flight there",
        "limit": "how many may be",
        "reason": "why the limit is what it is",
        "waiting": "requests in its own queue",
        "running": "requests that it works on",
        "kv_usage": "share of its KV cache in use, 0 to 1",
        "cache_hits": "tokens that its prefix cache knew, since it started",
        "cache_queries": "tokens that were looked for",
    },
    "errors": {
        "error_kind": "why the rows are not ok",
        "status": "how they ended",
        "rows": "how many",
        "percent": "their share of all results",
        "endpoints": "of how many endpoints",
        "first_id": "id of the first",
        "pattern": "what their errors have in common: less numbers and quoted values",
        "example": "the error of the first",
        "stage": _PLACE["stage"],
    },
    "latency": {
        "stage": _PLACE["stage"],
        "answers": "answers that were given",
        **_spread("latency", "ms to the whole answer"),
        **_spread("ttft", "ms to the first token"),
        **_spread("queue", "ms of waiting"),
    },
    "by_endpoint": {
        "endpoint": "the endpoint",
        "tries": "rows' parts in its requests",
        "requests": "HTTP requests",
        "ok": "tries that went well",
        "failed": "those that did not",
        "throttled": "those that were told to slow down",
        "most_error": "commonest error kind",
        **_spread("ms", "ms of a try"),
        "first_token_p50": "ms to the first token, median",
        "prompt_tokens": "tokens of all prompts",
        "completion_tokens": "tokens of all answers",
        "completion_tokens_per_s": "those a second, from the first to the last",
    },
    "turns": {
        **_PLACE,
        "turn": "number of the turn, from 1",
        "tries": "how often it was sent",
        "endpoint": "where the last time",
        "error_kind": "why a try failed",
        "prompt_tokens": _TOKENS["prompt_tokens"],
        "completion_tokens": _TOKENS["completion_tokens"],
        "ms": "from the first sending to the last answer",
        "tool_calls": "tools that it called",
        "tools": "their names, in order",
        "id": _ID,
    },
}
"""For each table and view its columns in order; ``answers`` has one more for each property."""

STATUSES: dict[str, str] = {
    "ok": "a valid answer",
    "invalid": "an answer that the schema refuses, after all re-asks",
    "truncated": "an answer that was cut off at the token limit",
    "refused": "the model declined",
    "failed": "no answer",
    "bad_input": "the row cannot be used",
}
"""What each status of a result means."""

ERROR_KINDS: dict[str, str] = {
    "bad_input": "the line cannot be read",
    "template": "the prompt cannot be made of the row",
    "context_overflow": "the prompt is longer than the model's context",
    "rejected": "the server refused the request",
    "auth": "the key is not accepted",
    "rate_limited": "told to slow down, after all tries",
    "overloaded": "the server is full, after all tries",
    "timeout": "no answer in time",
    "connect": "no connection",
    "bad_response": "an answer that is no answer",
    "empty": "an answer without text",
    "truncated": "cut off at the token limit",
    "refused": "the model declined",
    "schema": "the answer does not fit the schema",
    "tool": "a tool failed, and the agent with it",
    "max_turns": "more turns than allowed",
    "budget": "the money that was allowed is spent",
    "internal": "a fault of this program",
    "client_closed": "whoever asked the proxy hung up before the end of the answer",
}
"""What each error kind means."""


_EXACT = "DECIMAL(38,0)"
_INTEGER = r"-?\d+(?:\.0*)?(?:e\+?\d+)?"
_MAY_BE_WIDE = r"\d{19}|\de\+?\d"
"""A text without this has no integer beyond 64 bits; most need no closer look."""

_NESTED = r"[:\[,]\s*(-?\d{19,})"
"""Integers inside of an object or a list that may not fit."""

Columns = Mapping[str | None, str]
"""Types of the typed columns of ``answers`` by property; None is the whole answer."""


class WiderColumns(Exception):
    """Columns of ``answers`` must be wider for what was found in them."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self.columns = columns


def check_select(columns: Columns, source: str) -> str | None:
    """SQL for two booleans a column of integers: some value does not fit it, and nor 38 digits.

    None where no column is of integers.
    """
    integers = _integers(columns)
    if not integers:
        return None
    paths = ", ".join(literal(pointer(name)) for name in integers)
    found = []
    for place, kind in enumerate(integers.values(), 1):
        if is_nested(kind):
            texts = f"regexp_extract_all(parts[{place}]::VARCHAR, {literal(_NESTED)}, 1)"
        elif is_scalar(kind):
            texts = f"[parts[{place}]->>'$']"
        else:
            texts = f"TRY_CAST(parts[{place}] AS VARCHAR[])"
        base = "BIGINT" if is_nested(kind) else kind.removesuffix("[]")
        found += [
            f"coalesce(bool_or(list_bool_or([regexp_full_match(x, {literal(_INTEGER)})"
            f" AND TRY_CAST(x AS {narrow}) IS NULL FOR x IN {texts}])), false)"
            for narrow in (base, _EXACT)
        ]
    return (
        f"SELECT {', '.join(found)} FROM (SELECT json_extract(output, [{paths}]) AS parts"
        f" FROM {source} WHERE status = 'ok'"
        f" AND regexp_matches(output::VARCHAR, {literal(_MAY_BE_WIDE)}))"
    )


def wider_types(columns: Columns, found: tuple[bool, ...]) -> Columns:
    """The columns that must be wider, with their types; ``found`` is the row of the check."""
    types: dict[str | None, str] = {}
    for place, (name, kind) in enumerate(_integers(columns).items()):
        too_wide, beyond_exact = found[2 * place : 2 * place + 2]
        if too_wide and is_nested(kind):
            types[name] = "JSON"  # which keeps all digits
        elif too_wide:
            suffix = "[]" if kind.endswith("[]") else ""
            types[name] = ("VARCHAR" if beyond_exact else _EXACT) + suffix
    return types


def is_as_wide(expected: str, kind: str) -> bool:
    """Whether a column may be of a type: the expected one, or a wider one for integers."""
    if kind == expected:
        return True
    if is_nested(expected):
        return kind == "VARCHAR" or parse_type(kind, bare_names=True) == parse_type(expected)
    suffix = "[]" if expected.endswith("[]") else ""
    base = expected.removesuffix("[]")
    return base in ("BIGINT", _EXACT) and kind in (_EXACT + suffix, "VARCHAR" + suffix)


def _integers(columns: Columns) -> dict[str | None, str]:
    return {
        name: kind
        for name, kind in columns.items()
        if kind.removesuffix("[]") in ("BIGINT", _EXACT) or (is_nested(kind) and "BIGINT" in kind)
    }
