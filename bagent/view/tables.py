"""The tables of a run that is looked at, renewed while the run goes on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb

from bagent.duck import Setting, file_source
from bagent.errors import BagentError, UsageError
from bagent.report.queries import ReportDb
from bagent.store.query import connect_tables, create_views, read_unchanged
from bagent.store.run_dir import RunDir
from bagent.store.tables.freshness import signatures

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SETTINGS: dict[str, Setting] = {
    "memory_limit": "120MB",
    "threads": 2,
    "preserve_insertion_order": False,
    "parquet_metadata_cache": True,
}
"""Settings of DuckDB, which uses the disk beyond that memory.

The footers of the tables are read once, not for every query.
"""

TEXT_RESULTS = "text_results"
"""The view of ``results`` whose columns of JSON are text."""

QUERY_SECONDS = 30.0
"""A query that takes longer is stopped."""

SHORTEST_PAUSE = 2.0
PAUSE_SHARE = 5.0
"""The least ratio of the pause between two renewals to the time of one."""

MOST_KEPT = 64
"""Results of queries that are kept until the next renewal."""

T = TypeVar("T")


def files_stamp(run: RunDir) -> frozenset[tuple[str, int, int]]:
    """Return names, sizes and times of the files of a run; it differs once one has changed."""
    stamp = set()
    for folder in (run.path, run.journal):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                stamp.add((entry.path, status.st_size, status.st_mtime_ns))
    return frozenset(stamp)


def source_of(run: RunDir) -> Hashable:
    """Return what the tables of a run are made of now: the run, its settings and journal."""
    info = run.load_or_report(lambda _: None)
    if info is None:
        return files_stamp(run)
    return info.created_at, frozenset(signatures(run.path, info).items())


@contextmanager
def stopped_after(connection: DuckDBPyConnection, seconds: float | None) -> Iterator[None]:
    """Interrupt the queries of a block once it has taken ``seconds``; None lets them run."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _OpenTables:
    """One connection, closed once its last user is done."""

    def __init__(self, run: RunDir, report: Callable[[str], None]) -> None:
        self._stack = ExitStack()
        self._users = 0
        self._retired = False
        self._lock = threading.Lock()
        self.source = source_of(run)  # before they are made: what is written meanwhile is newer
        try:
            connected = connect_tables([run], report, settings=SETTINGS)
            self.connection, (self.folder,) = self._stack.enter_context(connected)
            create_views(self.connection)  # for conditions that a user types
            # Its JSON is text: to search it, nothing has to be parsed.
            self.connection.execute(
                f"create view {TEXT_RESULTS} as from read_parquet"
                f"({file_source(self.folder / 'results.parquet')})"
            )
        except BaseException:
            self._stack.close()
            raise
        self.tasks: dict[Hashable, asyncio.Task[Any]] = {}
        """The queries of the results that are kept, by key."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the connection open for the block."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            self._close_unused()

    @contextmanager
    def cursor(self, seconds: float | None) -> Iterator[DuckDBPyConnection]:
        """Yield a cursor whose queries are stopped after ``seconds``; None lets them run."""
        with (
            self.in_use(),
            closing(self.connection.cursor()) as cursor,
            stopped_after(cursor, seconds),
        ):
            yield cursor

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
        """Grows with each renewal; 0 while there are no tables, and after they were closed."""

        self.problem = ""
        """Why the tables could not be made; empty if they could."""

        self._open: _OpenTables | None = None
        self._stamp: Hashable = None
        self._task: asyncio.Task[None] | None = None
        self._renewed = 0.0
        self._took = 0.0
        self._closed = False

    async def ready(self) -> bool:
        """Return whether there are tables, after waiting for the first ones."""
        if self._open is None:
            self.renew_if_due()
            if self._task is not None:
                await asyncio.wait([self._task])
        return self._open is not None

    def renew_if_due(self, *, running: bool = True) -> None:
        """Begin to make tables if there are none, or the run went on and some time has passed.

        After a failure the next attempt begins :data:`SHORTEST_PAUSE` later.

        Args:
            running: a process works on the run, and needs the processor too.
        """
        pause = max(SHORTEST_PAUSE, PAUSE_SHARE * self._took if running else 0.0)
        if self._open is None:
            pause = SHORTEST_PAUSE if self.problem else 0.0
        due = time.monotonic() - self._renewed >= pause
        if due and self._task is None and not self._closed:
            self._task = asyncio.create_task(self._renew())

    async def ask(self, function: Callable[[ReportDb], T], key: Hashable = None) -> T:
        """Run ``function`` on the tables in a thread.

        Args:
            function: gets the tables and returns any value.
            key: keeps the result under this name until the next renewal, and lets all who ask
                for it meanwhile wait for one query; None keeps nothing.

        Raises:
            UsageError: the tables could not be made.
            duckdb.Error: the SQL is wrong, or took too long.
        """
        if not await self.ready():
            raise self._missing()
        tables = self._tables()

        def query() -> T:
            with tables.cursor(QUERY_SECONDS) as cursor:
                return function(ReportDb(cursor))

        def work() -> T:
            return read_unchanged([tables.folder], query)

        # Counted before the thread starts: a renewal may retire the tables in between.
        with tables.in_use():
            if key is None:
                return await asyncio.to_thread(work)
            task = tables.tasks.get(key)
            if task is None:
                task = asyncio.create_task(asyncio.to_thread(work))
                if len(tables.tasks) < MOST_KEPT:
                    tables.tasks[key] = task
            try:
                result: T = await asyncio.shield(task)
            except (BagentError, duckdb.Error):
                tables.tasks.pop(key, None)
                raise
            return result

    @contextmanager
    def cursor(self) -> Iterator[DuckDBPyConnection]:
        """Yield a cursor without a time limit on tables that are :meth:`ready`.

        Raises:
            UsageError: there are no tables.
        """
        with self._tables().cursor(None) as cursor:
            yield cursor

    @contextmanager
    def results_file(self) -> Iterator[Path]:
        """Yield the Parquet file of the results and keep it for the block.

        Raises:
            UsageError: there are no tables.
        """
        tables = self._tables()
        with tables.in_use():
            yield tables.folder / "results.parquet"

    def _tables(self) -> _OpenTables:
        if self._open is None:
            raise self._missing()
        return self._open

    def _missing(self) -> UsageError:
        if self._closed:
            return UsageError(
                "the tables were closed for those of other runs", hint="reload the page"
            )
        return UsageError(self.problem or "the tables of the run are still being made")

    async def _renew(self) -> None:
        started = time.monotonic()
        try:
            stamp = await asyncio.to_thread(files_stamp, self.run)
            if self._open is not None and (
                stamp == self._stamp
                or await asyncio.to_thread(source_of, self.run) == self._open.source
            ):
                self._stamp = stamp
                return
            messages: list[str] = []
            tables = await asyncio.to_thread(_OpenTables, self.run, messages.append)
            self._open, old, self._stamp = tables, self._open, stamp
            self.version += 1
            self.problem = ""
            if old is not None:
                old.retire()
        except BagentError as error:
            self.problem = error.message
        except (duckdb.Error, OSError) as error:
            self.problem = str(error)
        finally:
            self._renewed = time.monotonic()
            self._took = self._renewed - started
            self._task = None

    async def close(self) -> None:
        """Close the connection after a renewal and its last user; it is not opened again."""
        self._closed = True
        if self._task is not None:
            await asyncio.wait([self._task])
        self.version = 0
        if self._open is not None:
            self._open.retire()
            self._open = None
