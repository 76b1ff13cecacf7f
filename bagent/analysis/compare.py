"""Comparison of two runs row by row.

Rows are joined by id, stage and answer; rows with equal ids in the order of the input. Counting
is SQL over the tables of both runs; the JSON of answers whose texts differ is compared here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.errors import UsageError
from bagent.text.suggest import did_you_mean
from bagent.types import Json

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MOST_VALUES = 12
"""Most values of a field on either side for which pairs of values are counted."""

LONGEST_VALUE = 40
"""Characters of the longest such value."""

NUMBERS = ("latency_ms", "ttft_ms")
_CHUNK = 20_000
_EXCERPT = 120


class FieldPairs(msgspec.Struct, frozen=True):
    """The values of one field in the rows that are ok in both runs, with an answer in one."""

    field: str

    same: int
    """Rows with equal values."""

    values: list[dict[str, Json]]
    """Counts of pairs of values, as ``a``, ``b`` and ``rows``; empty where there are many values,
    or long ones."""


class Sameness(msgspec.Struct, frozen=True):
    """The outcome of a comparison."""

    numbers: dict[str, Json]
    """Counts and sums by name, for ``--fail-if``."""

    changes: list[dict[str, Json]]
    """Counts of pairs of statuses that differ."""

    rows: list[dict[str, Json]]
    """The first rows that differ."""

    fields: list[FieldPairs]
    """Each field to compare."""

    claim: str
    """Whether the outputs are the same, in one phrase."""

    why_not: list[str]
    """Why the outputs are not the same; empty where they are."""


class Question(msgspec.Struct, frozen=True):
    """What to compare beyond the whole answer."""

    on: tuple[str, ...] = ()
    """Fields of the output (dotted paths), else columns of ``results``."""

    sql: str | None = None
    """A condition over the rows ``a`` and ``b``."""

    stage: str | None = None
    """The only stage to compare; None compares all."""


def compare_runs(
    connection: DuckDBPyConnection, first: Path, second: Path, question: Question, examples: int
) -> Sameness:
    """Compare two folders of tables.

    Args:
        first, second: folders with ``results.parquet``.
        examples: how many differing rows to show.

    Raises:
        duckdb.Error: the SQL is wrong.
        UsageError: a field is in no answer.
    """
    for name, folder in (("a", first), ("b", second)):
        connection.execute(source_sql(name, folder, question.stage))
    by_stage = _count(connection, "select count(distinct stage) from (from a union all from b)") > 1
    if by_stage:
        each = "select max(n) from (select count(distinct stage) n from {0})"
        by_stage = any(_count(connection, each.format(name)) > 1 for name in "ab")
    keys = "name, answer, nth" + ", stage" * by_stage
    for field in question.on:
        check_field(connection, field, "ab")
    values = {
        field: (field_sql(connection, field, "a"), field_sql(connection, field, "b"))
        for field in question.on
    }
    on = [equal_sql(*pair) for pair in values.values()]
    connection.execute(_pairs_sql(keys, on, question.sql))
    _compare_json(connection, keys)
    fields = [_field_pairs(connection, keys, field, pair) for field, pair in values.items()]
    numbers = _numbers(connection, question)
    numbers |= {f"same_on_{pairs.field}": pairs.same for pairs in fields}
    why_not = _reasons(numbers)
    exact = numbers["same_text"] == numbers["joined"] - numbers["without_output"]
    claim = "the same output, byte for byte" if exact else "the same output as JSON"
    if numbers["without_output"]:
        claim += f"; {numbers['without_output']:,} rows have no output in either run"
    numbers["same_output"] = not why_not
    return Sameness(
        numbers,
        dicts(
            connection,
            'select status_a, status_b, count(*) as "rows" from pairs'
            " where in_a and in_b and status_a <> status_b group by all order by 3 desc, 1, 2",
        ),
        dicts(connection, _examples_sql(keys, examples, by_stage)),
        fields,
        claim if not why_not else "not the same output",
        why_not,
    )


def source_sql(name: str, folder: Path, stage: str | None) -> str:
    """Return SQL of a view of the results with ``name``, ``nth`` and ``answer_text``.

    ``name`` identifies a row, ``nth`` numbers those of one name. ``answer_text`` is the answer, or
    the output of a row that no model answered.
    """
    from bagent.duck import file_source, literal

    only = "" if stage is None else f" where stage = {literal(stage)}"
    label = "coalesce(id, 'row ' || row)"
    return (
        f"create or replace temp view {name} as select *,"
        f" coalesce(text, output::varchar) as answer_text,"
        f" {label} as name, row_number() over"
        f" (partition by {label}, stage, answer order by row) as nth"
        f" from read_parquet({file_source(folder / 'results.parquet')}){only}"
    )


def field_sql(connection: DuckDBPyConnection, field: str, row: str) -> str:
    """Return SQL of a field as text: a path into the output, else a column of ``results``.

    A property of an output of the view ``a`` goes before a column of that name.
    """
    from bagent.duck import literal, quoted
    from bagent.store.tables.schema import RESULTS

    if field in RESULTS and field != "output" and not has_property(connection, field):
        return f"{row}.{quoted(field)}::varchar"
    return f"json_extract_string({row}.output, {literal(_pointer(field))})"


def check_field(connection: DuckDBPyConnection, field: str, views: str) -> None:
    """Refuse a field that is neither in an answer of these views nor a column of ``results``.

    Where no row is ok, there is no answer to check, and any field is accepted.

    Args:
        views: names of views, each of one letter.

    Raises:
        UsageError: the field is in none of them.
    """
    from bagent.duck import literal
    from bagent.store.tables.schema import RESULTS

    if field in RESULTS:
        return
    source = " union all ".join(f"select status, output from {view}" for view in views)
    pointer = literal(_pointer(field))
    sql = (
        f"select count(*) filter (json_extract(output, {pointer}) is not null) as found,"
        f" count(*) filter (status = 'ok') as usable from ({source})"
    )
    (counts,) = dicts(connection, sql)
    if counts["found"] or not counts["usable"]:
        return
    keys = connection.execute(
        f"select distinct unnest(json_keys(output)) from ({source})"
        " where json_type(output) = 'OBJECT' order by 1 limit 1000"
    ).fetchall()
    names = [str(key) for (key,) in keys]
    hint = did_you_mean(field, [*names, *RESULTS])
    raise UsageError(
        f"--on {field}: no answer has this field",
        hint=hint or f"the answers have {', '.join(names[:12]) or 'only text: --on text'}",
    )


def _pointer(field: str) -> str:
    """Return the JSON pointer of a dotted path into the output."""
    from bagent.store.tables.schema import pointer

    steps = field.removeprefix("output.").split(".") if field != "output" else []
    return "".join(map(pointer, steps))


def has_property(connection: DuckDBPyConnection, name: str) -> bool:
    """Return whether an output of the view ``a`` has this property."""
    from bagent.duck import literal
    from bagent.store.tables.schema import pointer

    path = literal(pointer(name))
    sql = f"select 1 from a where json_extract(output, {path}) is not null limit 1"
    return connection.execute(sql).fetchone() is not None


def equal_sql(first: str, second: str) -> str:
    """Return SQL for whether two texts are the same value; 1 and 1.0 are."""
    return (
        f"coalesce({first} is not distinct from {second}"
        f" or try_cast({first} as double) = try_cast({second} as double), false)"
    )


def normal_sql(text: str) -> str:
    """Return SQL of text with composed characters and single blanks, none at its ends."""
    return rf"trim(regexp_replace(nfc_normalize({text}), '\s+', ' ', 'g'))"


def _pairs_sql(keys: str, on: Sequence[str], sql: str | None) -> str:
    chosen = " and ".join(on) or "null"
    return f"""
        create or replace temp table pairs as
        select row_number() over () as pair, {keys}, a.row as row_a, b.row as row_b,
               a.row is not null as in_a, b.row is not null as in_b,
               a.status as status_a, b.status as status_b,
               a.prompt_sha256 = b.prompt_sha256 as same_prompt,
               a.answer_text is null and b.answer_text is null as without_output,
               a.answer_text is not distinct from b.answer_text as same_text,
               {normal_sql("a.answer_text")}
                   is not distinct from {normal_sql("b.answer_text")} as same_normal,
               a.prompt_sha256 is null and b.prompt_sha256 is null
               and a.endpoint is null and b.endpoint is null and a.copied_from is null
                   as without_request,
               case when a.output is null and b.output is null then null
                    else a.output::varchar is not distinct from b.output::varchar end as same_json,
               {chosen} as same_on, ({sql or "null"}\n) as same_sql
        from a full join b using ({keys})"""


def _field_pairs(
    connection: DuckDBPyConnection, keys: str, field: str, values: tuple[str, str]
) -> FieldPairs:
    """Return the values of a field in the rows that are ok in both runs."""
    source = (
        f"(select {values[0]} as a_value, {values[1]} as b_value, {equal_sql(*values)} as same"
        f" from a join b using ({keys}) where a.status = 'ok' and b.status = 'ok'"
        " and (a.answer_text is not null or b.answer_text is not null))"
    )
    (counts,) = dicts(
        connection,
        "select count(*) filter (same) as same, count(distinct a_value) as a_values,"
        " count(distinct b_value) as b_values,"
        f" coalesce(max(greatest(length(a_value), length(b_value))), 0) as longest from {source}",
    )
    few = max(counts["a_values"], counts["b_values"]) <= MOST_VALUES
    pairs = []
    if few and counts["longest"] <= LONGEST_VALUE:
        sql = f'select a_value as a, b_value as b, count(*) as "rows" from {source} group by all'
        pairs = dicts(connection, f"{sql} order by 1, 2")
    return FieldPairs(field, counts["same"], pairs)


def _compare_json(connection: DuckDBPyConnection, keys: str) -> None:
    """Mark outputs that are equal as JSON although their texts differ."""
    cursor = connection.execute(
        f"select pair, a.output::varchar, b.output::varchar from pairs join a using ({keys})"
        f" join b using ({keys}) where not same_json and a.output is not null"
        " and b.output is not null"
    )
    equal: list[int] = []
    while pairs := cursor.fetchmany(_CHUNK):
        equal += [pair for pair, first, second in pairs if same_json(_json(first), _json(second))]
    for start in range(0, len(equal), _CHUNK):
        connection.execute(
            "update pairs set same_json = true where pair in (select unnest(?))",
            [equal[start : start + _CHUNK]],
        )


def _json(text: str) -> Json:
    return msgspec.json.decode(text)


def same_json(first: Json, second: Json) -> bool:
    """Return whether two JSON values are equal: keys in any order, 1 is 1.0 but not true."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            same_json(v, second[k]) for k, v in first.items()
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_json, first, second))
    return bool(first == second)


