"""The sql stage: one DuckDB query over the outcomes of earlier stages.

Before anything is sent the query is checked by binding it to empty tables.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from bagent.duck import Access, SqlError, quoted, single_query
from bagent.errors import NeedsPerson
from bagent.stages.base import NO_SURVIVOR, FailurePolicy, StageContext
from bagent.stages.prepare import suggest_name
from bagent.stages.query import (
    Interrupt,
    QueryResult,
    StageTable,
    input_line,
    make_tables,
    open_database,
    run_query,
)
from bagent.stages.row import INPUT, StageRow, derive_key, made_item
from bagent.stages.slots import OrderedReader, Reader, Slot, Stream
from bagent.types import Json, Outcome, Row

if TYPE_CHECKING:
    import duckdb


LONGEST_TEXT = 256
"""Characters of a sampled text that are enough to guess its type."""

_MAKE = "CREATE TEMP VIEW bagent_found AS\n"
_TABLE = "CREATE TEMP TABLE bagent_found AS\n"
_EXPLAIN = f"EXPLAIN {_TABLE}"
_NO_COLUMN = re.compile(r'(?:column|named) "(?P<name>[^"]*)"(?: not found in| was not found|$)')
_NO_TABLE = re.compile(r'Table with name (?P<name>.+) does not exist|table "(?P<other>[^"]*)" not')
_WHATEVER_TYPES = re.compile(r"Referenced |does not have a column|GROUP BY")
"""DuckDB's messages about a query that is wrong whatever types the columns have."""

LINES_AT_ONCE = 256


class QueryError(msgspec.Struct, frozen=True):
    """Why a query is wrong, how to mend it, and the offset of the fault, if known."""

    message: str
    hint: str
    offset: int | None


class QueryCheck(msgspec.Struct, frozen=True):
    """The columns of a valid query's result; None where they depend on the rows."""

    columns: tuple[str, ...] | None


def validate_query(
    query: str, tables: Sequence[StageTable], sample: Sequence[Row], names: Sequence[str] = ()
) -> QueryCheck | QueryError:
    """Bind ``query`` to tables as the run will have them, without rows.

    Args:
        query: the SQL.
        tables: the tables. Types of ``input`` are guessed from the sample, so a query that reads it
            and is wrong only by a type passes.
        sample: the first rows of the input.
        names: all tables that a query may name here; ``tables`` are those that this one mentions.
    """
    with TemporaryDirectory(prefix="bagent-sql-") as folder:
        work = Path(folder)
        placed = [_placed(number, table, work, sample) for number, table in enumerate(tables)]
        # Files that the query names are not read: checking a job has no effect.
        access = Access(files=[table.path for table in placed])
        connection = open_database(access, work, errors_as_json=True)
        try:
            return _bound(connection, query, placed, names)
        finally:
            connection.close()


def _placed(number: int, table: StageTable, work: Path, sample: Sequence[Row]) -> StageTable:
    path = work / f"table-{number}.jsonl"
    with path.open("wb") as lines:
        for row in sample if table.name == INPUT else ():
            short = {name: _short(value) for name, value in row.data.items()}
            lines.write(input_line(msgspec.structs.replace(row, data=short)))
    return StageTable(table.name, table.columns, path)


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value


def _bound(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    tables: Sequence[StageTable],
    names: Sequence[str],
) -> QueryCheck | QueryError:
    import duckdb

    text = query.strip()
    try:
        text = single_query(connection, text)
    except SqlError as fault:
        return QueryError(str(fault), fault.hint, None)
    except duckdb.Error:
        pass  # binding reports the offset
    make_tables(connection, tables)
    for table in tables:
        connection.execute(f"DELETE FROM {quoted(table.name)}")
    head = _MAKE
    try:
        try:
            connection.execute(head + text)
        except duckdb.ParserException as error:
            if "cannot be used in views" not in str(error):
                raise
            # Its columns depend on the rows.
            head = _EXPLAIN
            connection.execute(head + text)
            return QueryCheck(None)
        columns = connection.execute("DESCRIBE bagent_found").fetchall()
        return QueryCheck(tuple(str(name) for name, *_ in columns))
    except (duckdb.ParserException, duckdb.CatalogException, duckdb.BinderException) as error:
        typed = isinstance(error, duckdb.BinderException)
        if typed and INPUT in _names(tables) and not _WHATEVER_TYPES.search(str(error)):
            return QueryCheck(None)
        return _fault(str(error), query, head, connection, tables, names)
    except duckdb.Error:
        return QueryCheck(None)  # such as a file that does not exist yet


def _names(tables: Sequence[StageTable]) -> list[str]:
    return [table.name for table in tables]


def _fault(
    text: str,
    query: str,
    head: str,
    connection: duckdb.DuckDBPyConnection,
    tables: Sequence[StageTable],
    names: Sequence[str],
) -> QueryError:
    report = _error_report(text)
    message = str(report.get("exception_message") or text).strip().splitlines()[0]
    hint = ""
    if table := _NO_TABLE.search(message):
        name = table["name"] or table["other"]
        message = f"there is no table {name}"
        hint = suggest_name(name, names or _names(tables))
    elif column := _NO_COLUMN.search(message):
        name = column["name"]
        message = f"there is no column {name}"
        hint = suggest_name(name, _columns(connection, tables))
    offset = None
    with suppress(KeyError, ValueError):
        # DuckDB counts bytes.
        before = (head + query.strip()).encode()[: int(report["position"])].decode()
        begin = len(query) - len(query.lstrip())
        offset = len(before) - len(head) + begin
    return QueryError(message, hint, offset if offset is not None and offset >= 0 else None)


