"""The pipeline of a run: input and stages, connected by streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Mapping, Sequence

from bagent.stages.base import Stage
from bagent.stages.feeder import Backpressure, Work
from bagent.stages.join import Join
from bagent.stages.row import INPUT, input_item
from bagent.stages.slots import Slot, Stream


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