def _numbers(connection: DuckDBPyConnection, question: Question) -> dict[str, Json]:
    (numbers,) = dicts(
        connection,
        """
        select count(*) filter (in_a) as rows_a, count(*) filter (in_b) as rows_b,
               count(*) filter (in_a and in_b) as joined,
               count(*) filter (not in_b) as only_a, count(*) filter (not in_a) as only_b,
               count(*) filter (same_prompt) as same_prompt,
               count(*) filter (same_prompt = false) as other_prompt,
               count(*) filter (in_a and in_b and same_prompt is null and not without_request)
                   as unknown_prompt,
               count(*) filter (without_request and status_a = 'ok' and status_b = 'ok')
                   as without_prompt,
               count(*) filter (answered and same_text) as same_text,
               count(*) filter (answered and same_normal) as same_normal,
               count(*) filter (in_a and in_b and same_json) as same_json,
               count(*) filter (in_a and in_b and not same_json) as other_json,
               count(*) filter (answered and same_json is null) as without_json,
               count(*) filter (in_a and in_b and without_output) as without_output,
               count(*) filter (in_a and in_b and status_a <> status_b) as status_changes,
               count(*) filter (status_a = 'ok' and status_b = 'ok') as both_ok,
               count(*) filter (answered and status_a = 'ok' and status_b = 'ok' and same_on)
                   as same_on,
               count(*) filter (in_a and in_b and same_sql) as same_sql
        from (select *, in_a and in_b and not without_output as answered from pairs)""",
    )
    if not question.on:
        del numbers["same_on"]
    if question.sql is None:
        del numbers["same_sql"]
    for name in "ab":
        numbers |= side_numbers(connection, name)
    return numbers


