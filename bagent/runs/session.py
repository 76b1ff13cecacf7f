"""One run in one process, from the first probe to the last sync."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec

from bagent.backends.engines.metrics import LoadReader
from bagent.backends.http.client import Transport
from bagent.backends.http.pool import Connect
from bagent.clocks import unix
from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_INTERRUPTED,
    EXIT_NEEDS_PERSON,
    EXIT_STOPPED,
    StoppedEarly,
)
from bagent.hpc.allocation import job_end
from bagent.observe import Live, Progress, RunCounters, RunTotals, Snapshot
from bagent.observe.counters import estimate_part_total
from bagent.observe.live_state import endpoints_in_trouble
from bagent.rows import RowReader, read_again
from bagent.runs.build import build_run
from bagent.runs.context import SAMPLE_ROWS, RunContext
from bagent.runs.deadline import read_deadline
from bagent.runs.hostfile_reload import HostfileFollower
from bagent.runs.load_polling import LAST_SECONDS, read_counters, watch_loads
from bagent.runs.prompt_fields import EmptyCells
from bagent.runs.result_lines import ResultLines, StdoutWriter
from bagent.runs.resume import has_ended
from bagent.runs.run_store import RunStore
from bagent.runs.services import RunMessages, RunPlan, RunServices
from bagent.runs.shutdown import Stop, StopRequests, StopSwitch, stop_for_error, stop_for_stdout
from bagent.servers.pricing import BudgetGuard
from bagent.servers.server_pool import FleetSet, ServerResolver
from bagent.servers.startup_probe import FIRST_ANSWER_SECONDS, StartupPatience
from bagent.stages.feeder import Feeder, Repeats, Work
from bagent.stages.results import WrittenRow
from bagent.store.totals import PROGRESS_INTERVAL_S, RunProgress, Totals
from bagent.types import Attempt, EndpointSample, FeedStats, FleetStats, Row

TICK_SECONDS = 0.25

NO_FLEET = FleetStats(0, 0, 0, 0, 0.0, 0, 0)


class SessionResult(NamedTuple):
    """How a session ended."""

    stop: Stop | None
    """What cut it short; None where all rows ended."""
    snapshot: Snapshot


class RunSession:
    """Runs the rows of a checked job. Create it inside the event loop.

    Args:
        store: the open run directory with its journal and index.
        lines: makes stdout lines of outcomes; None where rows are not printed.
        stop_requests: another program's requests to stop; None: signals stop the run.
        connect: opens the connections to plain HTTP endpoints; None: over TCP.
    """

    def __init__(
        self,
        context: RunContext,
        store: RunStore,
        rows: RowReader,
        progress: Progress,
        messages: RunMessages,
        lines: ResultLines | None,
        stop_requests: StopRequests | None,
        connect: Connect | None = None,
    ) -> None:
        self._context = context
        self._store = store
        self._rows = rows
        self._progress = progress
        self._messages = messages
        self._lines = lines
        self._counters = RunCounters(time.monotonic)
        self._switch = StopSwitch(stop_requests)
        self._budgets = BudgetGuard(self._budget_exhausted)
        self._stdout = StdoutWriter(lines.descriptor, self._stdout_closed) if lines else None
        self._transport = Transport(connect)
        self._reader = LoadReader(self._transport)
        self._fleet: FleetSet | None = None
        self._feeder: Feeder | None = None
        self._empty = EmptyCells(context.prompt)
        self._plan: RunPlan | None = None
        self._live = Live(self._counters, lambda: self._fleet.states if self._fleet else ())
        progress.attach(self._live)

    async def run(self) -> SessionResult:
        """Send everything that is still to do and return how it ended.

        Raises:
            UsageError: something the user wrote is wrong; nothing was sent.
            WriteError: results cannot be written.
        """
        options = self._context.options
        deadline = read_deadline(
            options.deadline,
            options.env,
            time.time(),
            margin=options.margin,
            job_end=job_end,
        )
        if deadline is not None:
            self._switch.stop_at(deadline)
        ticker = asyncio.create_task(self._tick_forever())
        ticker.add_done_callback(self._on_ticker_end)
        try:
            async with AsyncExitStack() as stack:
                try:
                    return await self._with_servers(stack)
                finally:
                    ticker.cancel()  # all is counted; `close` raises what the journal cannot write
        finally:
            self._switch.close()
            if self._stdout is not None:
                self._stdout.abandon()  # all is written, or there is no more time for it

    async def _with_servers(self, stack: AsyncExitStack) -> SessionResult:
        options = self._context.options
        if not await self._has_rows_to_send():
            return await self._end_without_servers()
        resolver = ServerResolver(
            env=options.env,
            patience=StartupPatience(
                options.min_hosts,
                options.wait_hosts or FIRST_ANSWER_SECONDS,
                bool(options.wait_hosts),
            ),
            transport=self._transport,
            stack=stack,
            log_file=self._store.path / "local-server.log",
            stop_requested=self._switch.requested,
            note=self._messages.show,
            notice=self._messages.notify,
            budgets=self._budgets,
        )
        try:
            plan = await build_run(self._context, resolver, self._services())
        except StoppedEarly as error:
            return self._ended(stop_for_error(error))
        if plan is None:
            return self._ended(self._switch.requested.result())
        return await self._execute(plan)

    def _services(self) -> RunServices:
        return RunServices(
            self._store,
            self._context.options,
            on_attempts=self._on_attempts,
            on_sample=self._on_sample,
            emit=self._emit,
            messages=self._messages,
            spending=self._counters,
            gate=self._wait_for_reader,
        )

    async def _has_rows_to_send(self) -> bool:
        """Return whether servers are needed.

        Only two kinds of run are read ahead to find out: one that reached its end before, and one
        whose rows a program gives. It needs none if all its rows were read and none is to be sent.
        """
        context, lines = self._context, self._lines
        if context.stages or context.job.batching.in_batches:
            return True
        given_by_program = lines is not None and context.options.program_rows is not None
        if not given_by_program and (context.piped or not has_ended(self._store.info)):
            return True
        print_finished = None if lines is None else partial(self._print_finished, lines)
        reading = asyncio.create_task(self._open_feeder().has_work(print_finished))
        reasons: set[asyncio.Future[Any]] = {reading, self._switch.requested}
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() or self._reader_is_gone():
            return await reading
        reading.cancel()  # a stop is requested, which the next step handles
        return True

    def _budget_exhausted(self, message: str) -> None:
        """Stop the run, and say what earlier starts spent beside the budget of this one."""
        earlier = sum(index.totals.cost for index in self._store.done.indexes)
        if earlier:
            message += f"; earlier starts spent ${earlier:.4f} more"
        self._switch.budget_exhausted(message, spent=self._budgets.spent > 0)

    async def _end_without_servers(self) -> SessionResult:
        self._store.input_ended()
        self._store.forget_missing()
        self._store.forget_edited()
        stop = await self._finish_stdout(None)
        # A reader that has seen enough stops nothing where nothing was to do.
        return self._ended(None if self._reader_is_gone() else stop)

    def _reader_is_gone(self) -> bool:
        """Return whether stdout was closed, rather than full."""
        failure = self._stdout.failure if self._stdout is not None else None
        return failure is not None and stop_for_stdout(failure).code == EXIT_STOPPED

    # --- the run ------------------------------------------------------------------------------

    async def _execute(self, plan: RunPlan) -> SessionResult:
        self._fleet, self._plan = plan.fleets, plan
        feeder = self._feeder or self._open_feeder()
        background = self._start_background(plan)
        feeding = asyncio.create_task(self._feed(plan, feeder))
        stop = await self._wait_for_end(feeding, plan)
        if stop is not None:
            self._switch.request(stop)  # a signal while it drains does not change the reason
            stop = self._with_dead_fleet(stop)
            feeding.cancel()
            await self._drain(plan.fleets, stop)
        else:
            await self._read_final_counters(plan)
            self._store.forget_missing()
            self._store.forget_edited()
            plan.fleets.abandon_waiting()  # a probe that the end cuts off must not count as failed
        feeder.close()
        for task in background:
            task.cancel()
        await asyncio.gather(feeding, *background, return_exceptions=True)
        stop = await self._finish_stdout(stop)
        if stop is not None and self._switch.interrupted:
            stop = msgspec.structs.replace(stop, code=EXIT_INTERRUPTED)
        if self._store.journal.failure is not None:  # perhaps since the stop
            stop = stop_for_error(self._store.journal.failure)
        return self._ended(stop)

    def _with_dead_fleet(self, stop: Stop) -> Stop:
        """Return the stop; that of a deadline says where no endpoint worked before it."""
        states = [state for state in self._fleet.states if not state.leaving] if self._fleet else []
        faults = [state.fault for state in states if state.fault is not None]
        if not stop.by_deadline or not states or len(faults) < len(states):
            return stop
        reason = f"{stop.reason}, and no endpoint works: {faults[0].message}"
        return msgspec.structs.replace(stop, reason=reason)

    def _open_feeder(self) -> Feeder:
        """Start to read the rows."""
        # Finished rows must be read too where rows are printed in order, or stages need them.
        needs_all = self._lines is not None or bool(self._context.stages)
        self._rows.remember(self._store.pieces, None if needs_all else self._all_finished)
        feeder = Feeder(
            self._rows.batches(),
            self._pending,
            threaded=self._store.threaded,
            with_finished=self._lines is not None and self._lines.of_input,
            repeats=self._repeats(),
        )
        self._feeder = feeder
        feeder.start()
        return feeder

    def _repeats(self) -> Repeats | None:
        """Return how rows that failed earlier are read: after all others, until the run has ended.

        Starts with a short deadline would otherwise send them again and again, and never get to
        the others. Ordered lines take them where they stand.
        """
        context, store = self._context, self._store
        ordered = self._lines is not None and context.options.ordered
        if context.stages or ordered or not store.done.failed_units or has_ended(store.info):
            return None
        return Repeats(
            partial(store.repeats, answers=context.job.answers),
            partial(read_again, context.rows_config),
        )

    def _ended(self, stop: Stop | None) -> SessionResult:
        """Return the result, with the totals counted from the journal."""
        codes = None
        # In haste, or with an unreadable journal, the live counts are used.
        if stop is None or stop.code not in (EXIT_INTERRUPTED, EXIT_CANNOT_WRITE):
            codes = self._store.codes()
        snapshot = self._snapshot(codes, complete=stop is None)
        if codes is not None and self._context.stages:
            snapshot = msgspec.structs.replace(snapshot, causes=self._store.causes())
        trouble = endpoints_in_trouble(self._live.endpoints())
        snapshot = msgspec.structs.replace(snapshot, tools=self._store.tools(), trouble=trouble)
        self._write_progress(snapshot, last=True)
        return SessionResult(stop, snapshot)

    async def _read_final_counters(self, plan: RunPlan) -> None:
        """Read the engines' cache counters after the last row, if that takes no time."""
        for pool, model in plan.pools:
            reading = read_counters(pool.fleet, self._reader, model, "end")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reading, LAST_SECONDS)

    def _start_background(self, plan: RunPlan) -> list[asyncio.Task[None]]:
        """Start load polling and hostfile reloads; their errors do not stop the run."""
        env = self._context.options.env
        reader = self._reader
        tasks = []
        for pool, model in plan.pools:
            tasks.append(asyncio.create_task(read_counters(pool.fleet, reader, model, "begin")))
            tasks.append(asyncio.create_task(watch_loads(pool.fleet, reader, model)))
            job = pool.resolved.job
            if job.hostfile is not None:
                path, servers = job.hostfile.path, pool.resolved.servers
                follower = HostfileFollower(
                    path, job.backend, env, self._messages.notify, servers.endpoints, servers.select
                )
                task = follower.follow(pool.fleet, pool.state_factory.states)
                tasks.append(asyncio.create_task(task))
        return tasks

    async def _feed(self, plan: RunPlan, feeder: Feeder) -> None:
        """Send the remaining rows, then print the lines that wait for their end."""
        if self._lines is not None and self._lines.of_input:
            await plan.run(self._with_finished_printed(feeder, self._lines))
        else:
            await plan.run(feeder)
        await self._print_remaining()

    async def _with_finished_printed(
        self, feeder: Feeder, lines: ResultLines
    ) -> AsyncIterator[Work]:
        """Print the finished answers of rows that were read, and yield the others."""
        async for work in feeder:
            await self._print_finished(lines, work)
            if work := [(row, pending) for row, pending in work if pending]:
                yield work

    async def _print_finished(self, lines: ResultLines, work: Work) -> None:
        await self._wait_for_reader()
        for row, pending in work:
            finished = [n for n in range(self._context.job.answers) if n not in pending]
            for line in lines.add_finished(row, finished):
                if self._stdout is not None:
                    self._stdout.put(line)

    async def _print_remaining(self) -> None:
        if self._stdout is not None and self._lines is not None:
            for number, line in enumerate(self._lines.remaining()):
                self._stdout.put(line)
                await self._stdout.wait_for_room()
                if number % 64 == 0:
                    await asyncio.sleep(0)

    async def _wait_for_reader(self) -> None:
        """Wait until the reader of stdout has caught up."""
        if self._stdout is not None and self._lines is not None:
            await self._stdout.wait_for_room()
            await self._lines.wait_for_room()

    async def _finish_stdout(self, stop: Stop | None) -> Stop | None:
        """Write the remaining lines to stdout; after a stop only within its grace time."""
        if self._stdout is None or self._lines is None:
            return stop
        for line in self._lines.flush():
            self._stdout.put(line)
        writing = asyncio.create_task(self._stdout.finish())
        hurried = asyncio.create_task(self._switch.hurried.wait())
        reasons: set[asyncio.Future[Any]] = {writing, hurried}
        if stop is None:
            reasons.add(self._switch.requested)
        await asyncio.wait(
            reasons,
            timeout=stop.grace if stop else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        hurried.cancel()
        if writing.done():
            # The very last line may be the one that failed.
            failure = self._stdout.failure
            return stop or (stop_for_stdout(failure) if failure is not None else None)
        self._stdout.abandon()
        writing.cancel()
        return stop or self._switch.requested.result()

    async def _wait_for_end(self, feeding: asyncio.Task[None], plan: RunPlan) -> Stop | None:
        """Wait for the end of the rows, or for the first reason to stop before it."""
        fleets = plan.fleets
        reasons: list[asyncio.Future[Any]] = [feeding, self._switch.requested]
        reasons += [fleets.stopped, plan.advice]
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        if fleets.stopped.done():
            return stop_for_error(fleets.stopped.result())
        if feeding.done() and (error := feeding.exception()) is not None:
            return stop_for_error(error)
        if plan.advice.done():
            advice = plan.advice.result()
            return Stop(EXIT_NEEDS_PERSON, advice.reason, advice.hint)
        if self._switch.requested.done():
            stop = self._switch.requested.result()
            if stop.error is not None or not feeding.done():
                return stop
        return None

    async def _drain(self, fleet: FleetSet, stop: Stop) -> None:
        """Let requests in flight end within the grace time, or until a second signal."""
        fleet.abandon_waiting()
        if stop.grace:
            self._messages.show(f"{stop.reason}: waiting up to {stop.grace:g} s for what is sent")
        draining = asyncio.create_task(fleet.drain(stop.grace))
        hurried = asyncio.create_task(self._switch.hurried.wait())
        await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not draining.done():
            draining.cancel()
            await fleet.drain(0.0)

    async def _tick_forever(self) -> None:
        """Poll what no event reports; this begins before servers are awaited."""
        interval = min(self._progress.interval_s, PROGRESS_INTERVAL_S) - TICK_SECONDS / 2
        due = 0.0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._store.tick()
            if self._store.stop_requested():
                self._switch.request(Stop(EXIT_STOPPED, f"{self._store.path / 'stop'} is there"))
            if self._fleet is not None:
                due = self._tick(self._fleet, due, interval)

    def _on_ticker_end(self, ticker: asyncio.Task[None]) -> None:
        """Stop the run for an error of the ticker."""
        if not ticker.cancelled() and (error := ticker.exception()) is not None:
            self._switch.request(stop_for_error(error))

    def _tick(self, fleet: FleetSet, due: float, interval: float) -> float:
        """Tick the fleet, and show the progress if it is due; return when it is due next."""
        # Rows of stages come from other rows, so how many remain is unknown.
        staged = bool(self._context.stages)
        to_do = self._counters.to_do(fleet.open_rows, self._feed_stats())
        fleet.tick(None if staged else to_do)
        if self._feeder is not None and self._feeder.ended:
            self._store.input_ended()
            if not staged:  # what rows of the input become in later stages is known at the end
                self._store.forget_missing()
        if time.monotonic() < due:
            return due
        snapshot = self._snapshot()
        self._progress.update(snapshot)
        self._write_progress(snapshot)
        return time.monotonic() + interval

    def _write_progress(self, s: Snapshot, *, last: bool = False) -> None:
        """Write how far this start is, for readers of the run directory."""
        staged, answers = bool(self._context.stages), self._context.job.answers
        part_total = None if staged else estimate_part_total(s.feed, answers)
        state = RunProgress(
            at=unix(),
            total=s.total,
            total_is_exact=s.total_is_exact,
            remaining=s.remaining,
            eta_s=s.eta_s,
            part_total=part_total,
            rows_per_s=s.rates.rows_per_s if s.remaining else None,
        )
        self._store.progress.write(state, last=last)

    # --- outcomes -----------------------------------------------------------------------------

    def _pending(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the answers of rows that are still to do. Runs in the reader's thread."""
        if self._context.stages:
            return [[0]] * len(rows)  # later stages need finished rows too
        pending = self._store.pending(rows, self._context.job.answers)
        self._empty.count(rows, pending)
        if self._lines is not None:
            for row in rows:
                self._lines.expect(row, self._context.job.answers)
        return pending

    def _all_finished(self, keys: Sequence[int]) -> bool:
        """Return whether all these rows are finished. Runs in the reader's thread."""
        return self._store.all_finished(keys, self._context.job.answers)

    def _on_attempts(self, attempts: Sequence[Attempt]) -> None:
        self._store.journal.write_attempts(attempts)
        self._counters.attempts(attempts)

    def _on_sample(self, sample: EndpointSample) -> None:
        self._store.journal.write_sample(sample)
        self._counters.sample(sample)

    def _emit(self, written: Sequence[WrittenRow]) -> None:
        outcomes = [outcome for outcome, _, _ in written]
        # What a stage made without a request is no answer.
        self._counters.outcomes(
            [o for o in outcomes if o.endpoint is not None or o.copied_from or o.status != "ok"]
        )
        if not self._context.stages:
            self._store.live_totals.outcomes(outcomes)
        if self._stdout is not None and self._lines is not None:
            for outcome, location, row in written:
                for line in self._lines.add(outcome, location, row):
                    self._stdout.put(line)

    def _stdout_closed(self, error: OSError) -> None:
        self._switch.request(stop_for_stdout(error))

    def _snapshot(self, codes: Counter[int] | None = None, *, complete: bool = False) -> Snapshot:
        """Return the state now.

        Args:
            codes: the totals by outcome code, once they were counted from the journal.
            complete: all rows have ended.
        """
        stats = NO_FLEET if self._fleet is None else self._fleet.stats()
        totals = self._run_totals(codes, complete)
        return self._counters.snapshot(stats, self._feed_stats(), totals)

    def _feed_stats(self) -> FeedStats:
        """Return how far the input is read."""
        rows, feeder = self._rows, self._feeder
        position, size = rows.progress() if feeder is not None else (0, None)
        if feeder is not None and size is None and self._context.rows_config.where is None:
            position, size = feeder.read, self._context.options.program_rows
        passed = rows.passed
        feed = FeedStats(
            read=passed + (feeder.read if feeder else 0),
            skipped=passed + (feeder.skipped if feeder else 0),
            position=position,
            size=size,
            ended=feeder.exhausted if feeder else False,
            # Stages read finished rows again, so their count is of no use.
            expected=feeder.requested if feeder and not self._context.stages else 0,
            finished=self._finished_rows,
            most=rows.most,
            empty_pipe=rows.empty_pipe,
            unselected=rows.unselected,
            empty=dict(self._empty.counts),
        )
        if feeder is None and self._answers_of_input is not None:
            feed = msgspec.structs.replace(feed, ended=True, expected=self._answers_of_input)
        return feed

    @cached_property
    def _finished_rows(self) -> int | None:
        """About how many rows of this process's shard an earlier start finished."""
        if self._context.stages:
            return None
        return self._store.finished // (self._context.job.answers * self._rows.shards)

    @cached_property
    def _answers_of_input(self) -> int | None:
        """The number of answers, where it is known before the input is read; else None.

        It is known if the input fits the sample, or if a program says how many rows it gives.
        """
        context, config = self._context, self._context.rows_config
        if context.stages or self._store.recorded:
            return None
        if context.piped:
            count = context.options.program_rows
            if count is None or config.where is not None or config.shard is not None:
                return None
            most = self._rows.most
            return (count if most is None else min(count, most)) * context.job.answers
        first = len(self._rows.peek(SAMPLE_ROWS))
        return first * context.job.answers if first < SAMPLE_ROWS else None

    def _run_totals(self, codes: Counter[int] | None, complete: bool) -> RunTotals:
        live = self._store.live_totals
        if not self._context.stages:
            totals = Totals.of(live.codes if codes is None else codes)
            unit = "answer" if self._context.job.answers > 1 else "row"
            unread = live.repeats_unread(self._rows.shards)
            changes = dict(live.changes)
            unmatched = self._store.unmatched
            return RunTotals(
                totals, live.repeats_pending, unread, changes, unmatched=unmatched, unit=unit
            )
        last = self._plan.codes() if self._plan is not None else Counter()
        codes = last if codes is None else codes
        # Where no row reached the last stage, the codes are those of all failures.
        counted = bool(codes) and not last
        dropped = self._plan.dropped() if self._plan is not None and not counted else {}
        return RunTotals(
            Totals.of(codes),
            changes=dict(codes),
            staged=not complete,
            dropped=dropped,
            several_stages=len(self._store.info.stages) > 1,
        )
