"""``bagent query``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bagent.errors import UsageError


def query(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A directory, or a name under runs.")],
    sql: Annotated[str | None, typer.Argument(metavar="SQL", help="What to ask.")] = None,
    form: Annotated[str | None, typer.Option("--format", help="table, csv or jsonl.")] = None,
) -> None:
    """Ask a run by SQL (DuckDB), while it goes on or after it.

    Tables: results, answers, attempts, tool_calls, endpoints. RUN may be left out: the latest.

    Example: bagent query review "select status, count(*), avg(ttft_ms) from results group by 1"
    """
    from bagent.cli.printing import write_rows
    from bagent.store.asking import one_statement, open_tables, plain_rows
    from bagent.store.rundir import find_run

    wanted, text = (None, run) if sql is None else (run, sql)
    statement = one_statement(text)
    found = find_run(wanted, Path("runs"))
    with open_tables(found, _say) as connection:
        import duckdb

        try:
            cursor = connection.execute(statement)
            names = [column[0] for column in cursor.description or []]
            form = form or "table"
            rows = plain_rows(cursor) if form == "jsonl" else iter(cursor.fetchone, None)
            write_rows(names, rows, form)
        except duckdb.Error as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise UsageError(f"SQL: {lines[0]}", hint=" ".join(lines[1:3])) from None


def _say(words: str) -> None:
    typer.echo(f"bagent: {words}", err=True)