def side_numbers(connection: DuckDBPyConnection, name: str) -> dict[str, Json]:
    """Return the ok rows, latency percentiles, tokens and cost of one run."""
    quantiles = ", ".join(
        f"round(quantile_disc({column}, {share}), 1) as {column.removesuffix('_ms')}_p{p}_{name}"
        for column in NUMBERS
        for share, p in ((0.5, 50), (0.99, 99))
    )
    sums = ", ".join(
        f"sum({column})::bigint as {column}_{name}"
        for column in ("prompt_tokens", "completion_tokens")
    )
    (numbers,) = dicts(
        connection,
        f"select count(*) filter (status = 'ok') as ok_{name},"
        f" count(copied_from) as copied_{name}, {quantiles}, {sums},"
        f" sum(cost_usd) as cost_usd_{name} from {name}",
    )
    return numbers


def _reasons(n: dict[str, Json]) -> list[str]:
    """Return why the outputs of the two runs are not the same."""
    joined = n["joined"]
    wrong = (
        (not joined, "no row is in both"),
        (joined and not n["both_ok"], "no row is ok in both"),
        (n["only_a"], f"{n['only_a']:,} rows are only in the first"),
        (n["only_b"], f"{n['only_b']:,} rows are only in the second"),
        (n["other_prompt"], f"{n['other_prompt']:,} prompts differ"),
        (n["unknown_prompt"], f"{n['unknown_prompt']:,} prompts are not known"),
        (n["status_changes"], f"{n['status_changes']:,} rows have another status"),
    )
    reasons = [reason for is_wrong, reason in wrong if is_wrong]
    differ = joined - n["without_output"] - n["same_text"]
    other_json = n["other_json"]
    if differ and (other_json or n["without_json"]):
        reasons.append(
            f"{differ:,} answers differ" + (f" ({other_json:,} as JSON)" if other_json else "")
        )
    return reasons


