"""A whole load test: hostfile in, raw rows, summary and report out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.backends.engines.probe import CompletionProbe
from bagent.backends.http.client import Transport
from bagent.backends.http.resolver import ResolverLoop
from bagent.backends.openai.backend import OpenAIBackend
from bagent.bench.client import PromptSizes, calibrate
from bagent.bench.load_generator import WorkerShare
from bagent.bench.monitors import ServerWatch
from bagent.bench.plan import (
    BenchPlan,
    BenchTarget,
    LoadConfig,
    Workload,
    expected_seconds,
    portable,
    stages,
)
from bagent.bench.prompts import AnswerPlan, Lengths
from bagent.bench.records import LoadStageRow, RowFile
from bagent.bench.schedule import LoadStage, Recorded, window
from bagent.bench.sweep import RequestSummary, Saturation, sweep
from bagent.bench.workers import InProcessWorkers, ProcessWorkers, Workers
from bagent.clocks import unix
from bagent.errors import StoppedEarly, UsageError, WriteError
from bagent.files import make_private
from bagent.fleet.health_check import (
    FleetHealthCheck,
    HealthCheckPlan,
    HealthResult,
    counts,
    grouped,
)
from bagent.observe.formatting import counted, duration, rate
from bagent.runs.shutdown import raise_file_limit
from bagent.servers.resolve import Servers

if TYPE_CHECKING:
    from bagent.backends.endpoint import Endpoint
    from bagent.bench.plan import JobBody
    from bagent.runs.context import RunContext

TELL_SECONDS = 5.0
"""Between two words about a stage that goes on."""

GROUPS_AN_ENDPOINT = 4
WARMUP = -1
"""The number of the stage that warms up."""


class TestRecord(msgspec.Struct):
    """How a test went, beside its raw rows. Times as in :mod:`bagent.bench.records`."""

    salt: str
    started_at: float
    lengths: dict[str, Lengths]
    stages: list[LoadStageRow]
    stopped: bool = False
    saturation: Saturation | None = None


class LoadTestSession:
    """Runs a test and leaves raw rows in ``folder``.

    Args:
        called: all endpoints of the hostfile as a roll call found them; ready ones get load.
        material: a job's bodies, or a recorded load, to send in place of made prompts.
        tell: takes words for people.
    """

    def __init__(
        self,
        plan: BenchPlan,
        called: Sequence[HealthResult],
        folder: Path,
        material: Workload,
        tell: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._targets = [
            BenchTarget(portable(one.endpoint), one.model, one.known.engine if one.known else None)
            for one in called
            if one.ready
        ]
        self._folder = folder
        self._material = material
        self._tell = tell
        self._origin = time.monotonic()
        self._crew: Workers | None = None
        self._transport = Transport()
        self._light = _LightReader(folder)
        self.course = TestRecord(secrets.token_hex(4), unix(), {}, [])

    def now(self) -> float:
        """Seconds since the test's start."""
        return time.monotonic() - self._origin

    def stop(self) -> None:
        """End the running stage, send no further one; rows so far are kept."""
        self.course.stopped = True
        if self._crew is not None:
            self._crew.stop()

    async def run(self) -> TestRecord:
        """Calibrate, warm up, send all stages."""
        stage_file = RowFile(self._folder / "stages.jsonl")
        server_file = RowFile(self._folder / "servers.jsonl")
        try:
            if not self._material.job:
                await self._calibrate()
            config = self._config()
            crew: InProcessWorkers | ProcessWorkers
            crew = (
                ProcessWorkers(config)
                if config.workers > 1
                else InProcessWorkers(config, self._transport)
            )
            watch = ServerWatch(self._targets, self._transport, server_file, self.now)
            async with crew:
                self._crew = crew
                await self._send_all(crew, watch, stage_file)
        finally:
            stage_file.close()
            server_file.close()
            await self._transport.close()
        return self.course

    async def _calibrate(self) -> None:
        plan = self._plan
        chat = any(way in ("chat", "chat-batch") for way in plan.ways)
        wanted = PromptSizes(plan.input_tokens, plan.prefix_tokens, chat)
        found = await calibrate(self._transport, self._targets, wanted, self.course.salt)
        self.course.lengths = found
        for model, lengths in found.items():
            told = "?" if lengths.tokens is None else lengths.tokens
            words = counted(lengths.own + lengths.prefix, "word")
            self._tell(
                f"prompts for {model or 'the model'}: {words}, {told} tokens by {lengths.measured}"
            )

    def _config(self) -> LoadConfig:
        plan = self._plan
        groups = (plan.groups or GROUPS_AN_ENDPOINT * len(self._targets)) * bool(plan.prefix_tokens)
        return LoadConfig(
            targets=self._targets,
            lengths=self.course.lengths,
            answer=AnswerPlan(plan.output_tokens, plan.as_json),
            timeouts=plan.timeouts,
            salt=self.course.salt,
            origin=self._origin,
            folder=str(self._folder),
            list_size=plan.list_size,
            groups=groups,
            skew=plan.skew,
            turn_tokens=plan.turn_tokens,
            trace=self._material.trace,
            job=self._material.job,
            workers=plan.workers,
        )

    async def _send_all(self, crew: Workers, watch: ServerWatch, file: RowFile) -> None:
        plan = self._plan
        if plan.warmup and self._targets:
            for way in plan.ways:
                spec = LoadStage(
                    number=WARMUP, load="warm-up", way=way, requests=plan.warmup, warmup=True
                )
                self._tell(f"warm-up: {counted(plan.warmup, 'request')} to each endpoint")
                if self.course.stopped:
                    return
                await crew.run(spec)

        async def send(spec: LoadStage) -> tuple[LoadStageRow, list[RequestSummary]]:
            row = await self._stage(crew, watch, spec)
            file.write(row)
            file.flush()
            return row, self._light.rows_of(spec.number) if plan.sweep else []

        names = [target.endpoint.name for target in self._targets]
        seconds = expected_seconds(plan, len(names))
        if names and seconds is not None and not self.course.stopped:
            self._tell(f"load on {counted(len(names), 'endpoint')} for {duration(seconds)}")
        if plan.sweep:
            async for _, found in sweep(plan, len(names), send):
                self.course.saturation = found
                if self.course.stopped:
                    return
            return
        for spec in stages(plan, names):
            if self.course.stopped or not names:
                return
            await send(spec)

    async def _stage(self, crew: Workers, watch: ServerWatch, spec: LoadStage) -> LoadStageRow:
        name = spec.load + (f" {spec.only}" if spec.only else "")
        if self._plan.repeats > 1:
            name += f" (repeat {spec.repeat + 1} of {self._plan.repeats})"
        await watch.read_all(spec.number)
        reading = asyncio.ensure_future(watch.watch(spec.number))
        telling = asyncio.ensure_future(self._progress(crew, name, spec))
        try:
            parts = await crew.run(spec)
        finally:
            for task in (reading, telling):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await watch.read_all(spec.number)
        size = self._plan.list_size if spec.way in ("list", "chat-batch") else 1
        row = stage_row(spec, parts, len(self._targets), size, cut=self.course.stopped)
        self.course.stages.append(row)
        self._tell(f"{name}: {_went(parts, row.ended - row.began)}")
        return row

    async def _progress(self, crew: Workers, name: str, spec: LoadStage) -> None:
        began = self.now()
        while True:
            await asyncio.sleep(TELL_SECONDS)
            gone = self.now() - began
            of = f" of {duration(spec.seconds)}" if spec.seconds is not None else ""
            self._tell(f"{name} [{duration(gone)}{of}]: {_went(crew.parts, gone)}")


