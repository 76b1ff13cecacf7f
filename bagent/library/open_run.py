"""Reading of a run from another program, during the run or after it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.errors import UsageError
from bagent.library.arguments import ShortTraceback
from bagent.store.run_dir import RunDir, find_run
from bagent.text.suggest import did_you_mean
from bagent.types import Json, ResultColumns

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from bagent.store.results import RunSummary


class _ReadOnlyRecord(msgspec.StructMeta):
    """The type of records that programs only read: ``help`` leaves out their many parameters."""

    @property
    def __signature__(cls) -> Signature:
        return Signature()


class Result(  # type: ignore[misc]
    ResultColumns, frozen=True, kw_only=True, omit_defaults=False, metaclass=_ReadOnlyRecord
):
    """The outcome of one (row, stage, answer).

    ``id`` names the row, and ``ok`` is True for a valid answer. ``output`` is the answer as JSON
    values, ``text`` the answer as it came. ``status``, ``error_kind`` and ``error`` say how a row
    ended that is not ok. ``input`` is the input row.

    The fields are the columns of ``results``, which ``bagent schema --reference`` describes. Times
    are Unix seconds (``*_at``) and milliseconds (``*_ms``). An unknown value is None, never 0.
    """

    id: Json = None
    input: Json = None

    @property
    def ok(self) -> bool:
        """Whether the answer is valid."""
        return self.status == "ok"


_TABLES_WITH_ID = ("results", "answers", "attempts", "tool_calls")


@ShortTraceback()
def open_run(run: str | os.PathLike[str] | None = None) -> OpenedRun:
    """Open a run by its directory or its name under ``./runs``; None opens the latest.

    Raises:
        bagent.errors.UsageError: there is no such run.
    """
    return OpenedRun(find_run(None if run is None else os.fspath(run), Path("runs")))


class OpenedRun:
    """A run that is read; every method reads the current state."""

    def __init__(self, directory: RunDir) -> None:
        self._directory = directory

    def __repr__(self) -> str:
        return f"<run {self.path}>"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    @ShortTraceback()
    def summary(self) -> RunSummary:
        """Return totals, counts by status and kind, tokens, cost and speed."""
        from bagent.store.results import summary

        return summary(self.path, _warn, self._directory.load_or_report(_warn))

    @ShortTraceback()
    def results(
        self, *, statuses: str | Iterable[str] | None = None, with_input: bool = False
    ) -> Iterator[Result]:
        """Yield the current results in input order, straight from the journal.

        Args:
            statuses: yield only results of these statuses, or of one; ``failed`` stands for all
                failures.
            with_input: read the input again, for :attr:`Result.input`.

        Raises:
            UsageError: there is no such status.
        """
        from bagent.store.results import check_statuses

        names = [statuses] if isinstance(statuses, str) else statuses
        checked = None if names is None else check_statuses(names, "statuses")
        return self._iter_results(checked, with_input=with_input)

    def _iter_results(
        self, statuses: frozenset[str] | None, *, with_input: bool
    ) -> Iterator[Result]:
        from bagent.store.results import ResultQuery, encode_result, iter_results
        from bagent.store.run_input import find_input

        result_query = ResultQuery(statuses=statuses, ordered=True)
        info = self._directory.load_or_report(_warn)
        find = None
        if with_input and info is not None:
            find = partial(find_input, self._directory, info, report=_warn)
        decoder = msgspec.json.Decoder(Result)
        for result in iter_results(self.path, result_query, report=_warn, find_input=find):
            yield decoder.decode(encode_result(result))

    def __iter__(self) -> Iterator[Result]:
        return self.results()

    @ShortTraceback()
    def df(self, query: str = "results") -> Any:
        """Return a table, a view or the result of SQL as a pandas DataFrame (needs pandas).

        Args:
            query: ``results``, ``answers``, ``attempts``, ``tool_calls``, ``endpoints``, a view
                such as ``by_endpoint``, or a DuckDB statement over them.

        Raises:
            UsageError: there is no table or view of this name.
            duckdb.Error: the SQL is wrong.
        """
        return self._query(query, "df")

    @ShortTraceback()
    def pl(self, query: str = "results") -> Any:
        """Return the same as :meth:`df` as a polars DataFrame (needs polars and pyarrow)."""
        return self._query(query, "pl")

    @ShortTraceback()
    def arrow(self, query: str = "results") -> Any:
        """Return the same as :meth:`df` as a pyarrow Table (needs pyarrow)."""
        return self._query(query, "to_arrow_table")

    @ShortTraceback()
    def rows(self, query: str = "results") -> list[dict[str, Any]]:
        """Return the same as :meth:`df` as dicts; needs no other package."""
        from bagent.store.query import plain_rows

        with self._tables() as connection:
            cursor = connection.execute(_statement(query))
            names = [column[0] for column in cursor.description or []]
            rows = plain_rows(cursor, raw_json=False)
            return [dict(zip(names, row, strict=True)) for row in rows]

    def _query(self, query: str, form: str) -> Any:
        with self._tables() as connection:
            return getattr(connection.sql(_statement(query)), form)()

    @contextmanager
    def _tables(self) -> Iterator[DuckDBPyConnection]:
        from bagent.duck import Access
        from bagent.store.query import open_tables

        with open_tables(self._directory, _warn, access=Access(everything=True)) as connection:
            self._restore_id_type(connection)
            yield connection

    def _restore_id_type(self, connection: DuckDBPyConnection) -> None:
        """Turn ids, which tables hold as text, back into numbers where the rows had numbers.

        So frames join on ``id``. Ids of several types stay text.
        """
        from bagent.store.tables.export_sql import number_type

        kind = number_type(connection, [self._directory], _TABLES_WITH_ID)
        if kind is None:
            return
        for name in _TABLES_WITH_ID:
            connection.execute(f"ALTER VIEW {name} RENAME TO {name}_as_text")
            connection.execute(
                f"CREATE VIEW {name} AS SELECT * REPLACE (try_cast(id AS {kind}) AS id)"
                f" FROM {name}_as_text"
            )


def _statement(query: str) -> str:
    """Return the SQL of a query.

    Raises:
        UsageError: it is one word, but no table or view has this name.
    """
    from bagent.store.tables.schema import TABLES, VIEWS

    if query in TABLES or query in VIEWS:
        return f"from {query}"
    if query.strip().isidentifier():
        names = [*TABLES, *VIEWS]
        hint = did_you_mean(query.strip(), names) or f"there are {', '.join(names)}"
        raise UsageError(f"{query.strip()}: no such table or view", hint=hint)
    return query


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)
