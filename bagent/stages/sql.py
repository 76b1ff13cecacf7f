"""The sql stage: one DuckDB query over what earlier stages answered."""

from __future__ import annotations

import asyncio
from array import array
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec

from bagent.errors import NeedsPerson
from bagent.stages.base import NO_SURVIVOR, FailurePolicy, StageContext, make_outcome
from bagent.stages.query import Interrupt, QueryResult, StageTable, input_line, run_query
from bagent.stages.row import INPUT, StageRow, answer_tokens, derive_key
from bagent.stages.slots import OrderedReader, Reader, Slot, Stream
from bagent.types import Json, Outcome, Row

LINES_AT_ONCE = 256


class QueryStage:
    """Waits for all rows of the stages that it reads, asks DuckDB, and makes rows of the answer.

    Each result row is an outcome: its columns are the output and the fields of later prompts; a
    column ``id`` names it, and a text in a column ``error`` makes it a failed one.

    Args:
        query: the SQL.
        tables: the tables, the first one is where parents are looked for.
    """

    def __init__(
        self,
        name: str,
        query: str,
        tables: list[StageTable],
        entrance: FailurePolicy,
        world: StageContext,
    ) -> None:
        self.name = name
        self.out = Stream()
        self._query = query
        self._tables = tables
        self._entrance = entrance
        self._world = world
        self._places = [array("q") for _ in tables]
        self._folder = TemporaryDirectory(prefix="bagent-sql-")
        self._inputs: BinaryIO | None = None
        self._open = len(tables)
        self._complete = asyncio.Event()
        self._ids: dict[str, Json] = {}
        self._keys: set[int] = set()

    def readers(self) -> list[Reader]:
        """One reader for each table, in order."""
        return [
            OrderedReader(partial(self._take, number), self._over)
            for number in range(len(self._tables))
        ]

    def _take(self, number: int, item: StageRow) -> None:
        if not self._entrance.admits(item):
            return
        told = item.row.id if item.told is None else item.told
        if not isinstance(told, str):
            self._ids[str(told)] = told
        if item.place is not None:
            self._places[number].append(item.place)
        elif item.row.error is None:
            self._keep_input(number, item.row)

    def _keep_input(self, number: int, row: Row) -> None:
        if self._inputs is None:
            self._inputs = self._path(number).open("wb")
        self._inputs.write(input_line(row))

    def _over(self) -> None:
        self._open -= 1
        if not self._open:
            self._complete.set()

    def _path(self, number: int) -> Path:
        return Path(self._folder.name) / f"table-{number}.jsonl"

    async def run(self) -> None:
        """Wait, ask, and hand out the rows.

        Raises:
            NeedsPerson: DuckDB refuses the query.
        """
        try:
            await self._complete.wait()
            self._entrance.tell()
            await self._write_tables()
            interrupt = Interrupt()
            try:
                found = await asyncio.to_thread(
                    run_query, self._query, self._tables, Path(self._folder.name), interrupt
                )
            except asyncio.CancelledError:
                interrupt.now()  # the thread holds the process up until its query ends
                raise
        finally:
            self._folder.cleanup()
        if isinstance(found, str):
            raise NeedsPerson(f"stage {self.name}: {found}", hint="mend its query; rows are kept")
        if not found:
            self._world.notice(f"stage {self.name}: the query gave no rows")
        times: dict[str, int] = {}
        for number, one in enumerate(found):
            self._hand_out(number, one, times)
            if number % LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._world.records.keep_only(self.name, self._keys)
        self.out.end()

    async def _write_tables(self) -> None:
        """Write the outcomes of each table as JSON lines: never more than one in memory."""
        if self._inputs is not None:
            self._inputs.close()
        for number, table in enumerate(self._tables):
            path = self._path(number)
            table.path = path
            if table.name == INPUT:
                path.touch()
                continue
            with path.open("wb") as lines:
                for count, place in enumerate(self._places[number]):
                    lines.write(_line(self._world.records.read(place)))
                    if count % LINES_AT_ONCE == 0:
                        await asyncio.sleep(0)

    def _hand_out(self, number: int, found: QueryResult, times: dict[str, int]) -> None:
        values = found.values
        shown = values.get("id")
        row_id: Json = f"{self.name}/{number}" if shown is None else shown
        name = str(row_id)
        row_id = self._ids.get(name, row_id)
        came = times[name] = times.get(name, 0) + 1
        place = values.get("row")
        index = place if isinstance(place, int) and not isinstance(place, bool) else number
        row = Row(
            index=index,
            key=derive_key((), self.name, name, came),
            id=row_id,
            data=values,
            source="",
            line=0,
            parents=found.parents,
        )
        self._keys.add(row.key)
        self._put(row, values)

    def _put(self, row: Row, values: dict[str, Any]) -> None:
        words = values.get("error")
        error = (NO_SURVIVOR, str(words)) if words is not None else None
        records = self._world.records
        found = records.finished(row.key, self.name, 0)
        if found is not None and _differs(found[0], values, error):
            records.take_back(row.key, self.name, 0)
            found = None
        if found is None:
            outcome = make_outcome(self.name, row, self._world.now(), output=values, error=error)
            found = outcome, records.write(outcome, row)
        outcome, place = found
        ok = outcome.status == "ok"
        ticket = Slot()
        self.out.push(ticket)
        ticket.fill(
            StageRow(
                row=msgspec.structs.replace(row, parents=()),
                root=None,
                stage=self.name,
                answer=0,
                ok=ok,
                place=place,
                seen={self.name: place},
                tokens=answer_tokens(outcome),
                failed=int(not ok),
            )
        )


def _differs(outcome: Outcome, values: dict[str, Any], error: tuple[str, str] | None) -> bool:
    """Whether the query says something else about a row than it did in an earlier start."""
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
