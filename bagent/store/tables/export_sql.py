"""SQL over ``results`` for exports and lists: columns, ids, conditions on fields, and redaction.

Redaction replaces values; nulls stay. A field is a path into a JSON column (``output.name.first``,
``input.ssn``) or a plain name: the column and that property of both ``input`` and ``output``.
Redacting the output or a property of it also redacts what may repeat it: text, reasoning, logprobs
and the error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from bagent.duck import is_nested, literal, quoted
from bagent.errors import UsageError
from bagent.store.results import iter_results
from bagent.store.run_dir import RunDir
from bagent.store.tables.schema import ANSWER_KEY, RESULTS, pointer

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


Columns = dict[str, str]
"""Names of columns, each with the SQL of its value."""

INPUT_ROWS = 1000
"""First rows of the input whose fields become columns."""


def _iso_time(column: str) -> str:
    return f"strftime(make_timestamp(({column} * 1000000)::bigint), '%Y-%m-%dT%H:%M:%S.%fZ')"


RESULT_COLUMNS: Columns = {name: quoted(name) for name in RESULTS} | {
    name: _iso_time(name) for name in ("started_at", "finished_at")
}
"""The columns of ``results``, with times as text."""


def other_answer(answers: Mapping[str, str]) -> str:
    """Return the SQL of an answer that none of the fields in ``answers`` shows: its text or JSON.

    So it is for stages without a schema beside others, and for accepted truncated answers.
    """
    fields = ", ".join(f"{sql}::varchar" for sql in answers.values())
    return (
        f"case when status in ('ok', 'truncated') and coalesce({fields}) is null"
        " then coalesce(text, output ->> '$') end"
    )


def csv_columns(
    connection: DuckDBPyConnection,
    answers: Mapping[str, str],
    *,
    source: str = "from results",
    all_columns: bool = False,
    with_input: bool = False,
) -> Columns:
    """Return ``id``, ``status``, the fields of the answers or their text, and the error.

    Stage and number of the answer are included where there are several, the text beside fields
    where a row has an answer without them.

    Args:
        connection: with the table ``results``.
        answers: the SQL of each field of the answers.
        source: SQL of the rows, with the columns that ``answers`` names.
        all_columns: include the other columns of ``results``.
        with_input: include the fields of the input.
    """
    several = connection.execute(
        "select count(distinct stage) > 1, count(distinct answer) > 1 from results"
    ).fetchone() or (False, False)
    stage, answer = ["stage"] * several[0], ["answer"] * several[1]
    chosen = {name: RESULT_COLUMNS[name] for name in ("id", *stage, *answer, "status")}
    # A field of the answer keeps its name; what it would hide gets another one.
    chosen |= {f"{name}_answer" if name in chosen else name: sql for name, sql in answers.items()}
    more = RESULT_COLUMNS if all_columns else {"error": RESULT_COLUMNS["error"]}
    if not all_columns:
        text = other_answer(answers) if answers else RESULT_COLUMNS["text"]
        if not answers or _has_value(connection, text, source):
            more = {"text": text} | more
    for name, sql in more.items():
        if sql not in chosen.values():
            chosen[f"result_{name}" if name in chosen else name] = sql
    fields = input_fields(connection) if with_input else {}
    return chosen | {f"input.{name}" if name in chosen else name: fields[name] for name in fields}


def _has_value(connection: DuckDBPyConnection, sql: str, source: str) -> bool:
    row = connection.execute(f"select 1 from ({source}) where ({sql}) is not null limit 1")
    return row.fetchone() is not None


def input_fields(connection: DuckDBPyConnection, *, as_json: bool = False) -> Columns:
    """Return the fields of the input's first rows, each as text or as JSON."""
    rows = connection.execute(
        f"select json_keys(input) from results where json_type(input) = 'OBJECT' limit {INPUT_ROWS}"
    ).fetchall()
    names = dict.fromkeys(name for (keys,) in rows for name in keys)
    arrow = "->" if as_json else "->>"
    return {name: f"input {arrow} {literal(pointer(name))}" for name in names}


_NUMBERS: dict[type, str] = {int: "BIGINT", float: "DOUBLE"}


