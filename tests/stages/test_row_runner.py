"""Rows from their prompt to the journal, over a backend that answers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from bagent.agents.conversation import Conversation
from bagent.agents.plan import StagePlan, TokenBudget
from bagent.backends.base import Exchange
from bagent.errors import WriteError
from bagent.fleet.batch_size import BatchSizeRule
from bagent.stages.dedupe import RequestDedupe
from bagent.stages.row_runner import RowRunner
from bagent.stages.stop_rules import StopRules
from bagent.types import Outcome, Reply, Row
from support.jumping_loop import on_jumping_clock
from support.scripted_fleet import SETTINGS, ScriptedBackend, setup


class Prompt:
    """The number of the row."""

    raw = True

    def render(self, data, extra=None):
        raise AssertionError("it is raw")

    def render_raw(self, data, extra=None):
        return str(data["n"])


class Replies(ScriptedBackend):
    """Answers each row a second later, and notes what it is sent."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__({"a": lambda row, number: None})
        self.events = events
        self.gates: dict[int, asyncio.Event] = {}

    async def send(self, endpoint, group, timeouts) -> Exchange:
        rows = [int(request.prompt) for request in group]
        self.events.append(("send", *rows))
        began = asyncio.get_running_loop().time()
        for row in rows:
            if row in self.gates:
                await self.gates[row].wait()
        await asyncio.sleep(1.0)
        done = asyncio.get_running_loop().time()
        return Exchange([Reply("yes", "stop")] * len(rows), sent=began, done=done, status=200)


class Bench:
    """A runner with all that it talks to; ``events`` has what is sent and written, in order."""

    def __init__(
        self,
        *,
        limit: int = 1,
        group: int = 1,
    ) -> None:
        self.events: list[Any] = []
        self.outcomes: list[Outcome] = []
        self.fits = 1000  # outcomes that the disk takes
        self.emitted: list[Outcome] = []
        self.backend = Replies(self.events)
        self.backend.limits = {"a": group}
        self.fleet = setup(
            {"a": lambda row, number: None},
            backend=self.backend,
            limit=limit,
            group=BatchSizeRule(group, single=group == 1),
        ).fleet
        plan = StagePlan("main", Prompt(), SETTINGS, None, TokenBudget(None))
        self.runner = RowRunner(
            plan,
            self.fleet,
            self,
            dedupe=RequestDedupe(self.outcomes.__getitem__, tuple, None, dedupe=True),
            stop_rules=StopRules(canary=False, stop_after=None),
            emit=lambda written: self.emitted.extend(outcome for outcome, *_ in written),
        )

    def write_all(self, outcomes: Sequence[Outcome]) -> list[int]:
        """Write outcomes: the journal's method."""
        outcomes = outcomes[: self.fits - len(self.outcomes)]
        if not outcomes:
            raise WriteError("the disk is full")
        self.events.append(("write", *[outcome.row for outcome in outcomes]))
        self.outcomes += outcomes
        return list(range(len(self.outcomes) - len(outcomes), len(self.outcomes)))

    async def run(self, *numbers: int) -> None:
        """Run rows to their ends."""

        async def source():
            yield [(Row(i, i, i, {"n": n}, "rows", i + 1), [0]) for i, n in enumerate(numbers)]

        await self.runner.run(source())


@on_jumping_clock
async def test_all_rows_of_a_response_are_written_as_one_before_the_next_is_sent():
    alone = Bench()
    await alone.run(0, 1, 2)
    assert alone.events == [(what, row) for row in range(3) for what in ("send", "write")]
    pairs = Bench(limit=2, group=2)
    await pairs.run(0, 1, 2, 3)
    assert pairs.events == [("send", 0, 1), ("write", 0, 1), ("send", 2, 3), ("write", 2, 3)]


@on_jumping_clock
async def test_an_outcome_that_cannot_be_written_stops_the_run():
    bench = Bench(limit=4, group=4)
    bench.fits = 2
    running = asyncio.ensure_future(bench.run(0, 1, 2, 3))
    assert isinstance(await bench.fleet.stopped, WriteError)
    assert [outcome.row for outcome in bench.emitted] == [0, 1], "those that fitted are passed on"
    running.cancel()
    await bench.fleet.drain(0.0)


@on_jumping_clock
async def test_a_fault_in_one_row_stops_the_run_once_the_others_are_written(monkeypatch):
    handle = Conversation.handle

    def fail_for_row_1(conversation, call, end):
        if conversation.row.index == 1:
            raise ValueError("a bug")
        return handle(conversation, call, end)

    monkeypatch.setattr(Conversation, "handle", fail_for_row_1)
    bench = Bench(limit=3, group=3)
    running = asyncio.ensure_future(bench.run(0, 1, 2))
    assert str(await bench.fleet.stopped) == "a bug"
    assert [outcome.row for outcome in bench.outcomes] == [0, 2]
    running.cancel()
    await bench.fleet.drain(0.0)


@pytest.mark.parametrize("seconds", [0.0, 10.0])
@on_jumping_clock
async def test_a_drain_writes_what_comes_in_time_and_leaves_the_rest_unfinished(seconds):
    bench = Bench(limit=2)
    bench.backend.gates[1] = asyncio.Event()
    running = asyncio.ensure_future(bench.run(0, 1, 2, 3))
    await asyncio.sleep(0.5)
    running.cancel()
    late = await bench.fleet.drain(seconds)
    assert [outcome.row for outcome in bench.outcomes] == ([0] if seconds else [])
    assert late == (1 if seconds else 2)
    assert {event for event in bench.events if event[0] == "send"} == {("send", 0), ("send", 1)}
    rest = asyncio.all_tasks() - {asyncio.current_task(), running}
    assert not rest
