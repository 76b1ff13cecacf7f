"""A load test from the health check of its endpoints to its results."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.backends.http.client import Transport
from bagent.backends.http.resolver import ResolverLoop
from bagent.bench.client import PromptSizes, calibrate
from bagent.bench.load_generator import WorkerShare
from bagent.bench.monitors import ServerWatch
from bagent.bench.plan import (
    AnswerPlan,
    BenchPlan,
    BenchTarget,
    Lengths,
    LoadConfig,
    Workload,
    expected_seconds,
    plan_stages,
    portable,
)
from bagent.bench.records import LoadStageRow, RowFile
from bagent.bench.schedule import LoadStage, Recorded, steady_window
from bagent.bench.sweep import RequestSummary, Saturation, sweep
from bagent.bench.workers import InProcessWorkers, ProcessWorkers, Workers
from bagent.clocks import unix
from bagent.errors import StoppedEarly, UsageError, WriteError
from bagent.files import make_private_folder
from bagent.fleet.health_check import (
    FleetHealthCheck,
    HealthCheckPlan,
    HealthResult,
    format_counts,
    group_failures,
)
from bagent.observe.formatting import counted, duration, rate
from bagent.runs.shutdown import raise_file_limit
from bagent.servers.resolve import Servers

if TYPE_CHECKING:
    from bagent.backends.endpoint import Endpoint
    from bagent.bench.plan import JobBody
    from bagent.runs.context import RunContext

PROGRESS_SECONDS = 5.0
"""Time between two messages about a running stage."""

GROUPS_PER_ENDPOINT = 4
WARMUP = -1
"""Number of the warm-up stage."""


class LoadTestRecord(msgspec.Struct):
    """What a test did, beside its raw rows; times as in :mod:`bagent.bench.records`."""

    salt: str
    started_at: float
    lengths: dict[str, Lengths]
    stages: list[LoadStageRow]
    stopped: bool = False
    saturation: Saturation | None = None


class LoadTestSession:
    """Runs a test and leaves raw rows in ``folder``.

    Args:
        health: the health check of all endpoints of the hostfile; ready ones get load.
        workload: a job's bodies or a recorded load, in place of generated prompts.
        notify: takes messages for people.
    """

    def __init__(
        self,
        plan: BenchPlan,
        health: Sequence[HealthResult],
        folder: Path,
        workload: Workload,
        notify: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._targets = [
            BenchTarget(
                portable(result.endpoint),
                result.model,
                result.capabilities.engine if result.capabilities else None,
            )
            for result in health
            if result.ready
        ]
        self._folder = folder
        self._workload = workload
        self._notify = notify
        self._origin = time.monotonic()
        self._workers: Workers | None = None
        self._transport = Transport()
        self._summaries = _SummaryReader(folder)
        self.record = LoadTestRecord(secrets.token_hex(4), unix(), {}, [])

    def now(self) -> float:
        """Return the seconds since the test's start."""
        return time.monotonic() - self._origin

    def stop(self) -> None:
        """End the running stage and send no further one; rows so far stay."""
        self.record.stopped = True
        if self._workers is not None:
            self._workers.stop()

    async def run(self) -> LoadTestRecord:
        """Calibrate, warm up and send all stages."""
        stage_file = RowFile(self._folder / "stages.jsonl")
        server_file = RowFile(self._folder / "servers.jsonl")
        try:
            if not self._workload.job:
                await self._calibrate()
            config = self._config()
            workers: InProcessWorkers | ProcessWorkers
            workers = (
                ProcessWorkers(config)
                if config.workers > 1
                else InProcessWorkers(config, self._transport)
            )
            watch = ServerWatch(self._targets, self._transport, server_file, self.now)
            async with workers:
                self._workers = workers
                await self._send_all(workers, watch, stage_file)
        finally:
            stage_file.close()
            server_file.close()
            await self._transport.close()
        return self.record

    async def _calibrate(self) -> None:
        plan = self._plan
        chat = any(way in ("chat", "chat-batch") for way in plan.ways)
        sizes = PromptSizes(plan.input_tokens, plan.prefix_tokens, chat)
        lengths_by_model = await calibrate(self._transport, self._targets, sizes, self.record.salt)
        self.record.lengths = lengths_by_model
        for model, lengths in lengths_by_model.items():
            tokens = "?" if lengths.tokens is None else lengths.tokens
            count = counted(lengths.own + lengths.prefix, "word")
            self._notify(
                f"prompts for {model or 'the model'}: {count}, "
                f"{tokens} tokens by {lengths.measured}"
            )

    def _config(self) -> LoadConfig:
        plan = self._plan
        groups = plan.groups or GROUPS_PER_ENDPOINT * len(self._targets)
        return LoadConfig(
            targets=self._targets,
            lengths=self.record.lengths,
            answer=AnswerPlan(plan.output_tokens, plan.as_json),
            timeouts=plan.timeouts,
            salt=self.record.salt,
            origin=self._origin,
            folder=str(self._folder),
            list_size=plan.list_size,
            groups=groups if plan.prefix_tokens else 0,
            skew=plan.skew,
            turn_tokens=plan.turn_tokens,
            trace=self._workload.trace,
            job=self._workload.job,
            workers=plan.workers,
        )

    async def _send_all(self, workers: Workers, watch: ServerWatch, file: RowFile) -> None:
        plan = self._plan
        if plan.warmup and self._targets:
            for way in plan.ways:
                stage = LoadStage(
                    number=WARMUP, load="warm-up", way=way, requests=plan.warmup, warmup=True
                )
                self._notify(f"warm-up: {counted(plan.warmup, 'request')} to each endpoint")
                if self.record.stopped:
                    return
                await workers.run(stage)

        async def send(stage: LoadStage) -> tuple[LoadStageRow, list[RequestSummary]]:
            row = await self._stage(workers, watch, stage)
            file.write(row)
            file.flush()
            return row, self._summaries.rows_of(stage.number) if plan.sweep else []

        names = [target.endpoint.name for target in self._targets]
        seconds = expected_seconds(plan, len(names))
        if names and seconds is not None and not self.record.stopped:
            self._notify(f"load on {counted(len(names), 'endpoint')} for {duration(seconds)}")
        if plan.sweep:
            async for _, saturation in sweep(plan, len(names), send):
                self.record.saturation = saturation
                if self.record.stopped:
                    return
            return
        for stage in plan_stages(plan, names):
            if self.record.stopped or not names:
                return
            await send(stage)

    async def _stage(self, workers: Workers, watch: ServerWatch, stage: LoadStage) -> LoadStageRow:
        name = stage.load + (f" {stage.only}" if stage.only else "")
        if self._plan.repeats > 1:
            name += f" (repeat {stage.repeat + 1} of {self._plan.repeats})"
        await watch.read_all(stage.number)
        read_task = asyncio.ensure_future(watch.watch(stage.number))
        progress_task = asyncio.ensure_future(self._progress(workers, name, stage))
        try:
            shares = await workers.run(stage)
        finally:
            for task in (read_task, progress_task):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await watch.read_all(stage.number)
        size = self._plan.list_size if stage.way in ("list", "chat-batch") else 1
        row = stage_row(stage, shares, len(self._targets), size, cut=self.record.stopped)
        self.record.stages.append(row)
        self._notify(f"{name}: {_progress_text(shares, row.ended - row.began)}")
        return row

    async def _progress(self, workers: Workers, name: str, stage: LoadStage) -> None:
        began = self.now()
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            elapsed = self.now() - began
            limit = f" of {duration(stage.seconds)}" if stage.seconds is not None else ""
            self._notify(
                f"{name} [{duration(elapsed)}{limit}]: {_progress_text(workers.shares, elapsed)}"
            )


