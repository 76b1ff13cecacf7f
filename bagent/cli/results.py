"""``bagent results``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from bagent.errors import UsageError, WriteError

if TYPE_CHECKING:
    from bagent.store.rundir import RunDir

FORMATS = ("jsonl", "csv", "parquet", "table", "openai-batch")
TABLE_ROWS = 50


def results(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A directory, or a name under runs.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "jsonl",
    statuses: Annotated[
        list[str] | None, typer.Option("--status", help="Only these; may be repeated.")
    ] = None,
    where: Annotated[str | None, typer.Option("--where", help="A DuckDB SQL condition.")] = None,
    columns: Annotated[
        str | None, typer.Option("--columns", help="Names parted by commas.")
    ] = None,
    ordered: Annotated[
        bool,
        typer.Option(
            "--ordered/--as-finished", help="jsonl in input order, or as rows were finished."
        ),
    ] = True,
    with_input: Annotated[bool, typer.Option("--with-input", help="jsonl with the input.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write there.")] = None,
) -> None:
    """The current result of every row in input order, from the journal, also while a run goes on.

    Example: bagent results review --status ok --columns id,output | head
    """
    from bagent.store.readers import RESULT_NAMES
    from bagent.store.rundir import find_run

    if form not in FORMATS:
        raise UsageError(f"--format {form}: no such format", hint=", ".join(FORMATS))
    if form == "parquet" and output is None:
        raise UsageError("parquet needs a file to go to", hint="-o results.parquet")
    found = find_run(run, Path("runs"))
    chosen = frozenset(_statuses(statuses))
    names = [name.strip() for name in columns.split(",") if name.strip()] if columns else None
    if form == "table" and output is not None:
        raise UsageError("--format table goes to the terminal", hint="--format csv -o FILE")
    if form in ("csv", "parquet", "table") or where:
        if form == "openai-batch":
            raise UsageError("--where does not go with openai-batch", hint="--status does")
        if form == "jsonl" and names is None:
            names = [*RESULT_NAMES, *(["input"] if with_input else [])]
        _by_tables(found, form, _condition(chosen, where), names, output)
        return
    lines = (
        _batch_lines(found, chosen)
        if form == "openai-batch"
        else _json_lines(found, chosen, names, ordered=ordered, with_input=with_input)
    )
    _write_to(lines, output)


def _write_to(lines: Iterator[bytes], output: Path | None) -> None:
    """Write to a file, or to stdout, whose reader may go: that error is the caller's."""
    if output is None:
        _write(lines, sys.stdout.buffer)
        return
    try:
        with output.open("wb") as file:
            _write(lines, file)
    except OSError as error:
        raise WriteError(f"{output}: {error.strerror}") from None


def _write(lines: Iterator[bytes], file: BinaryIO) -> None:
    for line in lines:
        file.write(line)
    file.flush()


def _statuses(given: list[str] | None) -> list[str]:
    from bagent.store.codec import STATUSES

    words = [word.strip() for text in given or () for word in text.split(",")]
    for word in words:
        if word not in STATUSES:
            raise UsageError(f"--status {word}: no such status", hint=", ".join(STATUSES))
    return words


def _condition(chosen: frozenset[str], where: str | None) -> str:
    parts = [f"({where})"] if where else []
    if chosen:
        parts.append("status in (" + ", ".join(f"'{word}'" for word in sorted(chosen)) + ")")
    return f" where {' and '.join(parts)}" if parts else ""


def _json_lines(
    run: RunDir,
    chosen: frozenset[str],
    names: list[str] | None,
    *,
    ordered: bool,
    with_input: bool,
) -> Iterator[bytes]:
    from bagent.store.readers import RESULT_NAMES, Wanted, encode_result, iter_results
    from bagent.store.tables import input_reader

    known = (*RESULT_NAMES, "input")
    for name in names or ():
        if name not in known:
            raise UsageError(f"--columns {name}: no such column", hint=", ".join(known))
    info = run.look(_say)
    wants_input = with_input or (names is not None and "input" in names)
    read = input_reader(info) if wants_input and info is not None else None
    wanted = Wanted(statuses=chosen or None, ordered=ordered)
    for result in iter_results(run.path, wanted, report=_say, read_input=read):
        kept = result if names is None else {name: result.get(name) for name in names}
        yield encode_result(kept)


