"""The tables and views of a run: columns, types and descriptions, in the order that users see.

The columns are the fields of records in :mod:`bagent.types`; a new column is a new field there.
Types are never inferred from data, so that a column of nulls has its type. Output of models stays
JSON text, so that no key is lost. Views are created when the run is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from bagent.duck import (
    column_type,
    file_source,
    is_nested,
    literal,
    nested_value,
    parse_type,
    quoted,
    type_sql,
)
from bagent.types import Attempt, EndpointSample, Json, ResultColumns, Status, ToolRecord

COLUMN_DESCRIPTIONS: dict[str, dict[str, str]] = {}
"""For each table and view its columns in order; ``answers`` has one more for each property."""

RENAMED: dict[str, str] = {"group": "group_id"}
"""Fields of records whose columns have another name."""

_SQL_TYPES: dict[Any, str] = {
    str: "VARCHAR",
    Status: "VARCHAR",
    int: "BIGINT",
    float: "DOUBLE",
    bool: "BOOLEAN",
    list[str]: "VARCHAR[]",
    Json: "JSON",
}

_DIGITS = r"regexp_replace(coalesce(error, finish_reason, ''), '[a-f]*\d[a-f\d]*', '#', 'g')"
_QUOTED = rf"""regexp_replace({_DIGITS}, '"(?:[^"\\]|\\.)*"', '"..."', 'g')"""
_VALUE = (
    r"""'(^|: )("(?:[^"\\]|\\.)*"|\[.*\]|\{.*\}|[-+.#e]+|true|false|null) (is|does|has|was) '"""
)
_LENGTH = 120
ALIKE = (
    f"left(CASE WHEN error LIKE '%is a required property%' THEN {_DIGITS}"
    f" ELSE regexp_replace({_QUOTED}, {_VALUE}, '\\1... \\3 ') END, {_LENGTH})"
)
"""SQL: the start of a result's error without what differs from row to row: decimal and hexadecimal
numbers, quoted words, and the value at the start of a validator's message (``"hgih" is not one of
...``). The name of a missing property stays."""


_PLACE = "(row, coalesce(id, ''), answer)"
"""SQL: the order of a stage's rows; several may be made of one input row."""

_UNIT = ("row", "stage", "id", "answer")


def _columns_of(table: str, record: type[msgspec.Struct]) -> dict[str, str]:
    """Return the SQL types of a record's described fields, and register their descriptions."""
    columns: dict[str, str] = {}
    descriptions = COLUMN_DESCRIPTIONS[table] = {}
    hints = get_type_hints(record, include_extras=True)
    for field in msgspec.structs.fields(record):
        meta = getattr(hints[field.name], "__metadata__", (None,))[0]
        if not isinstance(meta, msgspec.Meta):
            continue
        python_type = get_args(hints[field.name])[0]
        if type(None) in get_args(python_type):
            python_type = get_args(python_type)[0]
        name = field.encode_name
        columns[name] = (meta.extra or {}).get("sql") or _SQL_TYPES[python_type]
        descriptions[RENAMED.get(name, name)] = meta.description or ""
        if (table, name) == ("results", "finished_at"):
            columns["input"], descriptions["input"] = "JSON", "the input row, JSON"
    return columns


RESULTS = _columns_of("results", ResultColumns)
"""``results``: one row per (stage, row, answer)."""

ANSWER_KEY = ("id", "stage", "answer")
"""The columns of ``answers`` that are no properties."""

COLUMN_DESCRIPTIONS["answers"] = {name: COLUMN_DESCRIPTIONS["results"][name] for name in ANSWER_KEY}

COLUMNS: dict[str, dict[str, str]] = {
    "results": RESULTS,
    "attempts": _columns_of("attempts", Attempt),
    "tool_calls": _columns_of("tool_calls", ToolRecord),
    "endpoints": _columns_of("endpoints", EndpointSample),
}
"""The columns of the tables that are made from lines, as in the journal, with their SQL types."""

DEFAULTS: dict[str, str] = {"answer": "0", "attempts": "0", "turns": "0"}
"""What a line of results leaves out because it has the usual value."""

PLAIN_DEFAULTS: dict[str, str] = {"shared": "false", "cached": "false"}
REQUIRED: dict[str, str] = {
    "results": "stage",
    "attempts": "stage",
    "tool_calls": "stage",
    "endpoints": "endpoint",
}
"""A column that every sound line of a table has."""

