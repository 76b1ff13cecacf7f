"""The engine, the fleet, a pool with one instant tool and a journal, over a backend of no time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from bagent.agents.plan import AgentPlan, StagePlan, TokenBudget
from bagent.answers.schema.schema import OutputSchema
from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.request import CallSettings, Request
from bagent.fleet.batch_size import BatchSizeRule
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet, FleetConfig
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.stages.dedupe import RequestDedupe
from bagent.stages.results import WrittenRow
from bagent.stages.row_runner import RowRunner
from bagent.stages.stop_rules import StopRules
from bagent.store.journal.journal import Journal, Syncer
from bagent.tools import Tool, ToolExecutor
from bagent.types import Reply, Row, ToolCall, Usage

CONCURRENCY = 256


class Prompt:
    """A prompt of two messages."""

    raw = False

    def render(self, data: Any, extra: Any = None) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": "You answer questions."},
            {"role": "user", "content": f"Question {data['n']}"},
        ]

    def render_raw(self, data: Any, extra: Any = None) -> str:
        raise TypeError("no text prompts here")


class Instant:
    """Asks for the tool in a first turn and answers in the second, after one turn of the loop."""

    def group_key(self, request: Request) -> None:
        return None

    def group_limit(self, endpoint: Endpoint, request: Request) -> int:
        return 1

    async def count_tokens(
        self, endpoint: Endpoint, request: Request, seconds: float
    ) -> int | None:
        """Not told."""
        return None

    async def learn(self, endpoint: Endpoint, samples: Any, timeouts: Timeouts) -> None:
        pass

    def forget(self, endpoint: Endpoint) -> None:
        pass

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        now = time.time()
        await asyncio.sleep(0)
        request = group[0]
        usage = Usage(prompt=40, completion=10)
        if len(request.messages or ()) > 2:
            reply = Reply("done", "stop", usage=usage)
        else:
            n = len(request.payload) % 10
            call = ToolCall("c", "look", f'{{"topic":"{n}"}}')
            reply = Reply(None, "tool_calls", tool_calls=(call,), usage=usage)
        return Exchange([reply], now, done=time.time(), status=200)

    async def probe(self, endpoint: Endpoint, seconds: float) -> Capabilities:
        return Capabilities()

    async def close(self) -> None:
        pass


async def _look(arguments: dict[str, Any]) -> str:
    return "nothing new"


async def drive(rows: int, folder: Path, random: Random) -> int:
    """Run that many agents to their end; the turns that they took."""
    parameters = {"type": "object", "properties": {"topic": {"type": "string"}}}
    schema = OutputSchema.load(parameters, base=folder)
    pool = ToolExecutor([Tool("look", "Look a topic up.", schema, _look, side_effects=False)])
    journal = Journal.open(folder, "all", clock=time.monotonic, report=lambda _: None)
    syncer = Syncer(journal)
    syncer.start()
    state = EndpointState(Endpoint("e", "http://e/v1"), InFlightLimit(CONCURRENCY, CONCURRENCY))
    config = FleetConfig(CONCURRENCY, group=BatchSizeRule(single=True))
    fleet = Fleet(
        [state],
        Instant(),
        config,
        on_attempts=journal.write_attempts,
        notice=lambda _: None,
        random=random,
    )
    settings = CallSettings("m", {"temperature": 0}, {}, tools=tuple(pool.definitions))
    plan = StagePlan(
        "main", Prompt(), settings, None, TokenBudget(8192), agent=AgentPlan(pool, journal)
    )
    ended = 0

    def emit(written: Sequence[WrittenRow]) -> None:
        nonlocal ended
        assert all(outcome.status == "ok" and outcome.turns == 2 for outcome, _, _ in written)
        ended += len(written)

    engine = RowRunner(
        plan,
        fleet,
        journal,
        dedupe=RequestDedupe(journal.read_at, tuple, None, dedupe=False),
        stop_rules=StopRules(canary=False, stop_after=None),
        emit=emit,
    )

    async def source() -> AsyncIterator[list[tuple[Row, list[int]]]]:
        for start in range(0, rows, 64):
            yield [
                (Row(n, n * 7919, n, {"n": n}, "rows", n + 1), [0])
                for n in range(start, min(rows, start + 64))
            ]
            await asyncio.sleep(0)

    await engine.run(source())
    syncer.stop()
    journal.close()
    assert ended == rows
    return 2 * rows
