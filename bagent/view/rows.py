"""The list of rows: one page by key, how many there are, and the export."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec

from bagent.duck import literal, quoted
from bagent.errors import UsageError
from bagent.report.queries import ReportDb
from bagent.store.query import plain_rows, read_unchanged
from bagent.store.tables.export_sql import answer_fields, csv_columns, select_list
from bagent.store.tables.schema import pointer
from bagent.text.csv import csv_lines
from bagent.view.filters import RowFilter
from bagent.view.tables import TEXT_RESULTS, RunTables

PAGE_ROWS = 50
CELL_CHARACTERS = 300
MOST_INPUT_FIELDS = 4
MOST_INPUT_LOOKED_AT = 40
MOST_ANSWER_FIELDS = 8
SAMPLE_ROWS = 200
"""Rows whose input and answer name the columns of the list."""

SHORT_TEXT = 16
"""Most characters of a text that is shown whole."""

EXPORT_BATCH = 500

KEY = ("row", "stage", "answer", "id")
_ORDER = "row, stage, answer, id nulls first"


class RowKey(msgspec.Struct, frozen=True, array_like=True):
    """Names one row of ``results``; the ``value`` is what the list is sorted by."""

    row: int
    stage: str
    answer: int
    id: str | None
    value: Any = None

    @property
    def text(self) -> str:
        """The key as in a query string."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RowKey:
        """Return the key of a row of ``results``."""
        return cls(row["row"], row["stage"], row["answer"], row["id"])

    @classmethod
    def parse(cls, text: str) -> RowKey | None:
        """Return the key of a query string; None for an empty one.

        Raises:
            UsageError: it is damaged.
        """
        if not text:
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise UsageError("the name of a row in the address is damaged") from None

    def sql(self) -> tuple[str, list[Any]]:
        """Return SQL that selects it in any table, and its parameters."""
        values = (self.row, self.stage, self.answer, self.id)
        return " and ".join(f"{name} is not distinct from ?" for name in KEY), [*values]


class RowColumns(msgspec.Struct, frozen=True):
    """The fields of the input and of the answer that the list has columns for."""

    inputs: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    def with_filtered(self, row_filter: RowFilter) -> RowColumns:
        """Return these columns after those of the fields that a filter tests."""
        tested = [(test.source, test.name) for test in row_filter.tests if test.name is not None]
        inputs, answers = (
            dict.fromkeys([*(name for each, name in tested if each == source), *usual])
            for source, usual in (("input", self.inputs), ("answer", self.answers))
        )
        return RowColumns(tuple(inputs), tuple(answers))


class ListedRow(msgspec.Struct, frozen=True):
    """One row of the list with the values of its columns as text."""

    key: RowKey
    values: dict[str, Any]
    inputs: list[str | None]
    answers: list[str | None]


class RowPage(msgspec.Struct, frozen=True):
    """One page of the list."""

    rows: list[ListedRow] = []
    after: RowKey | None = None
    """The key from which the next page starts."""

    long_inputs: list[bool] = []
    """Whether each column has a long text, and shares the width of the window with such columns."""

    long_answers: list[bool] = []


def row_columns(db: ReportDb) -> RowColumns:
    """Return the columns of the list, from a sample of the rows."""
    row = db.row(
        f"""select list_distinct(flatten(list(json_keys(input)))) as inputs,
                   list_distinct(flatten(list(json_keys(output)))) as answers
            from (select case when json_type(input) = 'OBJECT' then input end as input,
                         case when json_type(output) = 'OBJECT' then output end as output
                  from results limit {SAMPLE_ROWS})"""
    )
    first = db.rows(
        "select json_keys(input) as names from results where json_type(input) = 'OBJECT' limit 1"
    )
    answer = db.rows(
        "select json_keys(output) as names from results where json_type(output) = 'OBJECT' limit 1"
    )
    inputs = _in_order(first, row["inputs"], skipped=("id", "custom_id"))
    answers = _in_order(answer, row["answers"])
    return RowColumns(_input_columns(db, inputs), answers[:MOST_ANSWER_FIELDS])