TABLES: tuple[str, ...] = ("results", "answers", "attempts", "tool_calls", "endpoints")
"""The names of the tables and of their Parquet files."""


def read_json(path: Path, columns: dict[str, str], object_bytes: int) -> str:
    """Return SQL that reads JSON lines; a broken line gives a row of nulls.

    Args:
        path: the file.
        columns: names and types.
        object_bytes: the longest readable line in bytes.
    """
    types = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in columns.items())
    return (
        f"read_json({file_source(path)}, format='newline_delimited', ignore_errors=true,"
        f" maximum_object_size={object_bytes}, columns={{{types}}})"
    )


def json_select(table: str, path: Path, object_bytes: int) -> str:
    """Return SQL that reads a journal file as rows of a table, without broken lines."""
    columns = COLUMNS[table]
    source = read_json(path, columns, object_bytes)
    defaults = DEFAULTS if table == "results" else PLAIN_DEFAULTS
    return (
        f"SELECT {select_list(columns, defaults)} FROM {source}"
        f" WHERE {quoted(REQUIRED[table])} IS NOT NULL"
    )


def select_list(columns: dict[str, str], defaults: dict[str, str]) -> str:
    """Return a SELECT list of columns by their names in the table, with defaults filled in."""
    return ", ".join(
        (f"coalesce({quoted(n)}, {defaults[n]})" if n in defaults else quoted(n))
        + f" AS {quoted(RENAMED.get(n, n))}"
        for n in columns
    )


def answer_names(properties: Iterable[str]) -> dict[str, str]:
    """Return the column names of ``answers`` for the properties of a schema.

    DuckDB's names ignore case; a name that exists already (also ``id``, ``stage``, ``answer``) gets
    the suffix ``_2``, ``_3`` ...
    """
    taken = set(ANSWER_KEY)
    names: dict[str, str] = {}
    for name in properties:
        column, number = name or "_", 1
        while column.casefold() in taken:
            number += 1
            column = f"{name}_{number}"
        taken.add(column.casefold())
        names[name] = column
    return names


def answers_select(columns: Iterable[tuple[str | None, str]], source: str) -> str:
    """Return SQL for ``answers``: id, stage, answer and a typed column per property, of ok rows.

    A value of another type becomes null. The property None is the complete output, in the column
    ``value``.
    """
    typed_columns = [(name, stored_type(kind)) for name, kind in dict(columns).items()]
    names = _names_of(name for name, _ in typed_columns)
    if not typed_columns:
        return f"SELECT id, stage, answer FROM {source} WHERE status = 'ok'"
    paths = "[" + ", ".join(literal(pointer(name)) for name, _ in typed_columns) + "]"
    typed = []
    for number, (name, kind) in enumerate(typed_columns, 1):
        value = f"parts[{number}]"
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
    """Return names and types of a table's columns in order, as DuckDB describes them."""
    if table != "answers":
        return [(RENAMED.get(name, name), kind) for name, kind in COLUMNS[table].items()]
    types = dict(answer_columns)
    names = _names_of(types)
    own = [(name, RESULTS[name]) for name in ANSWER_KEY]
    return [*own, *((names[name], stored_type(kind)) for name, kind in types.items())]


def json_columns(table: str, answer_columns: Iterable[tuple[str | None, str]]) -> list[str]:
    """Return the columns of a table that hold JSON; in Parquet files they are text."""
    return [name for name, kind in table_columns(table, answer_columns) if kind == "JSON"]


def stored_type(kind: str) -> str:
    """Return the type of a column of answers in the tables; Parquet has no HUGEINT."""
    if is_nested(kind):
        nested = parse_type(kind)
        return "JSON" if nested is None else type_sql(nested)
    return column_type(kind).replace("HUGEINT", "DECIMAL(38,0)")


def pointer(name: str | None) -> str:
    """Return the JSON pointer (RFC 6901) to a top-level property; None is the complete value."""
    return "" if name is None else "/" + name.replace("~", "~0").replace("/", "~1")


def is_scalar(kind: str) -> bool:
    """Return whether a type is neither JSON nor a list or a struct."""
    return kind.upper() != "JSON" and not kind.endswith("]") and not is_nested(kind)


