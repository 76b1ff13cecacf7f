"""One run in one process: the rooms wired together, from the first probe to the last sync."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from bagent.backends.base import Backend
from bagent.backends.choose import BackendConfig, check_asked, make_backend
from bagent.backends.endpoint import Capabilities
from bagent.backends.engine_metrics import LoadReader
from bagent.backends.transport import Transport
from bagent.errors import EXIT_NEEDS_PERSON, EXIT_STOPPED, StoppedEarly
from bagent.fleet.deadline import read_deadline
from bagent.fleet.dispatcher import Fleet
from bagent.hpc.asking import job_end
from bagent.observe import Live, Progress, Snapshot, Tally
from bagent.runs.emit import StdoutWriter
from bagent.runs.endpoints import Servers, open_servers
from bagent.runs.finding import FIRST_ANSWER_SECONDS, Patience, find_servers
from bagent.runs.fleets import Recruiter, make_fleet
from bagent.runs.lines import ResultLines
from bagent.runs.openrun import OpenRun
from bagent.runs.plan import deduped, endpoint_summary, make_plan, resolve_model
from bagent.runs.prepare import Prepared
from bagent.runs.stop import Stop, StopSwitch, raise_file_limit, stop_for
from bagent.runs.watching import HostfileFollower, watch_loads
from bagent.stages.engine import Engine
from bagent.stages.feeder import Feeder
from bagent.stages.guards import Guards
from bagent.stages.sharing import Sharing
from bagent.types import Attempt, EndpointSample, FeedStats, FleetStats, Outcome, Row

TICK_SECONDS = 0.25

NO_FLEET = FleetStats(0, 0, 0, 0, 0.0, 0, 0)


class Ended(msgspec.Struct, frozen=True):
    """How the sending ended: the stop that cut it short (None: all rows ended), and counts."""

    stop: Stop | None
    snapshot: Snapshot


class Session:
    """Runs the rows of a prepared job; make it inside the event loop.

    Args:
        store: the open run directory with its journal and index.
        lines: makes stdout lines of outcomes; None where rows are not printed.
    """

    def __init__(
        self,
        prepared: Prepared,
        store: OpenRun,
        progress: Progress,
        notice: Callable[[str], None],
        lines: ResultLines | None,
    ) -> None:
        self._prepared = prepared
        self._store = store
        self._progress = progress
        self._notice = notice
        self._lines = lines
        self._tally = Tally(time.monotonic)
        self._switch = StopSwitch()
        self._stdout = StdoutWriter(1, self._stdout_closed) if lines else None
        self._transport = Transport()
        self._fleet: Fleet | None = None
        self._feeder: Feeder | None = None
        progress.attach(Live(self._tally, lambda: self._fleet.states if self._fleet else ()))

    async def run(self) -> Ended:
        """Send everything that is still to do; returns how it ended, raises only UsageError."""
        options = self._prepared.options
        deadline = read_deadline(
            options.deadline,
            options.env,
            time.time(),
            margin=options.margin,
            job_end=job_end,
        )
        if deadline is not None:
            self._switch.at_deadline(deadline)
        try:
            async with AsyncExitStack() as stack:
                return await self._with_servers(stack)
        finally:
            self._switch.close()

    async def _with_servers(self, stack: AsyncExitStack) -> Ended:
        prepared = self._prepared
        job, options = prepared.job, prepared.options
        servers = await open_servers(
            job,
            options.env,
            stack,
            log_file=self._store.path / "local-server.log",
            notice=self._notice,
        )
        backend = self._backend(servers)
        stack.push_async_callback(backend.close)
        try:
            known = await find_servers(
                backend,
                servers.endpoints,
                Patience(options.min_hosts, options.wait_hosts or FIRST_ANSWER_SECONDS),
                self._switch.asked,
                self._progress.note,
            )
        except StoppedEarly as error:
            return Ended(stop_for(error), self._snapshot())
        if self._switch.asked.done():
            return Ended(self._switch.asked.result(), self._snapshot())
        keeps_model = prepared.own_bodies and job.model == "auto"
        model = None if keeps_model else resolve_model(job, known)
        self._store.begin(model, endpoint_summary(servers.endpoints, known), servers.simulated)
        return await self._drive(backend, servers, model, known)

    def _backend(self, servers: Servers) -> Backend:
        job, prompt = self._prepared.job, self._prepared.prompt
        asked = job.sampling.request_fields()
        names = asked.keys() - job.sampling.extra.keys() - {"max_tokens"}
        check_asked(
            servers.kind, names, raw=prompt is not None and prompt.raw, batching=job.batching.mode
        )
        config = BackendConfig(
            enforce=job.output.enforce,
            batching=job.batching.mode,
            keys=servers.keys,
            bedrock=servers.bedrock,
        )
        return make_backend(servers.kind, self._transport, config, self._notice)

    # --- the run ------------------------------------------------------------------------------

    async def _drive(
        self,
        backend: Backend,
        servers: Servers,
        model: str | None,
        known: Mapping[str, Capabilities],
    ) -> Ended:
        prepared, store = self._prepared, self._store
        job, rows = prepared.job, prepared.rows
        assert rows is not None
        self._fleet, recruiter = make_fleet(
            job,
            servers,
            backend,
            handles=raise_file_limit(job.limits.concurrency),
            on_attempt=self._on_attempt,
            on_sample=store.journal.write_sample,
            notice=self._notice,
        )
        self._fleet.doubt({e.name for e in servers.endpoints if e.name not in known})
        plan = make_plan(prepared, servers, model, known)
        engine = Engine(
            plan,
            self._fleet,
            store.journal,
            sharing=Sharing(store.journal.read_at, store.reuse, dedupe=deduped(job)),
            guards=Guards(
                canary=prepared.options.canary,
                stop_after=job.limits.stop_after_failures,
            ),
            emit=self._emit,
            gate=self._reader_ready,
        )
        # Where rows are printed, each must be seen to be printed in its place.
        rows.remember(store.pieces, None if self._lines is not None else self._all_finished)
        self._feeder = Feeder(rows.batches(), self._pending)
        self._feeder.start()
        ticker = asyncio.create_task(self._tick_forever())
        beside = self._watch(self._fleet, recruiter, model)
        feeding = asyncio.create_task(self._feed(engine, self._feeder))
        stop = await self._first_reason(feeding, engine, ticker)
        if stop is not None:
            feeding.cancel()
            await self._drain(self._fleet, stop)
        self._feeder.close()
        for task in (ticker, *beside):
            task.cancel()
        await asyncio.gather(feeding, ticker, *beside, return_exceptions=True)
        stop = await self._finish_stdout(stop)
        if stop is not None and self._switch.code is not None:
            stop = msgspec.structs.replace(stop, code=self._switch.code)
        return Ended(stop, self._snapshot())

    def _watch(
        self, fleet: Fleet, recruiter: Recruiter, model: str | None
    ) -> list[asyncio.Task[None]]:
        """What goes on beside the rows; a fault of it stops nothing that works."""
        job, env = self._prepared.job, self._prepared.options.env
        reader = LoadReader(self._transport)
        tasks = [
            asyncio.create_task(watch_loads(fleet, reader, model, self._on_sample))
        ]
        if job.hostfile is not None:
            follower = HostfileFollower(job.hostfile.path, job.backend, env, self._notice)
            tasks.append(asyncio.create_task(follower.follow(fleet, recruiter)))
        return tasks

    async def _feed(self, engine: Engine, feeder: Feeder) -> None:
        """Print what an earlier start finished, then send the rest."""
        if self._stdout is not None and self._lines is not None:
            for number, line in enumerate(self._lines.earlier()):
                self._stdout.put(line)
                await self._stdout.room()
                if number % 64 == 0:
                    await asyncio.sleep(0)
        await engine.run(feeder)

    async def _reader_ready(self) -> None:
        """Wait until whoever reads stdout has caught up."""
        if self._stdout is not None and self._lines is not None:
            await self._stdout.room()
            await self._lines.room()

    async def _finish_stdout(self, stop: Stop | None) -> Stop | None:
        """Write what is left for stdout; after a stop, or by a signal, no longer than allowed."""
        if self._stdout is None or self._lines is None:
            return stop
        for line in self._lines.rest():
            self._stdout.put(line)
        writing = asyncio.create_task(self._stdout.finish())
        hurried = asyncio.create_task(self._switch.hurried.wait())
        reasons: set[asyncio.Future[Any]] = {writing, hurried}
        if stop is None:
            reasons.add(self._switch.asked)
        await asyncio.wait(
            reasons,
            timeout=stop.grace if stop else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        hurried.cancel()
        if writing.done():
            return stop
        self._stdout.abandon()
        writing.cancel()
        return stop or self._switch.asked.result()

    async def _first_reason(
        self,
        feeding: asyncio.Task[None],
        engine: Engine,
        ticker: asyncio.Task[None],
    ) -> Stop | None:
        """Wait for the end of the rows or the first reason to stop before it."""
        fleet = self._fleet
        assert fleet is not None
        reasons: list[asyncio.Future[Any]] = [feeding, ticker]
        reasons += [self._switch.asked, fleet.stopped, engine.advice]
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        if fleet.stopped.done():
            return stop_for(fleet.stopped.result())
        for task in (feeding, ticker):
            if task.done() and (error := task.exception()) is not None:
                return stop_for(error)
        if engine.advice.done():
            advice = engine.advice.result()
            return Stop(EXIT_NEEDS_PERSON, advice.reason, advice.hint)
        if self._switch.asked.done() and not feeding.done():
            return self._switch.asked.result()
        return None

    async def _drain(self, fleet: Fleet, stop: Stop) -> None:
        """Let what is in flight end within the grace time, or until a second signal."""
        if stop.grace:
            self._progress.note(f"{stop.reason}: waiting up to {stop.grace:g} s for what is sent")
        draining = asyncio.create_task(fleet.drain(stop.grace))
        hurry = asyncio.create_task(self._switch.hurried.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not draining.done():
            draining.cancel()
            await fleet.drain(0.0)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._store.tick()
            if self._fleet is not None:
                self._fleet.tick()
            if self._feeder is not None and self._feeder.ended:
                self._store.input_ended()
            if self._store.stop_requested():
                self._switch.ask(Stop(EXIT_STOPPED, f"{self._store.path / 'stop'} is there"))
            self._progress.update(self._snapshot())

    # --- what comes of the rows -----------------------------------------------------------------

    def _pending(self, row: Row) -> list[int]:
        """The answers of a row that are still to do (called in the reader's thread)."""
        answers = self._store.pending(row, self._prepared.job.answers)
        if self._lines is not None:
            self._lines.expect(row, answers)
        return answers

    def _all_finished(self, keys: Sequence[int]) -> bool:
        """Whether nothing is to do for any of these rows (called in the reader's thread)."""
        return self._store.all_finished(keys, self._prepared.job.answers)

    def _on_attempt(self, attempt: Attempt) -> None:
        self._store.journal.write_attempt(attempt)
        self._tally.attempt(attempt)

    def _on_sample(self, sample: EndpointSample) -> None:
        self._store.journal.write_sample(sample)
        self._tally.sample(sample)

    def _emit(self, outcome: Outcome, location: int, row: Row) -> None:
        self._tally.outcome(outcome)
        if self._stdout is not None and self._lines is not None:
            for line in self._lines.add(outcome, location, row):
                self._stdout.put(line)

    def _stdout_closed(self) -> None:
        self._switch.ask(Stop(EXIT_STOPPED, "stdout was closed"))

    def _snapshot(self) -> Snapshot:
        fleet = self._fleet.stats() if self._fleet else NO_FLEET
        rows = self._prepared.rows
        position, size = rows.progress() if rows is not None else (0, None)
        feeder = self._feeder
        passed = rows.passed if rows is not None else 0
        feed = FeedStats(
            read=passed + (feeder.read if feeder else 0),
            skipped=passed + (feeder.skipped if feeder else 0),
            position=position,
            size=size,
            ended=feeder.ended if feeder else False,
        )
        return self._tally.snapshot(fleet, feed)