def _progress_text(shares: Sequence[WorkerShare], seconds: float) -> str:
    sent, done = sum(share.sent for share in shares), sum(share.done for share in shares)
    failed = sum(share.failed for share in shares)
    counts = f"{done:,} done, {failed:,} failed, {sent - done - failed:,} open"
    return f"{counts}, {rate(done / seconds if seconds > 0 else 0.0)} requests/s"


def stage_row(
    stage: LoadStage,
    shares: Sequence[WorkerShare],
    endpoints: int,
    size: int = 1,
    *,
    cut: bool = False,
) -> LoadStageRow:
    """Return the row of a stage from its workers' shares; ``size`` calls travel in each request."""
    began = min(share.began for share in shares)
    feeding_ended = max(share.feeding_ended for share in shares)
    ended = max(share.ended for share in shares)
    active = 1 if stage.only else endpoints
    in_flight = (stage.concurrency or 0) * active * stage.turns / size
    rounds = sum(share.sent for share in shares) / in_flight if in_flight else math.inf
    window_from, window_to = steady_window(stage, began, feeding_ended, ended, rounds)
    return LoadStageRow(
        stage=stage.number,
        load=stage.load,
        repeat=stage.repeat,
        way=stage.way,
        routing=stage.routing,
        endpoints=active,
        began=began,
        feeding_ended=feeding_ended,
        ended=ended,
        window_from=window_from,
        window_to=window_to,
        only=stage.only,
        concurrency=stage.concurrency,
        rate=stage.rate
        if stage.rate_to is None or stage.rate is None
        else (stage.rate + stage.rate_to) / 2,
        arrival=stage.arrival if stage.rate is not None else None,
        cut=cut,
    )


