"""Results by way of the tables: for SQL conditions, redaction, CSV, Parquet and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bagent.errors import UsageError, WriteError
from bagent.text.terminal import data_stdout

if TYPE_CHECKING:
    from bagent.store.run_dir import RunDir

TABLE_ROWS = 50
"""Rows of a table for people, unless ``--limit`` says otherwise."""


@dataclass(frozen=True, slots=True)
class ResultsRequest:
    """What ``bagent results`` was asked for; each field is the option of that name.

    ``names`` are the columns, None for the usual ones; ``limit`` None is no limit.
    """

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
    def shown(self) -> list[str]:
        """The columns of a JSON line."""
        from bagent.store.results import RESULT_NAMES

        return self.names or [*RESULT_NAMES, *(["input"] if self.with_input else [])]

    @property
    def only_results(self) -> bool:
        """Whether every column is one of ``results``: none of an answer or of the input."""
        from bagent.store.results import RESULT_NAMES

        return set(self.names or ()) <= {*RESULT_NAMES, "input"}


def write_by_tables(asked: ResultsRequest) -> Iterator[bytes]:
    """Print CSV or a table, or copy to a file; JSON lines are yielded for the caller to write.

    Raises:
        UsageError: the SQL is wrong.
        WriteError: the file cannot be written.
    """
    import duckdb

    from bagent.duck import Access, literal
    from bagent.store.query import open_tables, plain_rows

    # Beside a file that is there DuckDB makes another one first.
    folders = [] if asked.output is None else [asked.output.absolute().parent]
    # SQL that the user typed may read files.
    access = Access(folders=folders, everything=asked.where is not None)
    with open_tables(asked.runs, say, access=access) as connection:
        try:
            sql = _sql(asked, connection)
            if asked.output is not None and asked.form == "parquet":
                target = literal(str(asked.output.absolute()))
                connection.execute(
                    f"copy ({_json_as_text(sql, connection)}) to {target}"
                    " (format parquet, compression zstd)"
                )
                return
            cursor = connection.execute(sql)
            head = [column[0] for column in cursor.description or []]
            if asked.form == "jsonl":
                for row in plain_rows(cursor, raw_json=True):
                    yield _encode(dict(zip(head, row, strict=True)))
            else:
                _print(asked, head, cursor)
        except duckdb.IOException as error:
            raise WriteError(str(error).splitlines()[0]) from None
        except duckdb.Error as error:
            raise UsageError(f"SQL: {str(error).splitlines()[0]}") from None


def _sql(asked: ResultsRequest, connection: Any) -> str:
    from bagent.duck import quoted
    from bagent.store.tables.masking import masked_answers, masked_columns

    names = asked.shown if asked.form == "jsonl" else asked.names
    source, shown = "results", ", ".join(map(quoted, names)) if names else "*"
    hidden = masked_columns(asked.redact)
    if asked.form in ("csv", "table") or not asked.only_results:
        answers, source = _with_answers(connection, masked_answers(asked.redact), asked.runs)
        shown = _columns(asked, connection, answers)
    filtered = f"select * from {source}{_condition(asked)}{_order(asked)}"
    if hidden:
        replaced = ", ".join(f"{sql} as {quoted(name)}" for name, sql in hidden.items())
        filtered = f"select * replace ({replaced}) from ({filtered})"
    bound = "" if asked.limit is None else f" limit {asked.limit}"
    return f"select {shown} from ({filtered}){bound}"


def _json_as_text(sql: str, connection: Any) -> str:
    """A query whose JSON columns are text: other readers of Parquet take JSON for bytes."""
    from bagent.duck import quoted

    described = connection.execute(f"describe {sql}").fetchall()
    columns = [quoted(name) for name, kind, *_ in described if kind == "JSON"]
    if not columns:
        return sql
    replaced = ", ".join(f"{column}::varchar as {column}" for column in columns)
    return f"select * replace ({replaced}) from ({sql})"


def _condition(asked: ResultsRequest) -> str:
    from bagent.duck import literal

    parts = [f"({asked.where}\n)"] if asked.where else []
    for column, chosen in (("status", asked.statuses), ("stage", asked.stages)):
        if chosen:
            parts.append(f"{column} in ({', '.join(map(literal, sorted(chosen)))})")
    return f" where {' and '.join(parts)}" if parts else ""


def _order(asked: ResultsRequest) -> str:
    """The tables stand in input order; those of shards must be brought together."""
    from bagent.duck import literal

    if not asked.ordered:
        return " order by finished_at"
    stages = stages_of_shards(asked.runs)
    if stages is None:
        return ""
    listed = ", ".join(map(literal, stages))
    return f" order by coalesce(list_position([{listed}]::varchar[], stage), 0), row, answer"


def stages_of_shards(runs: Sequence[RunDir]) -> list[str] | None:
    """The stages of runs that are parts of one input, to be read as one; None: they are not."""
    from dataclasses import replace

    from bagent.rows import RowsConfig

    if len(runs) < 2:
        return None
    inputs, stages = set(), dict[str, None]()
    for run in runs:
        info = run.look(lambda _: None)
        if info is None or info.rows is None:
            return None
        stages.update(dict.fromkeys(info.stages))
        try:
            config = RowsConfig.from_json(info.rows if isinstance(info.rows, str) else _text(info))
        except (TypeError, ValueError):
            return None
        inputs.add(replace(config, shard=None, stdin_spool=None).to_json())
    return list(stages) if len(inputs) == 1 else None


def _text(info: Any) -> str:
    import msgspec

    return msgspec.json.encode(info.rows).decode()


def _encode(row: dict[str, Any]) -> bytes:
    """One row as a JSON line; what JSON has no form for becomes text."""
    import msgspec

    return msgspec.json.encode(row, enc_hook=str) + b"\n"


Columns = dict[str, str]
"""Names of columns, each with the SQL of its value."""


def _with_answers(
    connection: Any, hidden: frozenset[str], runs: Sequence[RunDir]
) -> tuple[Columns, str]:
    """Return the typed columns of the answers, and SQL of ``results`` that has their values.

    ``answers`` holds the ok rows of ``results`` in the same order, so they are joined by position:
    an id may be there twice, or not at all.
    """
    from bagent.duck import literal
    from bagent.store.tables.masking import MASK

    described = connection.execute("describe answers").fetchall()
    kinds = {str(name): str(kind) for name, kind, *_ in described}
    typed = [name for name in kinds if name not in ("id", "stage", "answer")]
    if not typed:
        return {}, "results"
    values = ", ".join(
        f"{MASK if name in hidden else _cell(name, kinds[name])} as value{n}"
        for n, name in enumerate(typed)
    )
    infos = [run.look(lambda _: None) for run in runs]
    stages = dict.fromkeys(stage for info in infos if info for stage in info.stages)
    order = ", ".join(map(literal, stages))
    source = (
        "(select * from (select * from results where status = 'ok') positional join"
        f" (select {values} from answers)"
        " union all by name select * from results where status <> 'ok'"
        f" order by coalesce(list_position([{order}]::varchar[], stage), 0), stage, row, answer)"
    )
    return {name: f"value{n}" for n, name in enumerate(typed)}, source


def _cell(name: str, kind: str) -> str:
    """A column of answers as it is printed: structs as JSON."""
    from bagent.duck import is_nested, quoted

    return f"to_json({quoted(name)})" if is_nested(kind) else quoted(name)


def _columns(asked: ResultsRequest, connection: Any, answers: Columns) -> str:
    """Return the columns to select: those that were named, else the answers first."""
    from bagent.duck import quoted
    from bagent.store.tables.schema import RESULTS

    own: Columns = {name: quoted(name) for name in RESULTS}
    if asked.form == "csv":
        own |= {name: _iso_time(name) for name in ("started_at", "finished_at")}
    if asked.names:
        fields = {} if asked.only_results else _input_fields(connection)
        known = {**fields, **answers, **own}
        for name in asked.names:
            if name not in known:
                raise UsageError(f"--columns {name}: no such column", hint=", ".join(known))
        chosen = {name: known[name] for name in asked.names}
    else:
        chosen = _usual_columns(asked, own, answers, connection)
    return ", ".join(f"{sql} as {quoted(name)}" for name, sql in chosen.items())


def _usual_columns(
    asked: ResultsRequest, own: Columns, answers: Columns, connection: Any
) -> Columns:
    """Return ``id``, ``status``, the fields of the answers or their text, and the error."""
    if asked.form == "table":
        head = {name: own[name] for name in ("id", "stage", "answer", "status")}
        return head | _table_fields(answers, own)
    several = connection.execute(
        "select count(distinct stage) > 1, count(distinct answer) > 1 from results"
    ).fetchone()
    stage, answer = ["stage"] * several[0], ["answer"] * several[1]
    chosen = {name: own[name] for name in ("id", *stage, *answer, "status")}
    # A field of the answer keeps its name; what it would hide gets another one.
    chosen |= {f"{name}_answer" if name in chosen else name: sql for name, sql in answers.items()}
    rest = [*own] if asked.all_columns else [*([] if answers else ["text"]), "error"]
    for name in rest:
        if own[name] not in chosen.values():
            chosen[f"result_{name}" if name in chosen else name] = own[name]
    return chosen


def _table_fields(answers: Columns, own: Columns) -> Columns:
    """Return what a table shows of answers: their fields, and the text of rows without them."""
    if not answers:
        return {"text": own["text"], "error": own["error"]}
    listed = ", ".join(f"{sql}::varchar" for sql in answers.values())
    name = "(text)" if "text" in answers else "text"
    text = f"case when status = 'ok' and coalesce({listed}) is null then text end"
    return {**answers, name: text, "error": own["error"]}


def _iso_time(column: str) -> str:
    return f"strftime(make_timestamp(({column} * 1000000)::bigint), '%Y-%m-%dT%H:%M:%S.%fZ')"


def _input_fields(connection: Any) -> Columns:
    """Return the fields of the input's first rows, each as text."""
    from bagent.duck import literal

    found = connection.execute(
        "select distinct unnest(json_keys(input)) from"
        " (select input from results where json_type(input) = 'OBJECT' limit 1000)"
    ).fetchall()
    return {name: f"input ->> {literal(_pointer(name))}" for (name,) in sorted(found)}


