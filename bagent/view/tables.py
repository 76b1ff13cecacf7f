"""The tables of a run that is looked at, renewed while the run goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bagent.duck import Setting, file_literal
from bagent.errors import BagentError, UsageError
from bagent.report.queries import ReportDb
from bagent.store.query import connect_tables, has_fresh_tables, table_folders
from bagent.store.run_dir import RunDir

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SETTINGS: dict[str, Setting] = {
    "memory_limit": "120MB",
    "threads": 2,
    "preserve_insertion_order": False,
}
"""Settings of DuckDB, which uses the disk beyond that memory."""

TEXT_RESULTS = "text_results"
"""The view of ``results`` whose columns of JSON are text."""

QUERY_SECONDS = 30.0
"""A query that takes longer is stopped."""

SHORTEST_PAUSE = 2.0
PAUSE_SHARE = 5.0
"""The least ratio of the pause between two renewals to the time of one."""

MOST_CACHED = 64

T = TypeVar("T")


class _OpenTables:
    """One connection, closed once its last user is done."""

    def __init__(self, run: RunDir, report: Callable[[str], None]) -> None:
        self._stack = ExitStack()
        self._users = 0
        self._retired = False
        self._lock = threading.Lock()
        try:
            folders = self._stack.enter_context(table_folders([run], report))
            self.folder: Path = folders[0]
            self.connection: DuckDBPyConnection = self._stack.enter_context(
                connect_tables(folders, settings=SETTINGS)
            )
            # Its JSON is text: to search it, nothing has to be parsed.
            self.connection.execute(
                f"create view {TEXT_RESULTS} as from read_parquet"
                f"({file_literal(folders[0] / 'results.parquet')})"
            )
        except BaseException:
            self._stack.close()
            raise
        self.cache: dict[Hashable, Any] = {}

    @contextmanager
    def cursor(self) -> Iterator[DuckDBPyConnection]:
        """Yield a cursor whose queries are stopped after :data:`QUERY_SECONDS`."""
        with self._lock:
            self._users += 1
            cursor = self.connection.cursor()
        timer = threading.Timer(QUERY_SECONDS, cursor.interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield cursor
        finally:
            timer.cancel()
            cursor.close()
            with self._lock:
                self._users -= 1
            self._close_unused()

    def retire(self) -> None:
        """Close the connection now or after its last user."""
        self._retired = True
        self._close_unused()

    def _close_unused(self) -> None:
        with self._lock:
            if not self._retired or self._users:
                return
        self._stack.close()


class RunTables:
    """The tables of one run. Queries run in threads; a renewal runs beside them.

    Args:
        run: the run directory.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.version = 0
        """Grows with each renewal."""

        self.problem = ""
        """Why the tables could not be made; empty if they could."""

        self._open: _OpenTables | None = None
        self._task: asyncio.Task[None] | None = None
        self._renewed = 0.0
        self._took = 0.0

    async def ready(self, seconds: float) -> bool:
        """Return whether there are tables, after waiting at most ``seconds`` for the first ones."""
        if self._open is not None:
            return True
        if self._task is None:
            self._task = asyncio.create_task(self._renew())
        await asyncio.wait([self._task], timeout=seconds)
        return self._open is not None

    def renew_if_due(self) -> None:
        """Begin to make new tables if the run went on and the last renewal is long enough ago."""
        pause = max(SHORTEST_PAUSE, PAUSE_SHARE * self._took)
        due = time.monotonic() - self._renewed >= pause
        if self._open is not None and due and self._task is None:
            self._task = asyncio.create_task(self._renew())

    async def ask(self, function: Callable[[ReportDb], T], key: Hashable = None) -> T:
        """Run ``function`` on the tables in a thread.

        Args:
            function: gets the tables and returns any value.
            key: keeps the result under this name until the next renewal; None keeps nothing.

        Raises:
            UsageError: the tables could not be made.
            duckdb.Error: the SQL is wrong, or took too long.
        """
        if not await self.ready(QUERY_SECONDS):
            raise UsageError(self.problem or "the tables of the run are still being made")
        tables = self._open
        assert tables is not None
        if key is not None and key in tables.cache:
            cached: T = tables.cache[key]
            return cached

        def work() -> T:
            with tables.cursor() as cursor:
                return function(ReportDb(cursor))

        result = await asyncio.to_thread(work)
        if key is not None and len(tables.cache) < MOST_CACHED:
            tables.cache[key] = result
        return result

    @contextmanager
    def cursor(self) -> Iterator[DuckDBPyConnection]:
        """Yield a cursor on tables that are :meth:`ready`, for a long export."""
        if self._open is None:
            raise UsageError(self.problem or "the tables of the run are still being made")
        with self._open.cursor() as cursor:
            yield cursor

    @property
    def results_file(self) -> Path | None:
        """The Parquet file of the results; None before there are tables."""
        return None if self._open is None else self._open.folder / "results.parquet"

    async def _renew(self) -> None:
        started = time.monotonic()
        try:
            if self._open is not None and await asyncio.to_thread(has_fresh_tables, self.run):
                return
            messages: list[str] = []
            tables = await asyncio.to_thread(_OpenTables, self.run, messages.append)
            self._open, old = tables, self._open
            self.version += 1
            self.problem = ""
            if old is not None:
                old.retire()
        except BagentError as error:
            self.problem = error.message
        finally:
            self._renewed = time.monotonic()
            self._took = self._renewed - started
            self._task = None

    async def close(self) -> None:
        """Stop a renewal and close the connection."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._open is not None:
            self._open.retire()
            self._open = None