def number_type(
    connection: DuckDBPyConnection, runs: Sequence[RunDir], tables: Sequence[str] = ("results",)
) -> str | None:
    """Return the SQL type of ids that all are numbers; None where some are texts.

    The journals say whether the first id of each run is a number; another one is taken for a number
    where it is written as DuckDB writes numbers.
    """
    kinds = set()
    for run in runs:
        first = next(iter(iter_results(run.path, report=lambda _: None)), None)
        if first is not None:
            kinds.add(_NUMBERS.get(type(first["id"])))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        return None
    text = f"id is not null and try_cast(id as {kind})::varchar is distinct from id"
    for table in tables:
        # An unfinished result would refuse relations over this connection.
        if connection.execute(f"select 1 from {table} where {text} limit 1").fetchall():
            return None
    return kind


def id_as_json(connection: DuckDBPyConnection, runs: Sequence[RunDir]) -> str:
    """Return SQL over ``results`` for ids as JSON, each of the type that it has in its row.

    An id of a row whose input is not stored is a number only where all ids are.
    """
    infos = [run.load_or_report(lambda _: None) for run in runs]
    fields = {"id", "custom_id", *(str(info.job.get("id") or "id") for info in infos if info)}
    all_have_input = all(info and info.keep_input and len(info.stages) < 2 for info in infos)
    cases = " ".join(
        f"when input ->> {path} = id then input -> {path}"
        for path in (literal(pointer(name)) for name in sorted(fields))
    )
    kind = None if all_have_input else number_type(connection, runs)
    other = "to_json(id)" if kind is None else f"to_json(try_cast(id as {kind}))"
    return f"case {cases} else {other} end"


def select_list(columns: Mapping[str, str]) -> str:
    """Return the SQL that selects columns."""
    return ", ".join(f"{sql} as {quoted(name)}" for name, sql in columns.items())


def status_condition(statuses: Collection[str]) -> str:
    """Return a condition over ``results`` for any of the statuses; ``failed`` is every failure."""
    names = ", ".join(map(literal, sorted(statuses)))
    failed = " or error_kind is not null" if "failed" in statuses else ""
    return f"(status in ({names}){failed})"


def typed_condition(connection: DuckDBPyConnection, condition: str, label: str) -> str:
    """Return a condition over ``results`` in which fields of answers and inputs are columns.

    Args:
        connection: with the tables of a run.
        condition: SQL of the user.
        label: names the condition in a message.

    Raises:
        UsageError: it names a column that is not there, or ends the statement that it is part of.
    """
    import duckdb

    fields = {**input_fields(connection), **answer_fields(connection)}
    sql = condition_on_fields(condition, fields)
    checked = f"explain select * from results where {sql}"
    if len(connection.extract_statements(checked)) > 1:
        raise UsageError(f"{label}: more than one statement", hint="write one condition")
    try:
        connection.execute(checked)
    except duckdb.BinderException as error:
        hint = ", ".join(["columns of results", *fields])
        raise UsageError(f"{label}: {str(error).splitlines()[0]}", hint=hint) from None
    return sql


def condition_on_fields(condition: str, fields: Mapping[str, str]) -> str:
    """Return a condition over ``results`` in which the names of fields are columns.

    Args:
        condition: SQL of the user.
        fields: the SQL of each field's value. Names ignore case; a column of ``results`` comes
            first, then a later field.
    """
    typed = condition.casefold()
    own = {name: quoted(name) for name in RESULTS}
    columns = {
        name.casefold(): (quoted(name), sql)
        for name, sql in {**fields, **own}.items()
        if quoted(name)[1:-1].casefold() in typed
    }
    if columns.keys() <= own.keys():
        return f"({condition}\n)"
    # Named as the table, so that results.NAME is a field too.
    names, values = map(", ".join, zip(*columns.values(), strict=True))
    return f"(select ({condition}\n) from (values ({values})) as results({names}))"


def answer_fields(connection: DuckDBPyConnection) -> dict[str, str]:
    """Return SQL over ``results`` for each typed column of ``answers``.

    ``value`` is the complete answer where that is no object with such a field.
    """
    described = connection.execute("describe answers").fetchall()
    kinds = {str(name): str(kind) for name, kind, *_ in described}
    return {name: _value(name, kinds) for name in kinds if name not in ANSWER_KEY}


def _value(name: str, kinds: Mapping[str, str]) -> str:
    value = f"json_extract(output, {literal(pointer(name))})"
    if name == "value":
        value = f"coalesce({value}, output)"
    elif (base := _base(name, kinds)) is not None:
        value = f"coalesce({value}, json_extract(output, {literal(pointer(base))}))"
    kind = kinds[name]
    if kind == "JSON":
        return value
    if kind.endswith("]") or is_nested(kind):
        return f"try_cast({value} as {kind})"
    return f"try_cast({value} ->> '$' as {kind})"