def _pointer(name: str) -> str:
    """Return the JSON pointer of a property (RFC 6901)."""
    return "/" + name.replace("~", "~0").replace("/", "~1")


def _print(asked: ResultsRequest, head: list[str], cursor: Any) -> None:
    from bagent.cli.render.tables import csv_lines, write_lines, write_rows
    from bagent.store.query import plain_rows

    found = plain_rows(cursor, raw_json=False)
    if asked.form == "csv":
        lines = csv_lines(head, found, excel=asked.excel)
        if asked.output is None:
            write_lines(lines, data_stdout())
            return
        try:
            with asked.output.open("wb") as file:
                write_lines(lines, file)
        except OSError as error:
            raise WriteError(f"{asked.output}: {error.strerror}") from None
        return
    most = TABLE_ROWS if asked.limit is None else asked.limit
    rows = list(islice(found, most + 1))
    kept = [i for i in range(len(head)) if _tells(head[i], [row[i] for row in rows], asked)]
    shown = [[row[i] for i in kept] for row in rows[:most]]
    names = [head[i] for i in kept]
    write_rows([_plain(name, names) for name in names], shown, "table")
    if len(rows) > most:
        typer.echo(f"the first {most} rows; --limit N shows more", err=True)


def _plain(name: str, names: Sequence[str]) -> str:
    """A property's own name where the column that it made way for is not shown."""
    own = name.removesuffix("_2")
    return own if own in ("id", "stage", "answer") and own not in names else name


def _tells(name: str, values: list[Any], asked: ResultsRequest) -> bool:
    """Whether a column of a table for people says anything."""
    if asked.names or name in ("id", "status"):
        return True
    if name in ("stage", "answer"):
        return len(set(values)) > 1
    return any(value is not None for value in values)


def say(words: str) -> None:
    """Words for people, on stderr."""
    typer.echo(f"bagent: {words}", err=True)