def _examples_sql(keys: str, examples: int, by_stage: bool) -> str:
    stage = "pairs.stage, " * by_stage
    return f"""
        select pairs.name as id, {stage}pairs.answer, status_a, status_b, same_prompt,
               left({_shown_sql("a")}, {_EXCERPT}) as a, left({_shown_sql("b")}, {_EXCERPT}) as b
        from (select *, row_number() over (
                  order by status_a = status_b, coalesce(same_json, false),
                           coalesce(row_a, row_b), {keys}) as place
              from pairs where not (in_a and in_b and status_a = status_b and same_text)
              or same_on = false or same_sql = false
              order by place limit {examples}) as pairs
        left join a using ({keys}) left join b using ({keys})
        order by place"""  # a join keeps no order


def _shown_sql(row: str) -> str:
    """Return SQL of the answer of a row; of a failed one, its error."""
    answer, error = f"{row}.answer_text", f"{row}.error"
    failed = f"coalesce({error}, {answer})"
    return f"case when {row}.status = 'ok' then coalesce({answer}, {error}) else {failed} end"


def _count(connection: DuckDBPyConnection, sql: str) -> int:
    row: Any = connection.execute(sql).fetchone()
    return int(row[0] or 0)


def dicts(connection: DuckDBPyConnection, sql: str) -> list[dict[str, Json]]:
    """Return the rows of a query as dicts."""
    cursor = connection.execute(sql)
    names: Sequence[str] = [column[0] for column in cursor.description or []]
    rows: Iterator[Any] = iter(cursor.fetchone, None)
    return [dict(zip(names, row, strict=True)) for row in rows]


Z = 1.959963984540054
"""The quantile of the normal distribution for 95 %."""

_EXACT = 10_000
"""Up to so many differing rows McNemar's test is exact."""


def wilson(right: int, rows: int) -> tuple[float, float] | None:
    """Return the Wilson score interval of a share (Wilson 1927); None without rows."""
    if not rows:
        return None
    share, square = right / rows, Z * Z / rows
    middle = share + square / 2
    half = Z * math.sqrt(share * (1 - share) / rows + square / (4 * rows))
    scale = 1 + square
    return round(max(0.0, (middle - half) / scale), 6), round(min(1.0, (middle + half) / scale), 6)


def paired_difference(only_a: int, only_b: int, rows: int) -> tuple[float, float] | None:
    """Return the interval of the share of B less that of A over the same rows.

    The adjusted Wald interval of Agresti and Min (2005). None without rows.

    Args:
        only_a: rows where only A is right.
        only_b: rows where only B is right.
        rows: all rows.
    """
    if not rows:
        return None
    a, b, n = only_a + 0.5, only_b + 0.5, rows + 2
    middle = (b - a) / n
    half = Z * math.sqrt(a + b - (b - a) ** 2 / n) / n
    return round(max(-1.0, middle - half), 6), round(min(1.0, middle + half), 6)


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the two-sided p of McNemar's test: how likely is so large a difference by chance.

    Exact by the binomial distribution; for very many rows the normal one with its correction.
    """
    n, least = only_a + only_b, min(only_a, only_b)
    if not n:
        return 1.0
    if n > _EXACT:
        z = max(0.0, abs(only_a - only_b) - 1) / math.sqrt(n)
        return math.erfc(z / math.sqrt(2))
    # The logarithms of n over k: 2**-n is 0 as a float from 1,075 rows on.
    half = n * math.log(2)
    log_factorial = math.lgamma(n + 1)
    terms = (
        math.exp(log_factorial - math.lgamma(k + 1) - math.lgamma(n - k + 1) - half)
        for k in range(least + 1)
    )
    return min(1.0, 2 * math.fsum(terms))
