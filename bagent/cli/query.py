"""``bagent query``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagent.cli.results_sql import say
from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.store.rundir import RunDir


def query(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A directory, or a name under runs.")
    ] = None,
    sql: Annotated[str | None, typer.Argument(metavar="SQL", help="What to ask.")] = None,
    form: Annotated[str, typer.Option("--format", help="table, csv or jsonl.")] = "table",
) -> None:
    """Ask a run by SQL (DuckDB), while it goes on or after it; without SQL, a small shell.

    Tables: results, answers, attempts, tool_calls, endpoints. Views over them: errors (alike but
    for numbers), latency (by stage), by_endpoint, turns. RUN may be left out: the latest.

    Example: bagent query review "select status, count(*), avg(ttft_ms) from results group by 1"
    """
    from bagent.cli.printing import write_rows
    from bagent.duck import Access
    from bagent.store.asking import one_statement, open_tables, plain_rows

    found, text = _asked(run, sql)
    statement = None if text is None else one_statement(text)
    # The SQL is the user's own, so it may read files.
    with open_tables(found, say, access=Access(everything=True)) as connection:

        def ask(statement: str, form: str) -> None:
            cursor = connection.execute(statement)
            names = [column[0] for column in cursor.description or []]
            rows: Any = plain_rows(cursor, raw_json=form == "jsonl")
            write_rows(names, rows, form)

        if statement is None:
            from bagent.cli.shell import Shell

            Shell(found.path.name, form, ask).run()
            return
        import duckdb

        try:
            ask(statement, form)
        except duckdb.Error as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise UsageError(f"SQL: {lines[0]}", hint=" ".join(lines[1:3])) from None


def _asked(run: str | None, sql: str | None) -> tuple[RunDir, str | None]:
    """The run and the SQL of the command line; one word alone may be either."""
    from bagent.store.rundir import find_run

    runs = Path("runs")
    if sql is not None or run is None:
        return find_run(run, runs), sql
    if any(mark in run for mark in " \n\t;(") and not Path(run).is_dir():
        return find_run(None, runs), run
    return find_run(run, runs), None
