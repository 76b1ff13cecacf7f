"""``bagent query``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagent.cli import options as opt
from bagent.cli.process import log
from bagent.errors import UsageError
from bagent.store.tables.schema import TABLES, VIEWS

if TYPE_CHECKING:
    from bagent.store.run_dir import RunDir


def query(
    run: opt.RunName = None,
    sql: Annotated[
        str | None, typer.Argument(metavar='["SQL"]', help="What to ask; without it a shell.")
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="table|csv|jsonl",
            help="Print in this form.",
            rich_help_panel=opt.OUTPUT,
        ),
    ] = "table",
    as_json: opt.AsJson = False,
) -> None:
    """Ask a run with DuckDB SQL, while it goes on or after it.

    Tables: results, answers, attempts, tool_calls, endpoints. Views: errors (grouped), latency
    (by stage), by_endpoint, turns. bagent guide reference explains every column.

    Example: bagent query review "select status, count(*), avg(ttft_ms) from results group by 1"
    """
    from bagent.cli.render.tables import write_rows
    from bagent.duck import Access
    from bagent.store.query import one_statement, open_tables, plain_rows

    form = "jsonl" if as_json else form
    run_dir, text = _run_and_sql(run, sql)
    statement = None if text is None else one_statement(text)
    # The SQL is the user's own, so it may read files.
    with open_tables(run_dir, log, access=Access(everything=True)) as connection:

        def ask(statement: str, form: str) -> None:
            cursor = connection.execute(statement)
            names = [column[0] for column in cursor.description or []]
            rows: Any = plain_rows(cursor, raw_json=form == "jsonl")
            write_rows(names, rows, form)

        if statement is None:
            Shell(run_dir.path.name, form, ask).run()
            return
        import duckdb

        try:
            ask(statement, form)
        except duckdb.Error as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise UsageError(f"SQL: {lines[0]}", hint=" ".join(lines[1:3])) from None


def _run_and_sql(run: str | None, sql: str | None) -> tuple[RunDir, str | None]:
    """Return the run and the SQL; a single argument may be either."""
    from bagent.store.run_dir import find_run

    runs = Path("runs")
    if sql is not None or run is None:
        return find_run(run, runs), sql
    if any(mark in run for mark in " \n\t;(") and not Path(run).is_dir():
        return find_run(None, runs), run
    return find_run(run, runs), None


HELP = (
    "SQL ends with ; and may take several lines.",
    ".tables  the tables and views      .format table|csv|jsonl",
    ".help    this                      .quit, or Ctrl-D",
    "describe results;                  the columns of a table",
)


class Shell:
    """Reads statements from stdin; on a terminal with a prompt and line editing.

    An error ends a script; at a terminal it is printed and the shell continues.

    Args:
        name: the run, for the prompt.
        form: table, csv or jsonl.
        ask: runs a statement and prints its rows in that form.
    """

    def __init__(self, name: str, form: str, ask: Callable[[str, str], None]) -> None:
        self._name = name
        self._form = form
        self._ask = ask
        self._live = sys.stdin.isatty()

    def run(self) -> None:
        """Read until the end of stdin, or ``.quit``.

        Raises:
            UsageError: a statement of a script is wrong.
        """
        if self._live:
            import readline  # noqa: F401  # gives input() history and editing

            typer.echo(f"{', '.join(TABLES)}; views {', '.join(VIEWS)}; .help", err=True)
        statement: list[str] = []
        while (line := self._read(more=bool(statement))) is not None:
            if not statement and line.strip().startswith("."):
                if not self._command(line.split()):
                    return
                continue
            if line.strip() or statement:
                statement.append(line)
            if line.rstrip().endswith(";"):
                self._answer("\n".join(statement))
                statement = []
        if "".join(statement).strip():
            self._answer("\n".join(statement))

    def _read(self, *, more: bool) -> str | None:
        try:
            if not self._live:
                line = sys.stdin.readline()
                return line.rstrip("\n") if line else None
            return input("   ...> " if more else f"{self._name}> ")
        except EOFError:
            typer.echo("", err=True)
            return None

    def _command(self, parts: list[str]) -> bool:
        """Execute a line that begins with a dot; returns False to leave."""
        if parts[0] in (".quit", ".exit", ".q"):
            return False
        if parts[0] == ".tables":
            typer.echo("\n".join((*TABLES, *VIEWS)))
        elif parts[0] == ".format" and parts[1:] and parts[1] in ("table", "csv", "jsonl"):
            self._form = parts[1]
        else:
            typer.echo("\n".join(HELP), err=True)
        return True

    def _answer(self, statement: str) -> None:
        import duckdb

        text = statement.strip().rstrip(";").strip()
        if not text:
            return
        try:
            self._ask(text, self._form)
        except (duckdb.Error, UsageError) as error:
            message = next(line for line in str(error).splitlines() if line.strip())
            if not self._live:
                raise UsageError(f"SQL: {message}") from None
            typer.echo(f"SQL: {message}", err=True)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
