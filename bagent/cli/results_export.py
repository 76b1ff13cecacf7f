"""Results as CSV, Parquet or a table, by DuckDB: conditions, columns, redaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bagent.cli.process import log
from bagent.errors import UsageError, WriteError
from bagent.observe.formatting import counted
from bagent.text.csv import cell_text
from bagent.text.terminal import data_stdout

if TYPE_CHECKING:
    from bagent.rows import RowsConfig
    from bagent.store.run_dir import RunDir, RunInfo
    from bagent.store.tables.export_sql import Columns

TABLE_ROWS = 50
"""Rows of a table without ``--limit``."""

EXCEL_CELL = 32_767
"""Characters that a cell of Excel holds."""


@dataclass(frozen=True, slots=True)
class ResultsRequest:
    """The options of ``bagent results``; ``names`` are those of ``--columns``."""

    runs: Sequence[RunDir]
    form: str
    statuses: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    where: str | None = None
    names: list[str] | None = None
    ordered: bool = True
    with_input: bool = False
    limit: int | None = None
    redact: tuple[str, ...] = ()
    output: Path | None = None
    all_columns: bool = False
    excel: bool = False

    @property
    def json_columns(self) -> list[str]:
        """The columns of a JSON line."""
        from bagent.store.results import RESULT_NAMES

        return self.names or [*RESULT_NAMES, *(["input"] if self.with_input else [])]

    @property
    def only_results(self) -> bool:
        """Whether every column is one of ``results``, none of an answer or of the input."""
        from bagent.store.results import RESULT_NAMES

        return set(self.names or ()) <= {*RESULT_NAMES, "input"}


def write_by_tables(request: ResultsRequest) -> Iterator[bytes]:
    """Print CSV or a table, or copy to a file; JSON lines are yielded for the caller to write.

    Raises:
        UsageError: the SQL is wrong.
        WriteError: the file cannot be written.
    """
    import duckdb

    from bagent.duck import Access, literal
    from bagent.store.query import open_tables, plain_rows

    # DuckDB writes a temporary file beside the target first.
    folders = [] if request.output is None else [request.output.absolute().parent]
    # SQL that the user typed may read files.
    access = Access(folders=folders, everything=request.where is not None)
    with open_tables(request.runs, log, access=access) as connection:
        try:
            sql = _sql(request, connection)
            if request.output is not None and request.form == "parquet":
                target = literal(str(request.output.absolute()))
                connection.execute(
                    f"copy ({_json_as_text(sql, connection)}) to {target}"
                    " (format parquet, compression zstd)"
                )
                return
            cursor = connection.execute(sql)
            head = [column[0] for column in cursor.description or []]
            if request.form == "jsonl":
                for row in plain_rows(cursor, raw_json=True):
                    yield _encode(dict(zip(head, row, strict=True)))
            else:
                _print(request, head, cursor)
        except duckdb.IOException as error:
            raise WriteError(str(error).splitlines()[0]) from None
        except duckdb.Error as error:
            raise UsageError(f"SQL: {str(error).splitlines()[0]}") from None


def _sql(request: ResultsRequest, connection: Any) -> str:
    from bagent.duck import quoted
    from bagent.store.tables.export_sql import (
        MASK,
        id_as_json,
        masked_answers,
        masked_columns,
        unknown_fields,
    )

    names = request.json_columns if request.form == "jsonl" else request.names
    as_json = {"id": id_as_json(connection, request.runs)} if request.form == "jsonl" else {}
    source, selected = "results", _selection(names, as_json)
    redacted = _redacted(request)
    hidden = masked_columns(redacted)
    for name in unknown_fields(connection, request.redact):
        raise UsageError(f"--redact {name}: no row has this field", hint="input.NAME, output.NAME")
    condition = _condition(request, connection)
    if request.form in ("csv", "table") or not request.only_results:
        answers, source = _with_answers(connection, request.runs)
        masked = masked_answers(redacted, answers)
        hidden |= {answers[name]: f"case when status = 'ok' then {MASK} end" for name in masked}
        rows = f"from {source}{condition}"
        selected = _columns(request, connection, answers, as_json, rows)
    filtered = f"select * from {source}{condition}{_order(request)}"
    if hidden:
        replaced = ", ".join(f"{sql} as {quoted(name)}" for name, sql in hidden.items())
        filtered = f"select * replace ({replaced}) from ({filtered})"
    bound = "" if request.limit is None else f" limit {request.limit}"
    return f"select {selected} from ({filtered}){bound}"


def _redacted(request: ResultsRequest) -> tuple[str, ...]:
    """Return the fields to redact; ids too where the rows are named by one of them."""
    if not request.redact:
        return ()
    plain = {field.removeprefix("input.") for field in request.redact}
    configs = (_rows_config(run.load_or_report(lambda _: None)) for run in request.runs)
    named = (config.id_field if config else None for config in configs)
    id_fields = {name for field in named for name in ([field] if field else ["id", "custom_id"])}
    return (*request.redact, *(("id", "parents", "copied_from") if plain & id_fields else ()))


def _selection(names: Sequence[str] | None, columns: Columns) -> str:
    """Return columns to select; None for all. Those in ``columns`` have the value there."""
    from bagent.duck import quoted
    from bagent.store.tables.export_sql import select_list

    if names is None:
        return "*"
    return select_list({name: columns.get(name, quoted(name)) for name in names})


def _json_as_text(sql: str, connection: Any) -> str:
    """Cast JSON columns to text: other readers of Parquet take JSON for bytes."""
    from bagent.duck import quoted

    described = connection.execute(f"describe {sql}").fetchall()
    columns = [quoted(name) for name, kind, *_ in described if kind == "JSON"]
    if not columns:
        return sql
    replaced = ", ".join(f"{column}::varchar as {column}" for column in columns)
    return f"select * replace ({replaced}) from ({sql})"


def _condition(request: ResultsRequest, connection: Any) -> str:
    """Return the ``where`` clause of the options, or an empty text.

    Raises:
        UsageError: ``--where`` names a column that is not there.
    """
    from bagent.duck import literal
    from bagent.store.tables.export_sql import status_condition, typed_condition

    parts = []
    if request.where:
        parts.append(typed_condition(connection, request.where, "--where"))
    if request.statuses:
        parts.append(status_condition(request.statuses))
    if request.stages:
        parts.append(f"stage in ({', '.join(map(literal, sorted(request.stages)))})")
    return f" where {' and '.join(parts)}" if parts else ""


def _order(request: ResultsRequest) -> str:
    """Tables are in input order; those of shards are merged."""
    from bagent.duck import literal

    if not request.ordered:
        return " order by finished_at"
    stages = stages_of_shards(request.runs)
    if stages is None:
        return ""
    stage_list = ", ".join(map(literal, stages))
    return f" order by coalesce(list_position([{stage_list}]::varchar[], stage), 0), row, answer"


def stages_of_shards(runs: Sequence[RunDir]) -> list[str] | None:
    """Return the stages of runs that are shards of one input; None where they are not."""
    from dataclasses import replace

    if len(runs) < 2:
        return None
    inputs, stages = set(), dict[str, None]()
    for run in runs:
        info = run.load_or_report(lambda _: None)
        config = _rows_config(info)
        if info is None or config is None:
            return None
        stages.update(dict.fromkeys(info.stages))
        inputs.add(replace(config, shard=None, stdin_spool=None).to_json())
    return list(stages) if len(inputs) == 1 else None


def _rows_config(info: RunInfo | None) -> RowsConfig | None:
    """Return how a run reads its rows; None where that is not known."""
    import msgspec

    from bagent.rows import RowsConfig

    if info is None or info.rows is None:
        return None
    rows = info.rows if isinstance(info.rows, str) else msgspec.json.encode(info.rows).decode()
    try:
        return RowsConfig.from_json(rows)
    except (TypeError, ValueError):
        return None


def _encode(row: dict[str, Any]) -> bytes:
    """Encode one row as a JSON line; other types become text."""
    import msgspec

    return msgspec.json.encode(row, enc_hook=str) + b"\n"


def _with_answers(connection: Any, runs: Sequence[RunDir]) -> tuple[Columns, str]:
    """Return the typed columns of the answers, and SQL of ``results`` that has their values.

    ``answers`` holds the ok rows of ``results`` in the same order, so they are joined by position:
    an id may be there twice, or not at all.
    """
    from bagent.duck import literal
    from bagent.store.tables.schema import ANSWER_KEY

    described = connection.execute("describe answers").fetchall()
    kinds = {str(name): str(kind) for name, kind, *_ in described}
    typed = [name for name in kinds if name not in ANSWER_KEY]
    if not typed:
        return {}, "results"
    values = ", ".join(f"{_cell(name, kinds[name])} as value{n}" for n, name in enumerate(typed))
    infos = [run.load_or_report(lambda _: None) for run in runs]
    stages = dict.fromkeys(stage for info in infos if info for stage in info.stages)
    order = ", ".join(map(literal, stages))
    source = (
        "(select * from (select * from results where status = 'ok') positional join"
        f" (select {values} from answers)"
        " union all by name select * from results where status <> 'ok' order by"
        f" coalesce(list_position([{order}]::varchar[], stage), 0), stage, row, answer) as results"
    )
    return {name: f"value{n}" for n, name in enumerate(typed)}, source


def _cell(name: str, kind: str) -> str:
    """Return SQL of a printed column of answers: structs are JSON."""
    from bagent.duck import is_nested, quoted

    return f"to_json({quoted(name)})" if is_nested(kind) else quoted(name)


def _columns(
    request: ResultsRequest, connection: Any, answers: Columns, as_json: Columns, rows: str
) -> str:
    """Return the columns to select: those that were named, else the answers first.

    Columns of ``results`` have the values in ``as_json``; ``rows`` is SQL of the rows.
    """
    from bagent.duck import quoted
    from bagent.store.tables.export_sql import RESULT_COLUMNS, csv_columns, select_list
    from bagent.store.tables.schema import RESULTS

    plain = {name: quoted(name) for name in RESULTS}
    if request.names:
        result_columns = RESULT_COLUMNS if request.form == "csv" else plain | as_json
        return select_list(_named_columns(request, connection, answers, result_columns))
    if request.form == "table":
        head = {name: plain[name] for name in ("id", "stage", "answer", "status")}
        return select_list(head | _table_fields(answers, plain))
    return select_list(
        csv_columns(
            connection,
            answers,
            source=rows,
            all_columns=request.all_columns,
            with_input=request.with_input,
        )
    )


def _named_columns(
    request: ResultsRequest, connection: Any, answers: Columns, result_columns: Columns
) -> Columns:
    """Return the columns of ``--columns``.

    Raises:
        UsageError: there is no such column.
    """
    from bagent.store.tables.export_sql import input_fields

    names = request.names or []
    as_json = request.form == "jsonl"
    fields = {} if request.only_results else input_fields(connection, as_json=as_json)
    by_source = [("input", fields), ("answer", answers), ("result", result_columns)]
    available = {**fields, **answers, **result_columns}
    prefixed = {f"{source}.{n}": sql for source, part in by_source[:2] for n, sql in part.items()}
    hidden = {n: [s for s, part in by_source if n in part] for n in available}
    more = [f"{s}.{n}" for n, sources in hidden.items() for s in sources[:-1]]
    for name in names:
        if name not in available | prefixed:
            hint = ", ".join([*available, *more])
            raise UsageError(f"--columns {name}: no such column", hint=hint)
        if name != "id" and len(sources := hidden.get(name, [])) > 1:
            others = " and ".join(f"{source}.{name}" for source in sources[:-1])
            log(f"--columns {name} is that of the {sources[-1]}, not {others}")
    available = prefixed | available
    return {name: available[name] for name in names}


def _table_fields(answers: Columns, result_columns: Columns) -> Columns:
    """Return the columns of answers in a table: fields, and the text of rows without them."""
    if not answers:
        return {"text": result_columns["text"], "error": result_columns["error"]}
    from bagent.store.tables.export_sql import other_answer

    name = "(text)" if "text" in answers else "text"
    return {**answers, name: other_answer(answers), "error": result_columns["error"]}


def _print(request: ResultsRequest, head: list[str], cursor: Any) -> None:
    from bagent.cli.render.tables import write_lines, write_rows
    from bagent.store.query import plain_rows
    from bagent.text.csv import csv_lines

    rows = plain_rows(cursor, raw_json=False)
    if request.form == "csv":
        rows = _checked_for_excel(head, rows) if request.excel else rows
        lines = csv_lines(head, rows, guard_formulas=request.excel)
        if request.excel:
            lines = chain(["\ufeff" + next(lines)], lines)
        if request.output is None:
            write_lines(lines, data_stdout())
            return
        try:
            with request.output.open("wb") as file:
                write_lines(lines, file)
        except OSError as error:
            raise WriteError(f"{request.output}: {error.strerror}") from None
        return
    limit = TABLE_ROWS if request.limit is None else request.limit
    fetched = list(islice(rows, limit + 1))
    columns = [
        i
        for i in range(len(head))
        if _has_information(head[i], [row[i] for row in fetched], request)
    ]
    cells = [[row[i] for i in columns] for row in fetched[:limit]]
    names = [head[i] for i in columns]
    write_rows([_plain(name, names) for name in names], cells, "table")
    if len(fetched) > limit:
        typer.echo(f"the first {limit} rows; --limit N shows more", err=True)


def _checked_for_excel(head: list[str], rows: Iterator[Any]) -> Iterator[Any]:
    """Yield the rows, and warn at their end of cells that are too long for Excel."""
    too_long: list[tuple[str, str]] = []
    count = 0
    for number, row in enumerate(rows, 1):
        for name, value in zip(head, row, strict=True):
            if len(cell_text(value)) > EXCEL_CELL:
                count += 1
                row_id = cell_text(row[head.index("id")]) if "id" in head else ""
                too_long = too_long or [(name, row_id or str(number))]
        yield row
    for name, row_id in too_long:
        log(
            f"{counted(count, 'cell')} longer than {EXCEL_CELL:,} characters: Excel cuts or splits"
            f" such text; the first is {name} of row {row_id} (--columns without {name} leaves it"
            " out)"
        )


def _plain(name: str, names: Sequence[str]) -> str:
    """Return a property's own name where the column of that name is absent."""
    base = name.removesuffix("_2")
    return base if base in ("id", "stage", "answer") and base not in names else name


def _has_information(name: str, values: list[Any], request: ResultsRequest) -> bool:
    """Return whether a column of a table has information."""
    if request.names or name in ("id", "status"):
        return True
    if name in ("stage", "answer"):
        return len(set(values)) > 1
    return any(value is not None for value in values)
