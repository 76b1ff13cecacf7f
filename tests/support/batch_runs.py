"""Runs rows through batches on a clock that jumps: hours pass in no time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from bagent.agents.plan import StagePlan, TokenBudget
from bagent.answers.schema.schema import OutputSchema
from bagent.backends.base import Exchange, Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.request import CallSettings, OutputFormat, Request
from bagent.batches.anthropic import AnthropicBatches
from bagent.batches.builder import BatchBuilder, BatchLimits
from bagent.batches.conversations import BatchRows, ReadRules, RowTools
from bagent.batches.openai import OpenAIBatches
from bagent.batches.record import BatchRecord, all_records
from bagent.batches.runner import BatchEngine, EngineTools, SubmitterTools
from bagent.batches.scheduler import ProviderBatchScheduler
from bagent.batches.service import BatchService
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet
from bagent.fleet.limits.account import Account
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.money.prices import Price, pricer
from bagent.stages.dedupe import RequestDedupe
from bagent.stages.feeder import Work
from bagent.stages.results import WrittenRow
from bagent.stages.stop_rules import StopRules
from bagent.store.journal.codec import salt_of
from bagent.store.journal.done_index import ResumePolicy, load_index
from bagent.store.journal.journal import Journal
from bagent.types import Failure, Json, Message, Reply, Row, Usage
from support import http_servers
from support.batch_services import BatchServer
from support.http_servers import serve_app
from support.jobs import journal_lines
from support.scripted_fleet import ScriptedBackend, setup

BEGIN = 1_000_000.0
SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "integer"}},
    "required": ["score"],
    "additionalProperties": False,
}


class Killed(Exception):
    """The process ended here, as by SIGKILL."""


class Prompt:
    """``id=ID TEXT`` as the user's words."""

    raw = False

    def render(self, data: Mapping[str, Json], extra: Json = None) -> list[Message]:
        return [{"role": "user", "content": f"id={data['id']} {data.get('text', '')}"}]


def row(index: int, **data: Json) -> Row:
    """Row number ``index``."""
    data = {"id": f"r{index}", **data}
    return Row(index, 7919 * (index + 1), data["id"], data, "rows.jsonl", index + 1)


@dataclass
class Options:
    """How a run is set up.

    ``kill_save`` ends it at the N-th change of the ledger, ``before`` or ``after`` it is written;
    ``kill_row`` after so many outcomes.
    """

    schema: Json = None
    retries: int = 3
    size: int | None = None
    price: Price | None = None
    single_price: Price | None = None
    budget: float | None = None
    dedupe: bool = False
    kind: str = "openai"
    kill_save: tuple[int, str] | None = None
    kill_row: int | None = None
    part: str = "all"
    own_bodies: bool = False
    grow: float = 1.0
    late_at: float | None = None
    tier_until: float = 0.0


@dataclass
class Run:
    """What a run left: outcomes by id, batches, lines for people, seconds that went by."""

    outcomes: dict[Json, Json] = field(default_factory=dict)
    lines: list[Json] = field(default_factory=list)
    attempts: list[Json] = field(default_factory=list)
    records: list[BatchRecord] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    waited: float = 0.0
    error: Exception | None = None
    files: list[str] = field(default_factory=list)


class Clock:
    """Unix seconds that pass only while somebody waits."""

    def __init__(self) -> None:
        self.now = BEGIN
        self.waits: list[float | None] = []

    def __call__(self) -> float:
        return self.now

    async def pause(self, event: asyncio.Event, seconds: float | None) -> None:
        """Let everything else get on, then jump."""
        for _ in range(20):
            await asyncio.sleep(0)
            if event.is_set():
                return
        self.waits.append(seconds)
        if seconds is None:
            await event.wait()
        else:
            self.now += seconds


class MortalSpool(BatchBuilder):
    """A builder whose process may end at any change of the ledger."""

    kill_save: tuple[int, str] | None = None
    saves = 0

    def save(self, record: BatchRecord, *, sync: bool = True) -> None:
        self.saves += 1
        number, when = self.kill_save or (0, "")
        if self.saves != number:
            super().save(record, sync=sync)
            return
        if when == "after":
            super().save(record, sync=sync)
        raise Killed(f"at change {number}")


def served(server: BatchServer) -> AbstractAsyncContextManager[str]:
    """The server on a port of its own; its address."""
    return serve_app(server.app())


@contextmanager
def in_thread(server: BatchServer) -> Iterator[str]:
    """The server with an event loop of its own; its address."""
    with http_servers.in_thread(served(server)) as url:
        yield url


def run_through(
    folder: Path, server: BatchServer, rows: int | list[Row], options: Options | None = None
) -> Run:
    """One start of a run over ``rows`` (a number: that many usual ones) against ``server``."""

    async def main() -> Run:
        async with served(server) as url:
            every = [row(n) for n in range(rows)] if isinstance(rows, int) else rows
            return await run_rows(folder, url, every, options)

    return asyncio.run(main())


def statuses(run: Run) -> dict[Json, str]:
    """The status of each row by its id."""
    return {name: line["status"] for name, line in run.outcomes.items()}