def _error_report(text: str) -> Mapping[str, Any]:
    """Return the fields of DuckDB's error; none where it is not JSON."""
    with suppress(msgspec.DecodeError):
        report = msgspec.json.decode(text[text.find("{") :])
        if isinstance(report, dict):
            return report
    return {}


def _columns(connection: duckdb.DuckDBPyConnection, tables: Sequence[StageTable]) -> list[str]:
    columns: dict[str, None] = {}
    for table in tables:
        rows = connection.execute(f"DESCRIBE {quoted(table.name)}").fetchall()
        columns.update(dict.fromkeys(str(name) for name, *_ in rows))
    return list(columns)


class QueryStage:
    """Runs its query once all rows of its sources have ended, and makes rows of the result.

    Each result row is an outcome: its columns are the output and the fields of later prompts; a
    column ``id`` names it, and a text in a column ``error`` makes it a failed one. Parents are
    looked up in the first of ``tables``.
    """

    def __init__(
        self,
        name: str,
        query: str,
        tables: list[StageTable],
        policy: FailurePolicy,
        context: StageContext,
    ) -> None:
        self.name = name
        self.out = Stream()
        self._query = query
        self._tables = tables
        self._policy = policy
        self._context = context
        self._locations = [array("q") for _ in tables]
        self._folder = TemporaryDirectory(prefix="bagent-sql-")
        self._inputs: BinaryIO | None = None
        self._open = len(tables)
        self._complete = asyncio.Event()
        self._ids: dict[str, Json] = {}
        self._keys: set[int] = set()

    def readers(self) -> list[Reader]:
        """Return one reader for each table, in order."""
        return [
            OrderedReader(partial(self._add, number), self._on_table_end)
            for number in range(len(self._tables))
        ]

    def _add(self, number: int, item: StageRow) -> None:
        if not self._policy.admits(item):
            return
        result_id = item.row.id if item.result_id is None else item.result_id
        if not isinstance(result_id, str):
            self._ids[str(result_id)] = result_id
        if item.location is not None:
            self._locations[number].append(item.location)
        elif item.row.error is None:
            self._keep_input(number, item.row)

    def _keep_input(self, number: int, row: Row) -> None:
        if self._inputs is None:
            self._inputs = self._path(number).open("wb")
        self._inputs.write(input_line(row))

    def _on_table_end(self) -> None:
        self._open -= 1
        if not self._open:
            self._complete.set()

    def _path(self, number: int) -> Path:
        return Path(self._folder.name) / f"table-{number}.jsonl"

    async def run(self) -> None:
        """Wait for all tables, run the query, and hand out its rows.

        Raises:
            NeedsPerson: DuckDB refuses the query.
        """
        try:
            await self._complete.wait()
            self._policy.report_dropped()
            await self._write_tables()
            interrupt = Interrupt()
            try:
                rows = await asyncio.to_thread(
                    run_query, self._query, self._tables, Path(self._folder.name), interrupt
                )
            except asyncio.CancelledError:
                interrupt.now()  # else the process waits until the query ends
                raise
        finally:
            self._folder.cleanup()
        if isinstance(rows, str):
            raise NeedsPerson(
                f"stage {self.name}: {rows}", hint="correct its query; finished rows are kept"
            )
        if not rows:
            self._context.notice(f"stage {self.name}: the query gave no rows")
        times: Counter[str] = Counter()
        for number, row in enumerate(rows):
            self._hand_out(number, row, times)
            if number % LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._context.results.keep_only(self.name, self._keys)
        self.out.end()

    async def _write_tables(self) -> None:
        """Write the outcomes of each table as JSON lines, one at a time."""
        if self._inputs is not None:
            self._inputs.close()
        for number, table in enumerate(self._tables):
            path = self._path(number)
            table.path = path
            if table.name == INPUT:
                path.touch()
                continue
            with path.open("wb") as lines:
                for count, location in enumerate(self._locations[number]):
                    lines.write(_line(self._context.results.read(location)))
                    if count % LINES_AT_ONCE == 0:
                        await asyncio.sleep(0)

    def _hand_out(self, number: int, result: QueryResult, times: Counter[str]) -> None:
        values = result.values
        own_id = values.get("id")
        name = f"{self.name}/{number}" if own_id is None else str(own_id)
        times[name] += 1
        index = values.get("row")
        row = Row(
            index=index if type(index) is int else number,
            key=derive_key((), self.name, name, times[name]),
            id=self._ids.get(name, name if own_id is None else own_id),
            data=values,
            source="",
            line=0,
            parents=result.parents,
        )
        self._keys.add(row.key)
        message = values.get("error")
        error = (NO_SURVIVOR, str(message)) if message is not None else None
        finished = self._context.results.finished(
            row.key, self.name, 0, holds=lambda outcome: not _differs(outcome, values, error)
        )
        if finished is None:
            finished = self._context.record(self.name, row, output=values, error=error)
        slot = Slot()
        self.out.push(slot)
        slot.fill(made_item(msgspec.structs.replace(row, parents=()), *finished))


def _differs(outcome: Outcome, values: dict[str, Any], error: tuple[str, str] | None) -> bool:
    """Return whether the query gives a row another result than in an earlier start."""
    if error is not None or outcome.output is None:
        return outcome.error != (error[1] if error else None)
    return bool(msgspec.json.decode(outcome.output) != values)


def _line(outcome: Outcome) -> bytes:
    output = outcome.output
    line = {
        "id": str(outcome.id),
        "row": outcome.row,
        "answer": outcome.answer,
        "status": outcome.status,
        "output": None if output is None or not bytes(output) else output,
        "text": outcome.text,
        "error": outcome.error,
        "error_kind": outcome.error_kind,
    }
    return msgspec.json.encode(line) + b"\n"