class _SummaryReader:
    """Reads the new lines of the raw rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._decode = msgspec.json.Decoder(RequestSummary).decode

    def rows_of(self, stage: int) -> list[RequestSummary]:
        """Return the new rows of ``stage``."""
        new_rows: list[RequestSummary] = []
        for path in sorted(self._folder.glob("requests-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(complete)
            rows = (self._decode(line) for line in complete.split(b"\n") if line)
            new_rows += [row for row in rows if row.stage == stage]
        return new_rows


CALL_SECONDS = 30.0
"""Time for the first answer of an endpoint."""

MAX_CHECKS_AT_ONCE = 2048
SUMMARY, PAGE, ENDPOINTS, LOADS = "summary.json", "report.html", "endpoints.csv", "loads.csv"
_MAX_GROUPS = 5


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The load test to run and the folder of its results."""

    plan: BenchPlan
    endpoints: Sequence[Endpoint]
    folder: Path
    model: str | None = None
    """Only endpoints that serve it get load; None is any."""
    servers: Servers | None = None
    """The server of ``--backend``, in place of a fleet."""
    trace: list[Recorded] = []
    """The recorded load that the plan replays."""
    command: str = ""
    """The command line, for the summary."""


def free_folder_option(folder: Path) -> str:
    """Return the option that names a folder beside this one that is not there yet."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    free = next(path for path in names if not path.exists())
    return f"-o {shlex.quote(str(free))}"


def make_folder(folder: Path) -> None:
    """Make the folder for the results.

    Raises:
        UsageError: it is a file or holds another load test.
        WriteError: it cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder}: this is a file", hint="name a folder")
    if folder.is_dir() and any(folder.glob("*.jsonl")):
        raise UsageError(
            f"{folder} holds another load test", hint=f"name another: {free_folder_option(folder)}"
        )
    try:
        make_private_folder(folder)
    except OSError as error:
        raise WriteError(f"cannot make {folder}: {error.strerror or error}") from None


def send_all(
    request: BenchRequest, job: RunContext | None, notify: Callable[[str], None]
) -> tuple[list[HealthResult], LoadTestRecord]:
    """Check the endpoints and send the load to those that are ready.

    The first Ctrl-C or SIGTERM ends the load and keeps what was measured so far. A second Ctrl-C is
    a KeyboardInterrupt.

    Raises:
        StoppedEarly: a signal came before anything was sent.
    """
    try:
        with asyncio.Runner(loop_factory=ResolverLoop) as runner:
            return runner.run(_send_all(request, job, notify))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _send_all(
    request: BenchRequest, job: RunContext | None, notify: Callable[[str], None]
) -> tuple[list[HealthResult], LoadTestRecord]:
    stop_switch = LoadTestStop(notify)
    try:
        health = await stop_switch.run_or_stop(_check_health(request, notify))
        if job is None and not request.trace:
            _check_context(request.plan, health, notify)
        bodies: list[JobBody] = []
        if job is not None and any(result.ready for result in health):
            from bagent.bench.workload import make_job_bodies

            bodies = await asyncio.to_thread(make_job_bodies, job, health)
            notify(f"{len(bodies)} rows of the job are sent in turn")
        workload = Workload(bodies, _fitting_context(request.trace, health, notify))
        session = LoadTestSession(request.plan, health, request.folder, workload, notify)
        stop_switch.session = session
        if stop_switch.stopped:
            session.stop()
        return health, await session.run()
    finally:
        stop_switch.close()


def _check_context(
    plan: BenchPlan, health: Sequence[HealthResult], notify: Callable[[str], None]
) -> None:
    """Refuse a load that no ready endpoint could answer, and report where some cannot.

    Raises:
        UsageError: prompts and answers fit no context.
    """
    answer = AnswerPlan(plan.output_tokens, plan.as_json).max_tokens
    required = plan.input_tokens + answer + (plan.turns - 1) * (plan.turn_tokens + answer)
    ready = [result for result in health if result.ready]
    contexts = [result.capabilities.context if result.capabilities else None for result in ready]
    short = [length for length in contexts if length and length < required]
    if not short:
        return
    message = f"prompts and answers of {required:,} tokens do not fit"
    if len(short) == len(ready):
        raise UsageError(
            f"{message} {max(short):,} tokens of context",
            hint="less --input-tokens, --output-tokens or --turns",
        )
    notify(f"{message} the context of {counted(len(short), 'endpoint')}: all requests fail there")


