"""Results by way of the tables: for SQL conditions, redaction, CSV, Parquet and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bagent.errors import UsageError, WriteError

if TYPE_CHECKING:
    from bagent.store.rundir import RunDir

TABLE_ROWS = 50
"""Rows of a table for people, unless ``--limit`` says otherwise."""


@dataclass(frozen=True, slots=True)
class Asked:
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

    @property
    def shown(self) -> list[str]:
        """The columns of a JSON line."""
        from bagent.store.readers import RESULT_NAMES

        return self.names or [*RESULT_NAMES, *(["input"] if self.with_input else [])]


def write_by_tables(asked: Asked) -> Iterator[bytes]:
    """Print CSV or a table, or copy to a file; JSON lines are yielded for the caller to write.

    Raises:
        UsageError: the SQL is wrong.
        WriteError: the file cannot be written.
    """
    import duckdb

    from bagent.duck import Access, literal
    from bagent.store.asking import open_tables, plain_rows

    files = [] if asked.output is None else [asked.output]
    # SQL that the user typed may read files.
    access = Access(files=files, everything=asked.where is not None)
    with open_tables(asked.runs, say, access=access) as connection:
        try:
            sql = _sql(asked, connection)
            if asked.output is not None and asked.form in ("csv", "parquet"):
                kind = "csv, header" if asked.form == "csv" else "parquet, compression zstd"
                target = literal(str(asked.output.absolute()))
                connection.execute(f"copy ({sql}) to {target} (format {kind})")
                return
            cursor = connection.execute(sql)
            head = [column[0] for column in cursor.description or []]
            if asked.form == "jsonl":
                for row in plain_rows(cursor):
                    yield _encode(dict(zip(head, row, strict=True)))
            else:
                _print(asked, head, cursor)
        except duckdb.IOException as error:
            raise WriteError(str(error).splitlines()[0]) from None
        except duckdb.Error as error:
            raise UsageError(f"SQL: {str(error).splitlines()[0]}") from None


def _sql(asked: Asked, connection: Any) -> str:
    from bagent.duck import quoted
    from bagent.store.redact import masked_answers, masked_columns

    names = asked.shown if asked.form == "jsonl" else asked.names
    source, shown = "results", ", ".join(map(quoted, names)) if names else "*"
    hidden = masked_columns(asked.redact)
    if asked.form == "table" and not names:
        shown, source = _table_columns(connection, masked_answers(asked.redact), asked.runs)
    filtered = f"select * from {source}{_condition(asked)}{_order(asked)}"
    if hidden:
        replaced = ", ".join(f"{sql} as {quoted(name)}" for name, sql in hidden.items())
        filtered = f"select * replace ({replaced}) from ({filtered})"
    bound = "" if asked.limit is None else f" limit {asked.limit}"
    return f"select {shown} from ({filtered}){bound}"


def _condition(asked: Asked) -> str:
    from bagent.duck import literal

    parts = [f"({asked.where}\n)"] if asked.where else []
    for column, chosen in (("status", asked.statuses), ("stage", asked.stages)):
        if chosen:
            parts.append(f"{column} in ({', '.join(map(literal, sorted(chosen)))})")
    return f" where {' and '.join(parts)}" if parts else ""


def _order(asked: Asked) -> str:
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


def _table_columns(
    connection: Any, hidden: frozenset[str], runs: Sequence[RunDir]
) -> tuple[str, str]:
    """For people: id, stage, answer, status, then the typed columns of the answers, else the text.

    ``answers`` holds the ok rows of ``results`` in the same order, so they are joined by place:
    an id may be there twice, or not at all.
    """
    from bagent.duck import literal, quoted
    from bagent.store.redact import MASK

    columns = [row[0] for row in connection.execute("describe answers").fetchall()]
    typed = [name for name in columns if name not in ("id", "stage", "answer")]
    if not typed:
        return "id, stage, answer, status, text, error", "results"
    values = ", ".join(
        f"{MASK if name in hidden else quoted(name)} as value{n}" for n, name in enumerate(typed)
    )
    shown = ", ".join(f"value{n} as {quoted(name)}" for n, name in enumerate(typed))
    infos = [run.look(lambda _: None) for run in runs]
    stages = dict.fromkeys(stage for info in infos if info for stage in info.stages)
    order = ", ".join(map(literal, stages))
    source = (
        "(select * from (select * from results where status = 'ok') positional join"
        f" (select {values} from answers)"
        " union all by name select * from results where status <> 'ok'"
        f" order by coalesce(list_position([{order}]::varchar[], stage), 0), stage, row, answer)"
    )
    listed = ", ".join(f"value{n}::varchar" for n in range(len(typed)))
    name = "(text)" if "text" in typed else "text"
    text = f"case when status = 'ok' and coalesce({listed}) is null then text end as {quoted(name)}"
    return f"id, stage, answer, status, {shown}, {text}, error", source


def _print(asked: Asked, head: list[str], cursor: Any) -> None:
    from bagent.cli.printing import write_rows

    if asked.form == "csv":
        write_rows(head, iter(cursor.fetchone, None), "csv")
        return
    most = TABLE_ROWS if asked.limit is None else asked.limit
    rows = cursor.fetchmany(most + 1)
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


def _tells(name: str, values: list[Any], asked: Asked) -> bool:
    """Whether a column of a table for people says anything."""
    if asked.names or name in ("id", "status"):
        return True
    if name in ("stage", "answer"):
        return len(set(values)) > 1
    return any(value is not None for value in values)


def say(words: str) -> None:
    """Words for people, on stderr."""
    typer.echo(f"bagent: {words}", err=True)