def _batch_lines(run: RunDir, chosen: frozenset[str]) -> Iterator[bytes]:
    from bagent.store.batch_output import batch_line
    from bagent.store.readers import Wanted, iter_outcomes

    wanted = Wanted(statuses=chosen or None, ordered=True)
    for outcome in iter_outcomes(run.path, wanted, report=_say):
        yield batch_line(outcome)


def _by_tables(
    run: RunDir, form: str, condition: str, names: list[str] | None, output: Path | None
) -> None:
    import duckdb

    from bagent.cli.printing import write_rows
    from bagent.store.asking import open_tables, plain_rows
    from bagent.store.columns import quoted

    with open_tables(run, _say) as connection:
        source, shown = "results", ", ".join(map(quoted, names)) if names else "*"
        if form == "table" and not names:
            shown, source = _table_columns(connection)
        sql = f"select {shown} from {source}{condition}"
        try:
            if output is not None and form in ("csv", "parquet"):
                kind = "csv, header" if form == "csv" else "parquet, compression zstd"
                target = str(output).replace("'", "''")
                connection.execute(f"copy ({sql}) to '{target}' (format {kind})")
                return
            cursor = connection.execute(sql)
            head = [column[0] for column in cursor.description or []]
            if form == "table":
                _print_table(head, cursor.fetchmany(TABLE_ROWS + 1))
            elif form == "csv":
                write_rows(head, iter(cursor.fetchone, None), "csv")
            else:
                rows = plain_rows(cursor)
                _write_to((encode(dict(zip(head, row, strict=True))) for row in rows), output)
        except duckdb.IOException as error:
            raise WriteError(str(error).splitlines()[0]) from None
        except duckdb.Error as error:
            raise UsageError(f"SQL: {str(error).splitlines()[0]}") from None


def encode(row: dict[str, Any]) -> bytes:
    """One row as a JSON line; what JSON has no form for becomes text."""
    import msgspec

    return msgspec.json.encode(row, enc_hook=str) + b"\n"


def _table_columns(connection: Any) -> tuple[str, str]:
    """For people: id, status, then the typed columns of the answers, else the text.

    ``answers`` holds the ok rows of ``results`` in the same order, so they are joined by place:
    an id may be there twice, or not at all.
    """
    from bagent.store.columns import quoted

    columns = [row[0] for row in connection.execute("describe answers").fetchall()]
    typed = [name for name in columns if name not in ("id", "stage", "answer")]
    if not typed:
        return "id, status, text, error", "results"
    values = ", ".join(f"{quoted(name)} as value{n}" for n, name in enumerate(typed))
    shown = ", ".join(f"value{n} as {quoted(name)}" for n, name in enumerate(typed))
    source = (
        "(select * from (select * from results where status = 'ok') positional join"
        f" (select {values} from answers)"
        " union all by name select * from results where status <> 'ok'"
        " order by row, stage, answer)"
    )
    return f"id, status, {shown}, error", source


def _print_table(head: list[str], rows: list[Any]) -> None:
    from bagent.cli.printing import write_rows

    empty = {i for i in range(len(head)) if all(row[i] is None for row in rows)}
    kept = [i for i in range(len(head)) if i not in empty or head[i] in ("id", "status")]
    shown = [[row[i] for i in kept] for row in rows[:TABLE_ROWS]]
    write_rows([head[i] for i in kept], shown, "table")
    if len(rows) > TABLE_ROWS:
        typer.echo(f"the first {TABLE_ROWS} rows; --format csv shows all", err=True)


def _say(words: str) -> None:
    typer.echo(f"bagent: {words}", err=True)
