"""Reading a run from another program, while it goes on or after it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.library.result import Result
from bagent.store.rundir import RunDir, find_run

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from bagent.store.readers import RunSummary


_ID_TYPES: dict[type, str] = {int: "BIGINT", float: "DOUBLE"}
_TABLES_WITH_ID = ("results", "answers", "attempts", "tool_calls")


def open_run(run: str | os.PathLike[str] | None = None) -> OpenedRun:
    """The run that is meant: a directory, else a name under ``./runs``; None: the latest.

    Raises:
        bagent.errors.UsageError: there is none.
    """
    return OpenedRun(find_run(None if run is None else os.fspath(run), Path("runs")))


class OpenedRun:
    """A run to be read; every question is answered from the run as it is then."""

    def __init__(self, directory: RunDir) -> None:
        self._directory = directory

    def __repr__(self) -> str:
        return f"<run {self.path}>"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    def summary(self) -> RunSummary:
        """Return the totals, counts by status and kind, tokens, cost, speed."""
        from bagent.store.readers import summary

        return summary(self.path, _warn, self._directory.look(_warn))

    def results(
        self, *, statuses: Iterable[str] | None = None, with_input: bool = False
    ) -> Iterator[Result]:
        """The current results in input order, one at a time, straight from the journal.

        Args:
            statuses: only these.
            with_input: read the input again, for :attr:`Result.input`.
        """
        from bagent.store.readers import Wanted, encode_result, iter_results
        from bagent.store.run_input import find_input

        wanted = Wanted(statuses=None if statuses is None else frozenset(statuses), ordered=True)
        info = self._directory.look(_warn)
        find = None
        if with_input and info is not None:
            find = partial(find_input, self._directory, info, report=_warn)
        decoder = msgspec.json.Decoder(Result)
        for result in iter_results(self.path, wanted, report=_warn, find_input=find):
            yield decoder.decode(encode_result(result))

    def __iter__(self) -> Iterator[Result]:
        return self.results()

    def df(self, query: str = "results") -> Any:
        """A table, a view or what SQL finds, as a pandas DataFrame (needs pandas).

        Args:
            query: ``results``, ``answers``, ``attempts``, ``tool_calls``, ``endpoints``, a view
                such as ``by_endpoint``, or a DuckDB statement over them.

        Raises:
            duckdb.Error: the SQL is wrong.
        """
        return self._ask(query, "df")

    def pl(self, query: str = "results") -> Any:
        """As :meth:`df`, as a polars DataFrame (needs polars and pyarrow)."""
        return self._ask(query, "pl")

    def arrow(self, query: str = "results") -> Any:
        """As :meth:`df`, as a pyarrow Table (needs pyarrow)."""
        return self._ask(query, "to_arrow_table")

    def rows(self, query: str = "results") -> list[dict[str, Any]]:
        """As :meth:`df`, as dicts; needs no other package."""
        from bagent.store.asking import plain_rows

        with self._tables() as connection:
            cursor = connection.execute(_statement(query))
            names = [column[0] for column in cursor.description or []]
            found = plain_rows(cursor, raw_json=False)
            return [dict(zip(names, row, strict=True)) for row in found]

    def _ask(self, query: str, form: str) -> Any:
        with self._tables() as connection:
            return getattr(connection.sql(_statement(query)), form)()

    @contextmanager
    def _tables(self) -> Iterator[DuckDBPyConnection]:
        from bagent.duck import Access
        from bagent.store.asking import open_tables

        with open_tables(self._directory, _warn, access=Access(everything=True)) as connection:
            self._restore_id_type(connection)
            yield connection

    def _restore_id_type(self, connection: DuckDBPyConnection) -> None:
        """Make ids numbers again where the rows had numbers: the tables hold them as text.

        Then frames join on ``id``. Ids of several kinds stay text.
        """
        from bagent.store.readers import iter_results

        first = next(iter(iter_results(self.path, report=lambda _: None)), None)
        kind = _ID_TYPES.get(type(first["id"])) if first is not None else None
        if kind is None:
            return
        other = f"try_cast(id AS {kind}) IS NULL AND id IS NOT NULL"
        for name in _TABLES_WITH_ID:
            if connection.execute(f"SELECT 1 FROM {name} WHERE {other} LIMIT 1").fetchone():
                return
        for name in _TABLES_WITH_ID:
            connection.execute(f"ALTER VIEW {name} RENAME TO {name}_as_text")
            connection.execute(
                f"CREATE VIEW {name} AS SELECT * REPLACE (try_cast(id AS {kind}) AS id)"
                f" FROM {name}_as_text"
            )


def _statement(query: str) -> str:
    from bagent.store.columns import TABLES
    from bagent.store.views import VIEWS

    return f"from {query}" if query in TABLES or query in VIEWS else query


def _warn(words: str) -> None:
    warnings.warn(words, stacklevel=3)