def assert_ok(run: Run, count: int) -> None:
    """The run ended, and each of its rows has one outcome, which is ok."""
    assert run.error is None, run.error
    assert sorted(line["row"] for line in run.lines) == list(range(count))
    assert {line["status"] for line in run.lines} == {"ok"}


def make_service(kind: str, url: str, notice: Callable[[str], None]) -> BatchService:
    endpoint = Endpoint("provider", f"{url}/v1", headers={"Authorization": "Bearer k-secret-1"})
    if kind == "anthropic":
        return AnthropicBatches(endpoint, None, enforce="auto", notice=notice)
    return OpenAIBatches(endpoint, None, own=False, enforce="auto", notice=notice)


def make_plan(options: Options) -> StagePlan:
    schema = output = None
    if options.schema is not None:
        schema = OutputSchema.load(options.schema, base=Path())
        output = OutputFormat("answer", schema.text, schema.strict)
    settings = CallSettings("m-1", {"temperature": 0}, {}, output, max_tokens=64)
    return StagePlan(
        name="main",
        prompt=Prompt(),
        settings=settings,
        schema=schema,
        budget=TokenBudget(None),
        reasks=2,
        grow=options.grow,
        stream=False,
        own_bodies=options.own_bodies,
        price=pricer(options.price),
    )


async def feed(rows: list[Row]) -> AsyncIterator[Work]:
    for start in range(0, len(rows), 100):
        yield [(one, [0]) for one in rows[start : start + 100]]


async def run_rows(
    folder: Path,
    url: str,
    rows: list[Row],
    options: Options | None = None,
    service: BatchService | None = None,
) -> Run:
    """One start of a run over ``rows``, in the run directory ``folder``."""
    options, found, clock = options or Options(), Run(), Clock()

    notice = found.notices.append
    emitted = 0

    def emit(written: Sequence[WrittenRow]) -> None:
        nonlocal emitted
        emitted += len(written)
        if emitted == options.kill_row:
            raise Killed("while answers were read")

    plan = make_plan(options)
    if service is None:
        service = make_service(options.kind, url, notice)
    journal = Journal.open(folder, options.part, clock=clock, report=notice)
    done = load_index(folder, None, ResumePolicy.parse(None), report=notice)
    scheduler = ProviderBatchScheduler(options.budget, options.late_at)
    bounds = BatchLimits(
        options.size,
        lambda group: scheduler.quota(group).cap,
        lambda: None if options.budget is None else options.budget - builder.spent,
    )
    builder = MortalSpool(folder, options.part, "b0", plan.name, service, bounds)
    builder.kill_save = options.kill_save
    fleet = make_fleet()
    host = BatchRows(
        RowTools(
            plan,
            journal,
            fleet,
            RequestDedupe(journal.read_at, list, None, dedupe=options.dedupe),
            StopRules(canary=True, stop_after=None),
            emit,
            price=options.price,
            single_price=options.single_price,
            dedupe=options.dedupe,
            clock=clock,
            tier={"service_tier": "flex"},
            tier_until=options.tier_until,
        ),
        builder,
    )
    builder.load(notice, host.remember, done.has)
    tools = EngineTools(
        rules=ReadRules(options.retries, options.price, done.has),
        post=SubmitterTools(_plainly, notice, notice, clock),
        on_attempts=journal.write_attempts,
        budget=options.budget,
        pause=clock.pause,
    )
    pending = [one for one in rows if not done.has(one.key ^ salt_of(plan.name, 0))]
    try:
        await asyncio.wait_for(
            BatchEngine(service, builder, host, scheduler, tools).run(feed(pending)), 30
        )
    except Exception as error:
        found.error = error
    finally:
        journal.close()
        await service.close()
    found.waited = clock.now - BEGIN
    return _look(folder, found)


async def _plainly(work: Any) -> str | Failure:
    found: str | Failure = await work
    return found


class Singles(ScriptedBackend):
    """Answers every single call at once, and notes the tier of each."""

    tiers: ClassVar[list[Json]] = []

    async def send(
        self, endpoint: Endpoint, group: Sequence[Request], timeouts: Timeouts
    ) -> Exchange:
        self.tiers += [request.settings.extra.get("service_tier") for request in group]
        return Exchange(
            [Reply("single", "stop", usage=Usage(prompt=7, completion=1))],
            sent=BEGIN,
            done=BEGIN,
            status=200,
        )


def make_fleet() -> Fleet:
    """A fleet whose one endpoint answers everything."""
    return setup({}, states=[_single()], backend=Singles({}), concurrency=8).fleet


def _single() -> EndpointState:
    endpoint = Endpoint("single", "http://x/v1")
    return EndpointState(endpoint, InFlightLimit(8, 8), Account(None, None, 100.0))


def _look(folder: Path, found: Run) -> Run:
    lines = journal_lines(folder)
    found.attempts = [line for line in lines if "try" in line]
    found.lines = [line for line in lines if "status" in line]
    found.outcomes = {line["id"]: line for line in found.lines}
    found.records = list(all_records(folder, found.notices.append))
    found.files = sorted(path.name for path in folder.glob("batches/*"))
    return found