def _spread(prefix: str, text: str) -> dict[str, str]:
    names = (("p50", "median"), ("p90", "90th percentile"), ("p99", "99th"), ("max", "longest"))
    return {f"{prefix}_{name}": f"{text}, {share}" for name, share in names}


_RESULT = COLUMN_DESCRIPTIONS["results"]
_ATTEMPT = COLUMN_DESCRIPTIONS["attempts"]

COLUMN_DESCRIPTIONS |= {
    "errors": {
        "error_kind": "why the rows are not ok",
        "status": "how they ended",
        "rows": "how many",
        "percent": "their share of all results",
        "endpoints": "of how many endpoints",
        "first_id": "id of the first",
        "pattern": "what their errors have in common: less numbers and quoted values",
        "example": "the error of the first",
        "stage": _RESULT["stage"],
    },
    "latency": {
        "stage": _RESULT["stage"],
        "answers": "answers that were given",
        **_spread("latency", "ms to the whole answer"),
        **_spread("ttft", "ms to the first token; see results.ttft_ms"),
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
        "first_token_p50": "ms to the first token of its answers, median; see results.ttft_ms",
        "prompt_tokens": "tokens of all prompts",
        "completion_tokens": "tokens of all answers",
        "completion_tokens_per_s": "those a second, from the first to the last",
    },
    "turns": {
        **{name: _RESULT[name] for name in ("row", "stage", "answer")},
        "turn": "number of the turn, from 1",
        "tries": "how often it was sent",
        "endpoint": "where the last time",
        "error_kind": "why a try failed",
        "prompt_tokens": _RESULT["prompt_tokens"],
        "completion_tokens": _RESULT["completion_tokens"],
        "ms": "from the first sending to the last answer",
        "tool_calls": "tools that it called",
        "tools": "their names, in order",
        "id": _ATTEMPT["id"],
    },
}

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
"""A text without a match has no integer beyond 64 bits."""

_NESTED = r"[:\[,]\s*(-?\d{19,})"
"""Integers inside an object or a list that may not fit."""

Columns = Mapping[str | None, str]
"""Types of the columns of ``answers`` by property; None is the complete answer."""