def _went(parts: Sequence[WorkerShare], seconds: float) -> str:
    sent, done = sum(part.sent for part in parts), sum(part.done for part in parts)
    failed = sum(part.failed for part in parts)
    words = f"{done:,} done, {failed:,} failed, {sent - done - failed:,} open"
    return f"{words}, {rate(done / seconds if seconds > 0 else 0.0)} requests/s"


def stage_row(
    spec: LoadStage,
    parts: Sequence[WorkerShare],
    endpoints: int,
    size: int = 1,
    *,
    cut: bool = False,
) -> LoadStageRow:
    """How a stage went, from how its parts did; ``size`` calls travel in each request."""
    began = min(part.began for part in parts)
    fed = max(part.feeding_ended for part in parts)
    ended = max(part.ended for part in parts)
    taking = 1 if spec.only else endpoints
    in_flight = (spec.concurrency or 0) * taking * spec.turns / size
    rounds = sum(part.sent for part in parts) / in_flight if in_flight else math.inf
    low, high = window(spec, began, fed, ended, rounds)
    return LoadStageRow(
        stage=spec.number,
        load=spec.load,
        repeat=spec.repeat,
        way=spec.way,
        routing=spec.routing,
        endpoints=taking,
        began=began,
        feeding_ended=fed,
        ended=ended,
        window_from=low,
        window_to=high,
        only=spec.only,
        concurrency=spec.concurrency,
        rate=spec.rate
        if spec.rate_to is None or spec.rate is None
        else (spec.rate + spec.rate_to) / 2,
        arrival=spec.arrival if spec.rate is not None else None,
        cut=cut,
    )


