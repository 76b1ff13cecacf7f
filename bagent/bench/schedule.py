"""Load shapes: what a stage is, and when each of its requests is to be sent."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from bagent.bench.records import Routing, Way
from bagent.duck import Access, connect, file_literal
from bagent.errors import Position, UsageError
from bagent.store.journal.segments import list_segments
from bagent.store.run_dir import RunDir, find_run

TIMES = ("scheduled", "sent", "started_at", "arrived_at", "arrival_time", "timestamp", "time")
INPUTS = ("prompt_tokens", "input_tokens", "input_length", "contexttokens")
OUTPUTS = ("completion_tokens", "output_tokens", "output_length", "generatedtokens")
"""Names of columns, in the order of preference; capitals do not matter."""

MOST_TOKENS = 1_000_000_000

MILLISECONDS = ("timestamp", "input_length")
"""A trace with these two columns counts its numeric times in milliseconds (Mooncake)."""

_READERS = {
    ".csv": "read_csv({}, all_varchar=true, null_padding=true, ignore_errors=true)",
    ".tsv": "read_csv({}, all_varchar=true, null_padding=true, ignore_errors=true, delim='\t')",
    ".jsonl": "read_json_objects({}, format='newline_delimited', ignore_errors=true)",
    ".json": "read_json({})",
    ".parquet": "read_parquet({})",
}
_RAW = (
    "read_json([{}], format='newline_delimited', ignore_errors=true, columns={{{}}}) "
    "where warmup is null"
)


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """One request: seconds after the first one, tokens of its prompt and of its answer."""

    at: float
    input_tokens: int
    output_tokens: int


class TraceInfo(msgspec.Struct, frozen=True):
    """What is known of a recorded load: how many requests came within so many ``seconds``, and
    their mean lengths. ``left_out`` had no time or no lengths, such as failed ones."""

    source: str
    requests: int
    seconds: float
    input_tokens: float
    output_tokens: float
    left_out: int = 0

    @property
    def rate(self) -> float:
        """Requests a second, in the mean; that of one second where all came at once."""
        return self.requests / (self.seconds or 1.0)


def read_trace(source: Path) -> tuple[list[Recorded], TraceInfo]:
    """The requests of a recorded load in the order of their times.

    Args:
        source: a run's directory or name, the folder of a load test, or a file.

    Raises:
        UsageError: there is none, it cannot be read, or no row has a time and lengths.
    """
    if source.is_file():
        rows = _query(source, [source], _table(source))
    elif any(source.glob("requests-*.jsonl")):
        files = sorted(source.glob("requests-*.jsonl"))
        rows = _query(source, files, _raw(files, "scheduled"))
    else:
        run: RunDir = find_run(source)
        time = "sent"
        segments = list_segments(run.journal, "attempts")
        if not segments:
            time, segments = "started_at", list_segments(run.journal, "rows")
        files = [segment.path for segment in segments]
        rows = _query(source, files, _raw(files, time))
    found, left_out = _recorded(rows)
    if not found:
        raise UsageError(
            "--replay: no row has a time, input tokens and output tokens",
            hint=f"columns such as {TIMES[0]}, {INPUTS[0]}, {OUTPUTS[0]}",
            at=Position(source),
        )
    count = len(found)
    return found, TraceInfo(
        str(source),
        count,
        found[-1].at,
        sum(one.input_tokens for one in found) / count,
        sum(one.output_tokens for one in found) / count,
        left_out,
    )


def _table(file: Path) -> str:
    """The query of a file of any kind."""
    name = file.name.lower().removesuffix(".gz").removesuffix(".zst")
    reader = _READERS.get(Path(name).suffix)
    if reader is None:
        raise UsageError(
            "--replay: of what kind is this file?",
            hint=f"its name ends with {', '.join(_READERS)}",
            at=Position(file),
        )
    return f"select * from {reader.format(file_literal(file))}"


def _raw(files: Sequence[Path], time: str) -> str:
    """The query of raw rows of this program, of which the last may be torn."""
    listed = ", ".join(map(file_literal, files))
    kinds = {time: "DOUBLE", INPUTS[0]: "BIGINT", OUTPUTS[0]: "BIGINT", "warmup": "BOOLEAN"}
    columns = ", ".join(f"{name}: '{kind}'" for name, kind in kinds.items())
    return f"select * from {_RAW.format(listed, columns)}"


def _query(source: Path, files: Sequence[Path], query: str) -> Iterator[dict[str, Any]]:
    """The rows of a query by column name in small letters."""
    import duckdb

    try:
        with connect(Access(files=files), settings={"threads": 1}) as connection:
            cursor = connection.execute(query)
            names = [column[0].lower() for column in cursor.description or ()]
            while rows := cursor.fetchmany(10_000):
                for row in rows:
                    values = dict(zip(names, row, strict=True))
                    yield _line(values["json"]) if names == ["json"] else values
    except (duckdb.Error, OSError) as error:
        (words, *_) = str(error).splitlines()
        raise UsageError(f"--replay: cannot be read: {words}", at=Position(source)) from None


def _line(text: str | None) -> dict[str, Any]:
    """The members of a line's object by name in small letters; of any other line none."""
    try:
        found = msgspec.json.decode(text or "null")
    except msgspec.DecodeError:
        found = None
    return {name.lower(): value for name, value in found.items()} if isinstance(found, dict) else {}