class WiderColumns(Exception):
    """Columns of ``answers`` must be wider for the values in them."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self.columns = columns


def check_select(columns: Columns, source: str) -> str | None:
    """Return SQL for two booleans a column of integers: a value exceeds its type, and 38 digits.

    None if no column is of integers.
    """
    integers = _integers(columns)
    if not integers:
        return None
    paths = ", ".join(literal(pointer(name)) for name in integers)
    checks = []
    for number, kind in enumerate(integers.values(), 1):
        if is_nested(kind):
            texts = f"regexp_extract_all(parts[{number}]::VARCHAR, {literal(_NESTED)}, 1)"
        elif is_scalar(kind):
            texts = f"[parts[{number}]->>'$']"
        else:
            texts = f"TRY_CAST(parts[{number}] AS VARCHAR[])"
        base = "BIGINT" if is_nested(kind) else kind.removesuffix("[]")
        checks += [
            f"coalesce(bool_or(list_bool_or([regexp_full_match(x, {literal(_INTEGER)})"
            f" AND TRY_CAST(x AS {narrow}) IS NULL FOR x IN {texts}])), false)"
            for narrow in (base, _EXACT)
        ]
    return (
        f"SELECT {', '.join(checks)} FROM (SELECT json_extract(output, [{paths}]) AS parts"
        f" FROM {source} WHERE status = 'ok'"
        f" AND regexp_matches(output::VARCHAR, {literal(_MAY_BE_WIDE)}))"
    )


def wider_types(columns: Columns, flags: tuple[bool, ...]) -> Columns:
    """Return the wider types of columns; ``flags`` is the row of the check."""
    types: dict[str | None, str] = {}
    for position, (name, kind) in enumerate(_integers(columns).items()):
        too_wide, beyond_exact = flags[2 * position : 2 * position + 2]
        if too_wide and is_nested(kind):
            types[name] = "JSON"  # which keeps all digits
        elif too_wide:
            suffix = "[]" if kind.endswith("[]") else ""
            types[name] = ("VARCHAR" if beyond_exact else _EXACT) + suffix
    return types


def is_as_wide(expected: str, kind: str) -> bool:
    """Return whether a type is the expected one, or a wider one for integers."""
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


def same_unit(first: str, second: str) -> str:
    """Return SQL for whether rows of two tables are of the same stage, row and answer.

    A stage may make several rows of one input row, so ids are compared too.
    """
    return " AND ".join(f"{first}.{name} IS NOT DISTINCT FROM {second}.{name}" for name in _UNIT)


def _quantiles(column: str, prefix: str) -> str:
    """Return SQL for the median, 90th, 99th percentile and maximum of a column."""
    quantiles = ", ".join(
        f"round(quantile_disc({column}, {share}), 1) AS {prefix}_p{percent}"
        for share, percent in ((0.5, 50), (0.9, 90), (0.99, 99))
    )
    return f"{quantiles}, round(max({column}), 1) AS {prefix}_max"


_ANSWERED = "status NOT IN ('failed', 'bad_input') AND copied_from IS NULL"
"""SQL: an endpoint gave an answer of which nothing was known before."""

VIEWS: dict[str, str] = {
    "errors": f"""
        SELECT error_kind, status, count(*) AS "rows",
               round(100.0 * count(*) / (SELECT count(*) FROM results), 2) AS percent,
               count(DISTINCT endpoint) AS endpoints, min_by(id, {_PLACE}) AS first_id,
               {ALIKE} AS pattern, left(min_by(error, {_PLACE}), 300) AS example, stage
        FROM results WHERE error_kind IS NOT NULL
        GROUP BY stage, error_kind, status, pattern
        ORDER BY "rows" DESC, stage, error_kind, pattern""",
    "latency": f"""
        SELECT stage, count(latency_ms) AS answers, {_quantiles("latency_ms", "latency")},
               {_quantiles("ttft_ms", "ttft")}, {_quantiles("queue_ms", "queue")}
        FROM results WHERE {_ANSWERED}
        GROUP BY stage ORDER BY stage""",
    "by_endpoint": f"""
        SELECT endpoint, count(*) AS tries, count(DISTINCT group_id) AS requests,
               count(*) FILTER (error_kind IS NULL) AS ok,
               count(*) FILTER (error_kind IS NOT NULL) AS failed,
               count(*) FILTER (status_code = 429 OR error_kind = 'rate_limited') AS throttled,
               mode(error_kind) AS most_error, {_quantiles("(done - sent) * 1000", "ms")},
               any_value(first_token_p50) AS first_token_p50,
               sum(prompt_tokens)::BIGINT AS prompt_tokens,
               sum(completion_tokens)::BIGINT AS completion_tokens,
               round(sum(completion_tokens) / nullif(max(done) - min(sent), 0), 1)
                   AS completion_tokens_per_s
        FROM attempts LEFT JOIN (
            SELECT endpoint, round(quantile_disc(ttft_ms, 0.5), 1) AS first_token_p50
            FROM results WHERE {_ANSWERED} GROUP BY endpoint
        ) USING (endpoint)
        GROUP BY endpoint ORDER BY endpoint""",
    "turns": f"""
        WITH asked AS (
            SELECT row, stage, id, answer, turn, count(*) AS tries,
                   arg_max(endpoint, sent) AS endpoint,
                   max(error_kind) AS error_kind, sum(prompt_tokens)::BIGINT AS prompt_tokens,
                   sum(completion_tokens)::BIGINT AS completion_tokens,
                   round((max(done) - min(sent)) * 1000, 1) AS ms
            FROM attempts GROUP BY row, stage, id, answer, turn),
        called AS (
            SELECT row, stage, id, answer, turn, count(*) AS tool_calls,
                   string_agg(name, ', ' ORDER BY started) AS tools
            FROM tool_calls GROUP BY row, stage, id, answer, turn)
        SELECT a.* EXCLUDE (id), coalesce(tool_calls, 0) AS tool_calls, tools, a.id
        FROM asked AS a LEFT JOIN called AS c ON {same_unit("a", "c")} AND a.turn = c.turn
        ORDER BY a.stage, a.row, a.id, a.answer, a.turn""",
}
"""The SQL of each view: grouped errors, percentiles of times by stage, endpoints, and turns."""