def _input_columns(db: ReportDb, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first fields, the last of them replaced by a later one with the longest texts."""
    first, later = names[:MOST_INPUT_FIELDS], names[MOST_INPUT_FIELDS:MOST_INPUT_LOOKED_AT]
    if not later:
        return first
    lengths = ", ".join(
        f"median(length(json_extract_string(input, {literal(pointer(name))}))) as f{number}"
        for number, name in enumerate((*first, *later))
    )
    row = db.row(f"select {lengths} from (select input from results limit {SAMPLE_ROWS})")
    by_length = {name: row[f"f{n}"] or 0.0 for n, name in enumerate((*first, *later))}
    longest = max(by_length, key=lambda name: by_length[name])
    return first if longest in first else (*first[:-1], longest)


def _in_order(
    first: list[dict[str, Any]], names: Sequence[str] | None, skipped: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return names in the order of the first row, then the others."""
    order = dict.fromkeys(first[0]["names"] if first else ())
    order |= dict.fromkeys(sorted(names or ()))
    return tuple(name for name in order if name not in skipped)


def list_rows(
    db: ReportDb, row_filter: RowFilter, columns: RowColumns, after: RowKey | None
) -> RowPage:
    """Return the rows that follow ``after``, or the first ones.

    The keys are selected first; the cells are read for the rows of the page only.
    """
    keys = _keys(db, row_filter, after)
    page = keys[:PAGE_ROWS]
    by_key = _read(db, page, columns)
    rows = [by_key[key.row, key.stage, key.answer, key.id](key) for key in page]
    long_inputs, long_answers = (
        [any(len(texts[n] or "") > SHORT_TEXT for texts in values if texts) for n in range(count)]
        for values, count in (
            ([row.inputs for row in rows], len(columns.inputs)),
            ([row.answers for row in rows], len(columns.answers)),
        )
    )
    return RowPage(rows, page[-1] if len(keys) > PAGE_ROWS else None, long_inputs, long_answers)


def _keys(
    db: ReportDb, row_filter: RowFilter, after: RowKey | None, limit: int = PAGE_ROWS + 1
) -> list[RowKey]:
    condition, parameters = row_filter.where(db.connection)
    value, value_parameters = row_filter.order()
    select = "null" if value is None else value
    order = _ORDER
    if value is not None:
        direction = "desc" if row_filter.descending else "asc"
        order = f"value {direction} nulls last, {order}"
    elif row_filter.descending:
        order = "row desc, stage desc, answer desc, id desc nulls last"
    later, later_parameters = _later(row_filter, value is not None, after)
    rows = db.connection.execute(
        f"select row, stage, answer, id, value from"
        f" (select {', '.join(KEY)}, {select} as value from {_table(row_filter)}"
        f" where {condition})"
        f" where {later} order by {order} limit {limit}",
        [*value_parameters, *parameters, *later_parameters],
    ).fetchall()
    return [RowKey(*row) for row in rows]


def _table(row_filter: RowFilter) -> str:
    """Return the table to search: typed SQL may reach into JSON, whose type is slower to read."""
    return "results" if row_filter.sql else TEXT_RESULTS


def _later(row_filter: RowFilter, sorted_by: bool, after: RowKey | None) -> tuple[str, list[Any]]:
    """Return SQL for the rows behind a key in the order of the list."""
    if after is None:
        return "true", []
    backwards = row_filter.descending and not sorted_by
    sign = "<" if backwards else ">"
    key = f"row {sign}= ? and (row {sign} ? or (stage, answer, coalesce(id, '')) {sign} (?, ?, ?))"
    parameters: list[Any] = [after.row, after.row, after.stage, after.answer, after.id or ""]
    if not sorted_by:
        return key, parameters
    if after.value is None:
        return f"value is null and {key}", parameters
    sign = "<" if row_filter.descending else ">"
    return (
        f"(value {sign} ? or value is null or (value = ? and {key}))",
        [after.value, after.value, *parameters],
    )


_CELLS = ("status", "error_kind", "error", "text", "endpoint", "latency_ms", "completion_tokens")


def _read(db: ReportDb, keys: list[RowKey], columns: RowColumns) -> dict[Any, Any]:
    if not keys:
        return {}
    numbers = [key.row for key in keys]
    # The range lets DuckDB skip parts of the file.
    conditions, parameters = zip(*(key.sql() for key in keys), strict=True)
    cells = [f"left({n}, {CELL_CHARACTERS})" if n in ("error", "text") else n for n in _CELLS]
    rows = db.connection.execute(
        f"select {', '.join(KEY)}, {', '.join(cells)}, {_fields('input', columns.inputs)},"
        f" {_fields('output', columns.answers)} from results"
        f" where row between ? and ? and ({' or '.join(conditions)})",
        [min(numbers), max(numbers), *chain.from_iterable(parameters)],
    ).fetchall()

    def reader(row: tuple[Any, ...]) -> Any:
        values = dict(zip(_CELLS, row[4 : 4 + len(_CELLS)], strict=True))
        inputs, answers = row[-2] or [], row[-1] or []
        return lambda key: ListedRow(key, values, inputs, answers)

    return {row[:4]: reader(row) for row in rows}


def _fields(column: str, names: Sequence[str]) -> str:
    """Return SQL for a list of fields of a JSON column as short texts."""
    if not names:
        return "[]"
    paths = ", ".join(literal(pointer(name)) for name in names)
    return f"[left(x, {CELL_CHARACTERS}) for x in json_extract_string({column}, [{paths}])]"


def count_rows(db: ReportDb, row_filter: RowFilter) -> int:
    """Return how many rows a filter selects."""
    condition, parameters = row_filter.where(db.connection)
    sql = f"select count(*) from {_table(row_filter)} where {condition}"
    row = db.connection.execute(sql, parameters).fetchone()
    return int(row[0]) if row else 0


def neighbours(
    db: ReportDb, row_filter: RowFilter, key: RowKey
) -> tuple[RowKey | None, RowKey | None]:
    """Return the rows of the filter before and after a row, in the order of the input.

    The filter's own order is not used.
    """
    forward = msgspec.structs.replace(row_filter, sort="", descending=False)
    backward = msgspec.structs.replace(row_filter, sort="", descending=True)
    before, after = (_keys(db, order, key, limit=1) for order in (backward, forward))
    return before[0] if before else None, after[0] if after else None


def export(tables: RunTables, row_filter: RowFilter, form: str) -> Generator[bytes]:
    """Yield the rows of a filter as JSON lines or CSV, in the order of the input.

    CSV has the columns of ``bagent results --format csv --with-input``.

    Raises:
        UsageError: the form is neither ``jsonl`` nor ``csv``.
    """
    if form not in ("jsonl", "csv"):
        raise UsageError(f"{form} is no form of export", hint="jsonl or csv")
    with tables.results_file() as file, tables.cursor() as cursor:
        condition, parameters = row_filter.where(cursor)
        columns = "*"
        if form == "csv":
            columns = select_list(csv_columns(cursor, answer_fields(cursor), with_input=True))
        sql = f"select {columns} from results where {condition} order by {_ORDER}"
        read_unchanged([file.parent], partial(cursor.execute, sql, parameters))
        names = [column[0] for column in cursor.description or []]
        rows = plain_rows(cursor, raw_json=form == "jsonl")
        lines = _csv_lines(names, rows) if form == "csv" else _json_lines(names, rows)
        while batch := b"".join(islice(lines, EXPORT_BATCH)):
            yield batch


def _json_lines(names: list[str], rows: Iterator[Sequence[Any]]) -> Iterator[bytes]:
    for row in rows:
        yield msgspec.json.encode(dict(zip(names, row, strict=True))) + b"\n"


def _csv_lines(names: list[str], rows: Iterator[Sequence[Any]]) -> Iterator[bytes]:
    """Yield CSV whose texts are no formulas: a click on the file opens a spreadsheet."""
    for line in csv_lines(names, rows, guard_formulas=True):
        yield f"{line}\r\n".encode("utf-8", "backslashreplace")


def distinct(db: ReportDb, column: str) -> list[str]:
    """Return the first 200 values of a column of ``results``, for a menu."""
    rows = db.rows(
        f"select distinct {quoted(column)} as value from results"
        f" where {quoted(column)} is not null order by 1 limit 200"
    )
    return [row["value"] for row in rows]