def _base(name: str, names: Iterable[str]) -> str | None:
    """Return the property of a column that has a suffix, since another column has its name."""
    base, _, number = name.rpartition("_")
    others = {*names} - {*ANSWER_KEY}
    if not number.isdecimal() or base in others:
        return None
    return base if base.casefold() in map(str.casefold, names) else None


MASK = "'***'"
"""The replacement of a text, as SQL."""

_JSON_MASK = "***"
_REPEATS = ("text", "reasoning", "logprobs", "error")
_WHOLE = frozenset({"row", "stage", "answer", "status"})


def masked_columns(fields: Iterable[str]) -> dict[str, str]:
    """Return the SQL of the new value of each column of ``results`` that changes.

    Raises:
        UsageError: a field is empty, or a column that identifies rows.
    """
    paths: dict[str, list[list[str]]] = {}
    hidden: set[str] = set()
    for field in fields:
        head, *path = field.split(".")
        if not all([head, *path]) or (field in _WHOLE):
            raise UsageError(f"--redact {field}: no field to hide", hint="output.NAME, text, ...")
        if field in RESULTS:
            hidden.update((field, *_REPEATS) if field == "output" else (field,))
        if field in ("output", "input"):
            continue
        columns = [head] if head in ("output", "input") and path else ["output", "input"]
        steps = path if head in ("output", "input") and path else [head, *path]
        for column in columns:
            paths.setdefault(column, []).append(steps)
        if field not in RESULTS:
            hidden.update(_REPEATS if "output" in columns else ("error",))
    columns_sql = {name: _hidden(name) for name in sorted(hidden)}
    for column in sorted(paths.keys() - hidden):
        value = quoted(column)
        for steps in paths[column]:
            value = _without(value, steps)
        columns_sql[column] = value
    return columns_sql


def masked_answers(fields: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """Return those of ``names``, the columns of ``answers``, that are redacted."""
    heads = {f.removeprefix("output.").split(".")[0] for f in fields if not f.startswith("input.")}
    columns = frozenset(names)
    if "output" in heads:
        return columns
    taken = [*ANSWER_KEY, *columns]
    return frozenset(name for name in columns if heads & {name, _base(name, taken)})


def unknown_fields(connection: DuckDBPyConnection, fields: Iterable[str]) -> list[str]:
    """Return the fields that no row has, so that nothing would be redacted.

    Args:
        connection: with the table ``results``.
        fields: those to redact.
    """
    return [f for f in fields if f not in RESULTS and not _is_in_a_row(connection, f)]


def _is_in_a_row(connection: DuckDBPyConnection, field: str) -> bool:
    head, *path = field.split(".")
    one_column = head in ("output", "input") and path
    name = literal(f"/{_escaped(path[0] if one_column else head)}")
    conditions = " or ".join(
        f"json_exists({column}, {name}) or json_type({column}) = 'ARRAY'"
        for column in ([head] if one_column else ["output", "input"])
    )
    return bool(connection.execute(f"select 1 from results where {conditions} limit 1").fetchone())


def _hidden(column: str) -> str:
    kind = RESULTS[column]
    if kind == "VARCHAR":
        mask = MASK
    elif kind == "JSON":
        mask = f"""'"{_JSON_MASK}"'::JSON"""
    else:
        return f"NULL::{kind}"
    return f"CASE WHEN {quoted(column)} IS NULL THEN NULL ELSE {mask} END"


def _without(value: str, steps: list[str]) -> str:
    """Return SQL for a JSON value without one property; a non-object on its path is replaced."""
    cases = []
    for depth in range(len(steps), -1, -1):
        pointer = literal("".join(f"/{_escaped(step)}" for step in steps[:depth]))
        patch = _JSON_MASK if depth == 0 else _nested(steps[:depth])
        patched = f"json_merge_patch({value}, {literal(msgspec.json.encode(patch).decode())})"
        if depth == 0:
            patched = f"""'"{_JSON_MASK}"'::JSON"""
        kind = f"json_type({value}, {pointer})"
        there = f"{kind} IS NOT NULL"
        if depth < len(steps):
            there = f"{kind} IN ('ARRAY', 'VARCHAR', 'UBIGINT', 'BIGINT', 'DOUBLE', 'BOOLEAN')"
        cases.append(f"WHEN {there} THEN {patched}")
    return f"CASE {' '.join(cases)} ELSE {value} END"


def _nested(steps: list[str]) -> object:
    value: object = _JSON_MASK
    for step in reversed(steps):
        value = {step: value}
    return value


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")
