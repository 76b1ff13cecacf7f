"""The sql stage: one DuckDB query over the outcomes of earlier stages."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec

from bagent.errors import NeedsPerson
from bagent.stages.base import NO_SURVIVOR, FailurePolicy, StageContext
from bagent.stages.query import Interrupt, QueryResult, StageTable, input_line, run_query
from bagent.stages.row import INPUT, StageRow, derive_key, made_item
from bagent.stages.slots import OrderedReader, Reader, Slot, Stream
from bagent.types import Json, Outcome, Row

LINES_AT_ONCE = 256


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
        results = self._context.results
        finished = results.finished(row.key, self.name, 0)
        if finished is None or _differs(finished[0], values, error):
            if finished is not None:
                results.take_back(row.key, self.name, 0)
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