class _LightReader:
    """Reads what is new in the files of raw rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._decode = msgspec.json.Decoder(RequestSummary).decode

    def rows_of(self, stage: int) -> list[RequestSummary]:
        """The new rows that belong to ``stage``."""
        found: list[RequestSummary] = []
        for path in sorted(self._folder.glob("requests-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            rows = (self._decode(line) for line in whole.split(b"\n") if line)
            found += [row for row in rows if row.stage == stage]
        return found


CALL_SECONDS = 30.0
"""How long endpoints have to answer a first request."""

MOST_AT_ONCE = 2048
SUMMARY, PAGE, ENDPOINTS, LOADS = "summary.json", "report.html", "endpoints.csv", "loads.csv"
_TOLD = 5


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be tested, and where the results go."""

    plan: BenchPlan
    endpoints: Sequence[Endpoint]
    folder: Path
    model: str | None = None
    """Only endpoints that serve it get load; None is any."""
    servers: Servers | None = None
    """The server that ``--backend`` names, in place of a fleet; else None."""
    trace: list[Recorded] = []
    """The recorded load that the plan replays."""
    command: str = ""
    """The command line, for the summary."""


def make_folder(folder: Path) -> None:
    """Make the folder for the results.

    Raises:
        UsageError: it holds another load test, or is a file.
        WriteError: it cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder}: this is a file", hint="name a folder")
    if folder.is_dir() and any(folder.glob("*.jsonl")):
        raise UsageError(f"{folder} holds another load test", hint="name another with -o DIR")
    try:
        make_private(folder)
    except OSError as error:
        raise WriteError(f"cannot make {folder}: {error.strerror or error}") from None


def send_all(
    wanted: BenchRequest, job: RunContext | None, tell: Callable[[str], None]
) -> tuple[list[HealthResult], TestRecord]:
    """Call the endpoints and send the load to those that are ready.

    The first Ctrl-C, or SIGTERM, ends the load; what was measured by then is kept. A second
    Ctrl-C is a KeyboardInterrupt.

    Raises:
        StoppedEarly: a signal came before anything was sent.
    """
    try:
        with asyncio.Runner(loop_factory=ResolverLoop) as runner:
            return runner.run(_send_all(wanted, job, tell))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _send_all(
    wanted: BenchRequest, job: RunContext | None, tell: Callable[[str], None]
) -> tuple[list[HealthResult], TestRecord]:
    switch = LoadTestStop(tell)
    try:
        called = await switch.or_stop(_call(wanted, tell))
        if job is None and not wanted.trace:
            _check_context(wanted.plan, called, tell)
        bodies: list[JobBody] = []
        if job is not None and any(one.ready for one in called):
            from bagent.bench.workload import job_bodies

            bodies = await asyncio.to_thread(job_bodies, job, called)
            tell(f"{len(bodies)} rows of the job are sent in turn")
        material = Workload(bodies, _fitting(wanted.trace, called, tell))
        session = LoadTestSession(wanted.plan, called, wanted.folder, material, tell)
        switch.session = session
        if switch.stopped:
            session.stop()
        return called, await session.run()
    finally:
        switch.close()


def _check_context(
    plan: BenchPlan, called: Sequence[HealthResult], tell: Callable[[str], None]
) -> None:
    """Refuse a load of which no ready endpoint could answer anything, and say where it is some.

    Raises:
        UsageError: prompts and answers fit no context.
    """
    answer = AnswerPlan(plan.output_tokens, plan.as_json).most
    asked = plan.input_tokens + answer + (plan.turns - 1) * (plan.turn_tokens + answer)
    ready = [one for one in called if one.ready]
    contexts = [one.known.context if one.known else None for one in ready]
    short = [length for length in contexts if length and length < asked]
    if not short:
        return
    words = f"prompts and answers of {asked:,} tokens do not fit"
    if len(short) == len(ready):
        raise UsageError(
            f"{words} {max(short):,} tokens of context",
            hint="less --input-tokens, --output-tokens or --turns",
        )
    tell(f"{words} the context of {counted(len(short), 'endpoint')}: all requests fail there")


def _fitting(
    trace: Sequence[Recorded], called: Sequence[HealthResult], tell: Callable[[str], None]
) -> list[Recorded]:
    """The recorded requests that the shortest context of the ready endpoints holds."""
    known = [one.known.context for one in called if one.ready and one.known]
    context = min((length for length in known if length), default=None)
    if context is None:
        return list(trace)
    found = [one for one in trace if one.input_tokens + one.output_tokens <= context]
    if len(found) < len(trace):
        if not found:
            raise UsageError(f"--replay: no recorded request fits {context:,} tokens of context")
        words = f"{len(trace) - len(found)} of {len(trace)} recorded requests"
        tell(f"{words} are left out: they do not fit {context} tokens of context")
    return found


class LoadTestStop:
    """Ends a load test early at the first signal, and at once at the second Ctrl-C."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tell = tell
        self._task = asyncio.current_task()
        self._asked = asyncio.Event()
        self.session: LoadTestSession | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._signalled, number)

    @property
    def stopped(self) -> bool:
        """Whether a signal came."""
        return self._asked.is_set()

    def _signalled(self, number: signal.Signals) -> None:
        if self.stopped and number == signal.SIGINT and self._task is not None:
            self._task.cancel()
            return
        self._asked.set()
        if self.session is not None:
            self._tell(
                f"got {number.name}: no further requests; the report is made of what there is"
            )
            self.session.stop()

    async def or_stop(self, calling: Any) -> list[HealthResult]:
        """The endpoints as they were found, unless a signal comes first."""
        work = asyncio.ensure_future(calling)
        stop = asyncio.ensure_future(self._asked.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait([work])
            raise StoppedEarly("stopped by a signal before any load was sent")
        found: list[HealthResult] = work.result()
        return found

    def close(self) -> None:
        """Give the signals back."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)


async def _call(wanted: BenchRequest, tell: Callable[[str], None]) -> list[HealthResult]:
    if wanted.servers is not None:
        from bagent.servers.resolve import check_server

        called = [await check_server(wanted.servers, wanted.model, CALL_SECONDS)]
    else:
        called = await _call_fleet(wanted, tell)
    tell(counts(called))
    for group in grouped(called)[:_TOLD]:
        tell(f"  {group.words()}")
    return called


async def _call_fleet(wanted: BenchRequest, tell: Callable[[str], None]) -> list[HealthResult]:
    count = len(wanted.endpoints)
    calls = max(wanted.plan.concurrency, default=64) * count
    room = raise_file_limit(max(2 * count, calls))
    if room < calls:
        tell(f"this machine allows {room} open connections, fewer than {calls} calls in flight")
    plan = HealthCheckPlan(CALL_SECONDS, min(MOST_AT_ONCE, count), count, wanted.model)
    transport = Transport()
    try:
        backend = OpenAIBackend(transport)
        return await FleetHealthCheck(
            wanted.endpoints, plan, transport, CompletionProbe(backend)
        ).run()
    finally:
        await transport.close()


def write_results(
    wanted: BenchRequest,
    called: Sequence[HealthResult],
    course: TestRecord,
    make_page: Callable[[dict[str, Any], list[dict[str, Any]]], str],
) -> dict[str, Any]:
    """Make all results from the raw rows in the folder; returns the summary.

    Args:
        make_page: makes the HTML page of the summary and the heat map.

    Raises:
        WriteError: the disk is full, or the folder cannot be written.
    """
    from bagent.bench import metrics as measure
    from bagent.bench.summary import summarise
    from bagent.bench.tables import BenchTables, write_csv

    folder = wanted.folder
    with BenchTables(folder) as tables:
        summary = summarise(tables, wanted.plan, course, called, wanted.command)
        heat = measure.heatmap(tables)
        tables.write_parquet()
    write_csv(folder / ENDPOINTS, [_flat(one) for one in summary["endpoints"]])
    loads = summary["loads"]
    columns = dict.fromkeys(name for one in loads for name in one)
    write_csv(folder / LOADS, [_flat({**dict.fromkeys(columns), **one}) for one in loads])
    try:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=1)
        (folder / SUMMARY).write_bytes(text + b"\n")
        (folder / PAGE).write_text(make_page(summary, heat), encoding="utf-8")
    except OSError as error:
        raise WriteError(f"cannot write to {folder}: {error.strerror or error}") from None
    return summary


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose lists and objects are JSON texts."""
    return {
        key: msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value
        for key, value in row.items()
    }