def _recorded(rows: Iterator[Mapping[str, Any]]) -> tuple[list[Recorded], int]:
    """The rows that can be sent again, and how many cannot."""
    found: list[tuple[float, int, int]] = []
    left_out = 0
    for row in rows:
        at = _seconds(_first(row, TIMES))
        sizes = _number(_first(row, INPUTS)), _number(_first(row, OUTPUTS))
        if at is None or sizes[0] < 1 or sizes[1] < 1:
            left_out += 1
            continue
        scale = 1000 if all(name in row for name in MILLISECONDS) else 1
        found.append((at / scale, sizes[0], sizes[1]))
    found.sort()
    began = found[0][0] if found else 0.0
    return [Recorded(at - began, *sizes) for at, *sizes in found], left_out


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _number(value: Any) -> int:
    """A number of tokens; 0 where it is none, or no prompt could be so long."""
    try:
        found = int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 0
    return found if found < MOST_TOKENS else 0


def _seconds(value: Any) -> float | None:
    """A time in seconds: a number as it is, a date and time since 1970."""
    if isinstance(value, datetime):
        return value.timestamp()
    try:
        found = float(value)
        return found if math.isfinite(found) else None
    except (TypeError, ValueError):
        pass
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None


Arrival = Literal["constant", "poisson", "gamma"]
"""How the requests of an open loop come: evenly, at random, or at random with bursts."""


class LoadStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a load test; with ``rate`` an open loop, with ``concurrency`` a closed one."""

    number: int
    """Place in the test, from 0."""
    load: str
    """Name of the load, the same for all its repeats."""
    way: Way = "chat"
    routing: Routing = "balanced"
    repeat: int = 0
    concurrency: int | None = None
    """Calls in flight at each endpoint, all the time."""
    rate: float | None = None
    """Requests a second over the whole fleet, whatever comes back."""
    rate_to: float | None = None
    """The rate at the end of a ramp: it goes there evenly during ``seconds``."""
    speed: float | None = None
    """How many times as fast as recorded a trace is replayed; ``rate`` is its mean then."""
    turns: int = 1
    """Requests of a conversation, each of which holds what was said before."""
    think: float = 0.0
    """Seconds between an answer and the next turn: a tool that takes so long."""
    arrival: Arrival = "poisson"
    burstiness: float = 1.0
    """Shape of ``gamma`` arrivals: 1 is Poisson, less comes in bursts."""
    seconds: float | None = None
    """How long it feeds; None until ``requests`` are sent."""
    requests: int | None = None
    """How many it sends over the whole fleet; None until ``seconds`` are over."""
    drain: float = 30.0
    """Seconds that requests in flight get to end afterwards."""
    only: str | None = None
    """The endpoint that gets all of it; None is all."""
    seed: int = 0
    warmup: bool = False
    """Requests to each endpoint whose rows count nowhere."""


def replayed(
    stage: LoadStage, trace: Sequence[Recorded], part: int = 0, parts: int = 1
) -> Iterator[tuple[int, float]]:
    """The send times of a trace, as :func:`arrivals` gives them."""
    for number, one in enumerate(trace[: stage.requests]):
        at = one.at / (stage.speed or 1.0)
        if stage.seconds is not None and at >= stage.seconds:
            return
        if number % parts == part:
            yield number, at


def arrivals(stage: LoadStage, part: int = 0, parts: int = 1) -> Iterator[tuple[int, float]]:
    """The send times of an open loop: (number, seconds from the stage's start), without end
    unless ``requests`` or ``seconds`` bound them.

    All workers draw the same times from the seed and take every ``parts``-th, so that together
    they are one schedule. Gaps of ``gamma`` arrivals have the mean ``1 / rate`` and the shape
    ``burstiness`` (as in vLLM's ``bench serve``).
    """
    assert stage.rate is not None
    gaps = _gaps(stage)
    at = next(gaps) / stage.rate if stage.arrival != "constant" else 0.0
    for number in itertools.count():
        if stage.requests is not None and number >= stage.requests:
            return
        if stage.seconds is not None and at >= stage.seconds:
            return
        if number % parts == part:
            yield number, at
        at += next(gaps) / _rate_at(stage, stage.rate, at)


def _rate_at(stage: LoadStage, rate: float, at: float) -> float:
    """The rate ``at`` seconds after the start."""
    if stage.rate_to is None or not stage.seconds:
        return rate
    return rate + (stage.rate_to - rate) * min(1.0, at / stage.seconds)


def _gaps(stage: LoadStage) -> Iterator[float]:
    """Gaps between requests at a rate of one a second."""
    if stage.arrival == "constant":
        while True:
            yield 1.0
    rng = random.Random(f"{stage.seed}/arrivals/{stage.load}/{stage.repeat}")
    shape = 1.0 if stage.arrival == "poisson" else stage.burstiness
    while True:
        yield rng.gammavariate(shape, 1 / shape)


FEWEST_ROUNDS = 2.0
_TENTH = 10


def share(count: int, part: int, parts: int) -> int:
    """What worker ``part`` of ``parts`` gets of ``count``; the shares add up to it."""
    return count // parts + (part < count % parts)


def window(
    stage: LoadStage,
    began: float,
    feeding_ended: float,
    last_done: float,
    rounds: float = math.inf,
) -> tuple[float, float]:
    """The steady window of a stage: from and to, on the clock of the arguments.

    It begins after the first tenth of a stage that is bounded by time, and ends when feeding
    does: what is left to drain is no load. Where a number of requests bounds the stage, a closed
    loop counts from its start, as it is full at once; an open one from the request that is a
    tenth on (the very first of fewer than ten): what it sent before has just begun to come back.
    Where feeding took less than half of such a stage (few requests, all sent at once) it is the
    whole stage, and so it is where a closed loop had so slow endpoints that it sent less than two
    ``rounds``, each of as many requests as it has in flight: most of them were sent at the very
    beginning.
    """
    if rounds < FEWEST_ROUNDS:
        return began, last_done
    fed = feeding_ended - began
    if stage.seconds is not None and fed >= 0.9 * stage.seconds:
        return began + 0.1 * stage.seconds, feeding_ended
    if fed < 0.5 * (last_done - began):
        return began, last_done
    if stage.rate is not None and stage.requests is not None and stage.requests >= _TENTH:
        return began + fed * (stage.requests // _TENTH) / (stage.requests - 1), feeding_ended
    return began, feeding_ended
