"""The pipeline of a run: input and stages, connected by streams, and joins of several stages.

Rows are joined by key, by id, or by the input row they go back to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from bagent.stages.base import Stage
from bagent.stages.feeder import Backpressure, Work
from bagent.stages.row import INPUT, StageRow, input_item
from bagent.stages.slots import Reader, Slot, Stream, UnorderedReader
from bagent.types import Json


class Join:
    """Joins the rows of the other sources to each row of the first.

    A partner has the same key (both were made of one row, unchanged), else the same id (the first
    such row), else it is the only row that goes back to the same input row: a reduction ``by: id``
    is joined to its row, and an answer about a row to each of its pieces. A row without a partner
    in some source goes on without that source's name in prompts. Fields of the first source take
    precedence.

    Args:
        count: how many sources there are, at least 2.
    """

    def __init__(self, count: int) -> None:
        self.out = Stream()
        self._count = count
        self._open: dict[int, tuple[StageRow, Slot]] = {}
        self._by_key: list[dict[int, StageRow]] = [{} for _ in range(count)]
        self._idle = 0

    def readers(self) -> list[Reader]:
        """Return one reader for each source, in order."""
        first = UnorderedReader(self._first, self._ended, self.out)
        others = [
            UnorderedReader(partial(self._other, number), self._ended)
            for number in range(1, self._count)
        ]
        return [first, *others]

    def _first(self, item: StageRow, slot: Slot) -> None:
        self._open[item.row.key] = (item, slot)
        self._try_join(item.row.key)

    def _other(self, source: int, item: StageRow, _: Slot) -> None:
        self._by_key[source].setdefault(item.row.key, item)
        self._try_join(item.row.key)

    def _try_join(self, key: int) -> None:
        """Join a row whose partners are all there by key."""
        others = self._by_key[1:]
        if key in self._open and all(key in rows for rows in others):
            item, slot = self._open.pop(key)
            slot.fill(joined(item, [rows.pop(key) for rows in others]))

    def _ended(self) -> None:
        self._idle += 1
        if self._idle < self._count:
            return
        unmatched, self._open = self._open, {}
        sources = [_UnmatchedRows(partners) for partners in self._by_key[1:]] if unmatched else []
        for item, slot in unmatched.values():
            partners = [source.partner(item) for source in sources]
            slot.fill(joined(item, [partner for partner in partners if partner is not None]))
        self._by_key = [{} for _ in range(self._count)]


class _UnmatchedRows:
    """The rows of one source that were not joined by key while rows came."""

    def __init__(self, items: dict[int, StageRow]) -> None:
        self._by_key = items
        self._by_name: dict[str, StageRow] = {}
        self._by_root: dict[int, list[StageRow]] = {}
        self._by_base: dict[str, list[StageRow]] = {}
        for item in sorted(items.values(), key=lambda item: (item.row.index, item.answer)):
            self._by_name.setdefault(_name(item.row.id), item)
            self._by_base.setdefault(_base(item), []).append(item)
            if item.root is not None:
                self._by_root.setdefault(item.root.key, []).append(item)

    def partner(self, item: StageRow) -> StageRow | None:
        """Return the row that belongs to ``item``."""
        row = item.row
        return self._by_key.get(row.key) or self._by_name.get(_name(row.id)) or self._only(item)

    def _only(self, item: StageRow) -> StageRow | None:
        """Return the only row with the same input row and the same outcomes on the way."""
        candidates = self._by_base.get(_base(item), [])
        if item.root is not None and any(candidate.root is not None for candidate in candidates):
            candidates = self._by_root.get(item.root.key, [])
        partners = [other for other in candidates if _agree(other.seen, item.seen)]
        return partners[0] if len(partners) == 1 else None


def _agree(first: dict[str, int], second: dict[str, int]) -> bool:
    """Return whether two rows have the same outcomes of all stages that they share."""
    return all(second.get(name, location) == location for name, location in first.items())


def joined(item: StageRow, partners: list[StageRow]) -> StageRow:
    """Return ``item`` with the fields, stages and failures of ``partners``."""
    data = dict(item.row.data)
    for partner in partners:
        data = {**partner.row.data, **data}
    seen = dict(item.seen)
    for partner in partners:
        seen = {**partner.seen, **seen}
    return msgspec.structs.replace(
        item,
        row=msgspec.structs.replace(item.row, data=data),
        seen=seen,
        ok=item.ok and all(partner.ok for partner in partners),
        extra_parents=tuple(ref for partner in partners for ref in partner.parents),
        failed=max([item.failed, *(partner.failed for partner in partners)]),
    )


def _name(row_id: Json) -> str:
    return f"{type(row_id).__name__}:{row_id}"


def _base(item: StageRow) -> str:
    """Return the id of the input row that a row goes back to, else its own."""
    return _name(item.row.id if item.root is None else item.root.id)


class Intake:
    """The input as the first stream of a pipeline.

    Args:
        source: rows, read ahead in a thread.
        backpressure: says when more may be read.
        expect: called with whether more of the input comes.
        measured: whether a stage needs the tokens of input rows.
    """

    def __init__(
        self,
        source: AsyncIterable[Work],
        backpressure: Backpressure,
        expect: Callable[[bool], None],
        *,
        measured: bool,
    ) -> None:
        self.out = Stream()
        self._source = source
        self._backpressure = backpressure
        self._expect = expect
        self._measured = measured

    async def run(self) -> None:
        """Hand out all rows; wait while a stage has too many in its queue."""
        self._expect(True)
        async for batch in self._source:
            for row, _ in batch:
                await self._backpressure.wait()
                slot = Slot()
                self.out.push(slot)
                slot.fill(input_item(row, measured=self._measured))
            await asyncio.sleep(0)
        self._expect(False)
        self.out.end()


class Pipeline:
    """Runs stages until all of them have ended.

    Args:
        intake: the input.
        stages: in the order in which they are written.
        sources: the names of the sources of each stage, by its name.
    """

    def __init__(
        self, intake: Intake, stages: Sequence[Stage], sources: Mapping[str, Sequence[str]]
    ) -> None:
        self._intake = intake
        self._stages = stages
        streams = {INPUT: intake.out} | {stage.name: stage.out for stage in stages}
        for stage in stages:
            readers = stage.readers()
            names = sources[stage.name]
            if len(readers) == len(names):
                for name, reader in zip(names, readers, strict=True):
                    streams[name].read_by(reader)
                continue
            join = Join(len(names))
            for name, reader in zip(names, join.readers(), strict=True):
                streams[name].read_by(reader)
            join.out.read_by(readers[0])

    async def run(self) -> None:
        """Work until everything has ended, or raise the first exception of a stage."""
        works = [self._intake.run(), *(stage.run() for stage in self._stages)]
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