def _fitting_context(
    trace: Sequence[Recorded], health: Sequence[HealthResult], notify: Callable[[str], None]
) -> list[Recorded]:
    """Return the recorded requests that fit the shortest context of the ready endpoints."""
    contexts = [
        result.capabilities.context for result in health if result.ready and result.capabilities
    ]
    context = min((length for length in contexts if length), default=None)
    if context is None:
        return list(trace)
    fitting = [row for row in trace if row.input_tokens + row.output_tokens <= context]
    if len(fitting) < len(trace):
        if not fitting:
            raise UsageError(
                f"--replay: no recorded request fits {context:,} tokens of context",
                hint="use a model with a longer context, or another recording",
            )
        counts = f"{len(trace) - len(fitting)} of {len(trace)} recorded requests"
        notify(f"{counts} are left out: they do not fit {context} tokens of context")
    return fitting


class LoadTestStop:
    """Ends a load test early at the first signal, and at once at the second Ctrl-C."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._notify = notify
        self._task = asyncio.current_task()
        self._requested = asyncio.Event()
        self.session: LoadTestSession | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)

    @property
    def stopped(self) -> bool:
        """Return whether a signal came."""
        return self._requested.is_set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.stopped and number == signal.SIGINT and self._task is not None:
            self._task.cancel()
            return
        self._requested.set()
        if self.session is not None:
            self._notify(
                f"got {number.name}: no further requests; the report is made of what there is"
            )
            self.session.stop()

    async def run_or_stop(self, check: Any) -> list[HealthResult]:
        """Return the result of the health check, unless a signal comes first."""
        work = asyncio.ensure_future(check)
        stop = asyncio.ensure_future(self._requested.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait([work])
            raise StoppedEarly(
                "stopped by a signal before any load was sent", hint="give the same command again"
            )
        health: list[HealthResult] = work.result()
        return health

    def close(self) -> None:
        """Restore the signal handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


async def _check_health(request: BenchRequest, notify: Callable[[str], None]) -> list[HealthResult]:
    if request.servers is not None:
        from bagent.servers.resolve import check_server

        health = [await check_server(request.servers, request.model, CALL_SECONDS)]
    else:
        health = await _check_fleet(request, notify)
    notify(format_counts(health))
    for group in group_failures(health)[:_MAX_GROUPS]:
        notify(f"  {group.message()}")
    return health


async def _check_fleet(request: BenchRequest, notify: Callable[[str], None]) -> list[HealthResult]:
    count = len(request.endpoints)
    calls = max(request.plan.concurrency, default=64) * count
    allowed = raise_file_limit(max(2 * count, calls))
    if allowed < calls:
        notify(
            f"this machine allows {allowed} open connections, fewer than {calls} calls in flight"
        )
    plan = HealthCheckPlan(CALL_SECONDS, min(MAX_CHECKS_AT_ONCE, count), count, request.model)
    transport = Transport()
    try:
        return await FleetHealthCheck(request.endpoints, plan, transport).run()
    finally:
        await transport.close()


def write_results(
    request: BenchRequest,
    health: Sequence[HealthResult],
    record: LoadTestRecord,
    make_page: Callable[[dict[str, Any], list[dict[str, Any]]], str],
) -> dict[str, Any]:
    """Make all results from the raw rows in the folder; returns the summary.

    Args:
        make_page: makes the HTML page of the summary and the heat map.

    Raises:
        WriteError: the disk is full, or the folder cannot be written.
    """
    from bagent.bench import metrics
    from bagent.bench.records import BenchTables, write_csv
    from bagent.bench.summary import summarise

    folder = request.folder
    with BenchTables(folder) as tables:
        summary = summarise(tables, request.plan, record, health, request.command)
        heatmap = metrics.heatmap(tables)
        tables.write_parquet()
    write_csv(folder / ENDPOINTS, [_flat(row) for row in summary["endpoints"]])
    loads = summary["loads"]
    columns = dict.fromkeys(name for row in loads for name in row)
    write_csv(folder / LOADS, [_flat({**dict.fromkeys(columns), **row}) for row in loads])
    try:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=1)
        (folder / SUMMARY).write_bytes(text + b"\n")
        (folder / PAGE).write_text(make_page(summary, heatmap), encoding="utf-8")
    except OSError as error:
        raise WriteError(f"cannot write to {folder}: {error.strerror or error}") from None
    return summary


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its lists and objects as JSON text."""
    return {
        key: msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value
        for key, value in row.items()
    }
