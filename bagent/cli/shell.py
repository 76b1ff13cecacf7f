"""A small SQL shell over one run."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from bagent.errors import UsageError
from bagent.store.columns import TABLES
from bagent.store.views import VIEWS

HELP = (
    "SQL ends with ; and may take several lines.",
    ".tables  the tables and views      .format table|csv|jsonl",
    ".help    this                      .quit, or Ctrl-D",
    "describe results;                  the columns of a table",
)


class Shell:
    """Reads statements from stdin until it ends; on a terminal with a prompt and line editing.

    What is wrong with a statement is said on stderr; at a terminal the shell goes on then, a
    script ends.

    Args:
        name: the run, for the prompt.
        form: how results are printed: table, csv or jsonl.
        ask: runs one statement and prints its rows in that form.
    """

    def __init__(self, name: str, form: str, ask: Callable[[str, str], None]) -> None:
        self._name = name
        self._form = form
        self._ask = ask
        self._live = sys.stdin.isatty()

    def run(self) -> None:
        """Work until the end of stdin, or ``.quit``.

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

    def _command(self, words: list[str]) -> bool:
        """Do what a line with a dot says; False: leave."""
        if words[0] in (".quit", ".exit", ".q"):
            return False
        if words[0] == ".tables":
            typer.echo("\n".join((*TABLES, *VIEWS)))
        elif words[0] == ".format" and words[1:] and words[1] in ("table", "csv", "jsonl"):
            self._form = words[1]
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
            words = next(line for line in str(error).splitlines() if line.strip())
            if not self._live:
                raise UsageError(f"SQL: {words}") from None
            typer.echo(f"SQL: {words}", err=True)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
