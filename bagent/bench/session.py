"""One load test from the endpoints that answer to the raw rows of all stages."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bagent.backends.transport import Transport
from bagent.bench.calibrate import Wanted, calibrate
from bagent.bench.config import LoadConfig, Material, Target, portable
from bagent.bench.crew import Crew, LocalCrew, ProcessCrew
from bagent.bench.load import Part
from bagent.bench.plan import BenchPlan, expected_seconds, stages
from bagent.bench.prompts import AnswerPlan, Lengths
from bagent.bench.records import RowFile, StageRow
from bagent.bench.servers import ServerWatch
from bagent.bench.shape import StageSpec, window
from bagent.bench.sweep import Light, Saturation, sweep
from bagent.clocks import unix
from bagent.fleet.called import Called
from bagent.observe.words import counted, duration, rate

TELL_SECONDS = 5.0
"""Between two words about a stage that goes on."""

GROUPS_AN_ENDPOINT = 4
WARMUP = -1
"""The number of the stage that warms up."""


class Course(msgspec.Struct):
    """How a test went, beside its raw rows. Times as in :mod:`bagent.bench.records`."""

    salt: str
    started_at: float
    lengths: dict[str, Lengths]
    stages: list[StageRow]
    stopped: bool = False
    saturation: Saturation | None = None


class Session:
    """Runs a test and leaves raw rows in ``folder``.

    Args:
        called: all endpoints of the hostfile as a roll call found them; ready ones get load.
        material: a job's bodies, or a recorded load, to send in place of made prompts.
        tell: takes words for people.
    """

    def __init__(
        self,
        plan: BenchPlan,
        called: Sequence[Called],
        folder: Path,
        material: Material,
        tell: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._targets = [
            Target(portable(one.endpoint), one.model, one.known.engine if one.known else None)
            for one in called
            if one.ready
        ]
        self._folder = folder
        self._material = material
        self._tell = tell
        self._origin = time.monotonic()
        self._crew: Crew | None = None
        self._transport = Transport()
        self._light = _LightReader(folder)
        self.course = Course(secrets.token_hex(4), unix(), {}, [])

    def now(self) -> float:
        """Seconds since the test's start."""
        return time.monotonic() - self._origin

    def stop(self) -> None:
        """End the running stage, send no further one; rows so far are kept."""
        self.course.stopped = True
        if self._crew is not None:
            self._crew.stop()

    async def run(self) -> Course:
        """Calibrate, warm up, send all stages."""
        stage_file = RowFile(self._folder / "stages.jsonl")
        server_file = RowFile(self._folder / "servers.jsonl")
        try:
            if not self._material.job:
                await self._calibrate()
            config = self._config()
            crew: LocalCrew | ProcessCrew
            crew = ProcessCrew(config) if config.workers > 1 else LocalCrew(config, self._transport)
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
        wanted = Wanted(plan.input_tokens, plan.prefix_tokens, chat)
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

    async def _send_all(self, crew: Crew, watch: ServerWatch, file: RowFile) -> None:
        plan = self._plan
        if plan.warmup and self._targets:
            for way in plan.ways:
                spec = StageSpec(
                    number=WARMUP, load="warm-up", way=way, requests=plan.warmup, warmup=True
                )
                self._tell(f"warm-up: {counted(plan.warmup, 'request')} to each endpoint")
                if self.course.stopped:
                    return
                await crew.run(spec)

        async def send(spec: StageSpec) -> tuple[StageRow, list[Light]]:
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

    async def _stage(self, crew: Crew, watch: ServerWatch, spec: StageSpec) -> StageRow:
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

    async def _progress(self, crew: Crew, name: str, spec: StageSpec) -> None:
        began = self.now()
        while True:
            await asyncio.sleep(TELL_SECONDS)
            gone = self.now() - began
            of = f" of {duration(spec.seconds)}" if spec.seconds is not None else ""
            self._tell(f"{name} [{duration(gone)}{of}]: {_went(crew.parts, gone)}")


def _went(parts: Sequence[Part], seconds: float) -> str:
    sent, done = sum(part.sent for part in parts), sum(part.done for part in parts)
    failed = sum(part.failed for part in parts)
    words = f"{done:,} done, {failed:,} failed, {sent - done - failed:,} open"
    return f"{words}, {rate(done / seconds if seconds > 0 else 0.0)} requests/s"


def stage_row(
    spec: StageSpec, parts: Sequence[Part], endpoints: int, size: int = 1, *, cut: bool = False
) -> StageRow:
    """How a stage went, from how its parts did; ``size`` calls travel in each request."""
    began = min(part.began for part in parts)
    fed = max(part.feeding_ended for part in parts)
    ended = max(part.ended for part in parts)
    taking = 1 if spec.only else endpoints
    in_flight = (spec.concurrency or 0) * taking * spec.turns / size
    rounds = sum(part.sent for part in parts) / in_flight if in_flight else math.inf
    low, high = window(spec, began, fed, ended, rounds)
    return StageRow(
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
        self._decode = msgspec.json.Decoder(Light).decode

    def rows_of(self, stage: int) -> list[Light]:
        """The new rows that belong to ``stage``."""
        found: list[Light] = []
        for path in sorted(self._folder.glob("requests-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            rows = (self._decode(line) for line in whole.split(b"\n") if line)
            found += [row for row in rows if row.stage == stage]
        return found
