"""Load stages, their send times, and recorded loads to replay."""

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
from bagent.duck import Access, connect, file_source
from bagent.errors import Position, UsageError
from bagent.store.journal.segments import list_segments
from bagent.store.run_dir import RunDir, find_run

TIMES = ("scheduled", "sent", "started_at", "arrived_at", "arrival_time", "timestamp", "time")
INPUTS = ("prompt_tokens", "input_tokens", "input_length", "contexttokens")
OUTPUTS = ("completion_tokens", "output_tokens", "output_length", "generatedtokens")
"""Column names in order of preference, without case."""

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
    "read_json({}, format='newline_delimited', ignore_errors=true, columns={{{}}}) "
    "where warmup is null"
)


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """One recorded request: seconds after the first one, tokens of its prompt and of its answer."""

    at: float
    input_tokens: int
    output_tokens: int


class TraceInfo(msgspec.Struct, frozen=True):
    """Summary of a recorded load: requests within ``seconds``, and their mean lengths."""

    source: str
    requests: int
    seconds: float
    input_tokens: float
    output_tokens: float
    left_out: int = 0
    """Rows without a time or lengths, such as failed ones."""

    @property
    def rate(self) -> float:
        """Return the mean requests per second; where all came at once, those of one second."""
        return self.requests / (self.seconds or 1.0)


def read_trace(source: Path) -> tuple[list[Recorded], TraceInfo]:
    """Return the requests of a recorded load in the order of their times.

    Args:
        source: a run's directory or name, the folder of a load test, or a file.

    Raises:
        UsageError: it does not exist, cannot be read, or has no row with a time and lengths.
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
    requests, left_out = _recorded(rows)
    if not requests:
        raise UsageError(
            "--replay: no row has a time, input tokens and output tokens",
            hint=f"columns such as {TIMES[0]}, {INPUTS[0]}, {OUTPUTS[0]}",
            at=Position(source),
        )
    count = len(requests)
    return requests, TraceInfo(
        str(source),
        count,
        requests[-1].at,
        sum(request.input_tokens for request in requests) / count,
        sum(request.output_tokens for request in requests) / count,
        left_out,
    )


def _table(file: Path) -> str:
    """Return the query of a trace file."""
    name = file.name.lower().removesuffix(".gz").removesuffix(".zst")
    reader = _READERS.get(Path(name).suffix)
    if reader is None:
        raise UsageError(
            "--replay: unknown kind of file",
            hint=f"its name ends with {', '.join(_READERS)}",
            at=Position(file),
        )
    return f"select * from {reader.format(file_source(file))}"


def _raw(files: Sequence[Path], time: str) -> str:
    """Return the query of raw rows of bagent, the last of which may be torn."""
    types = {time: "DOUBLE", INPUTS[0]: "BIGINT", OUTPUTS[0]: "BIGINT", "warmup": "BOOLEAN"}
    columns = ", ".join(f"{name}: '{type_}'" for name, type_ in types.items())
    return f"select * from {_RAW.format(file_source(*files), columns)}"


def _query(source: Path, files: Sequence[Path], query: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a query by lower-case column name."""
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
        (message, *_) = str(error).splitlines()
        raise UsageError(f"--replay: cannot be read: {message}", at=Position(source)) from None


def _line(text: str | None) -> dict[str, Any]:
    """Return the members of a line's object by lower-case name; empty for any other line."""
    try:
        value = msgspec.json.decode(text or "null")
    except msgspec.DecodeError:
        value = None
    return {name.lower(): item for name, item in value.items()} if isinstance(value, dict) else {}


def _recorded(rows: Iterator[Mapping[str, Any]]) -> tuple[list[Recorded], int]:
    """Return the rows that can be replayed, and how many cannot."""
    requests: list[tuple[float, int, int]] = []
    left_out = 0
    for row in rows:
        at = _seconds(_first(row, TIMES))
        sizes = _number(_first(row, INPUTS)), _number(_first(row, OUTPUTS))
        if at is None or sizes[0] < 1 or sizes[1] < 1:
            left_out += 1
            continue
        scale = 1000 if all(name in row for name in MILLISECONDS) else 1
        requests.append((at / scale, sizes[0], sizes[1]))
    requests.sort()
    began = requests[0][0] if requests else 0.0
    return [Recorded(at - began, *sizes) for at, *sizes in requests], left_out


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _number(value: Any) -> int:
    """Return a number of tokens; 0 where it is none or implausibly large."""
    try:
        number = int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if number < MOST_TOKENS else 0


def _seconds(value: Any) -> float | None:
    """Return a time in seconds: a number as it is, a date as seconds since 1970."""
    if isinstance(value, datetime):
        return value.timestamp()
    try:
        seconds = float(value)
        return seconds if math.isfinite(seconds) else None
    except (TypeError, ValueError):
        pass
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None


Arrival = Literal["constant", "poisson", "gamma"]
"""Arrivals of an open loop: evenly, at random, or at random in bursts."""


class LoadStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a load test: with ``rate`` an open loop, with ``concurrency`` a closed one."""

    number: int
    """Index in the test, from 0."""
    load: str
    """Name of the load, shared by all its repeats."""
    way: Way = "chat"
    routing: Routing = "balanced"
    repeat: int = 0
    concurrency: int | None = None
    """Calls in flight at each endpoint."""
    rate: float | None = None
    """Requests per second over the whole fleet."""
    rate_to: float | None = None
    """Rate at the end of a ramp, reached linearly during ``seconds``."""
    speed: float | None = None
    """Factor by which a trace is replayed faster than recorded; ``rate`` is its mean then."""
    turns: int = 1
    """Requests of a conversation, each of which holds the turns before."""
    think: float = 0.0
    """Seconds between an answer and the next turn."""
    arrival: Arrival = "poisson"
    burstiness: float = 1.0
    """Shape of ``gamma`` arrivals: 1 is Poisson, less comes in bursts."""
    seconds: float | None = None
    """Duration of sending; None until ``requests`` are sent."""
    requests: int | None = None
    """Requests over the whole fleet; None until ``seconds`` are over."""
    drain: float = 30.0
    """Seconds that requests in flight get to end afterwards."""
    only: str | None = None
    """The endpoint that gets the whole load; None is all."""
    seed: int = 0
    warmup: bool = False
    """Send ``requests`` to each endpoint and count their rows nowhere."""


def replay_times(
    stage: LoadStage, trace: Sequence[Recorded], worker: int = 0, workers: int = 1
) -> Iterator[tuple[int, float]]:
    """Yield the send times of a trace, as :func:`arrival_times` does."""
    for number, recorded in enumerate(trace[: stage.requests]):
        at = recorded.at / (stage.speed or 1.0)
        if stage.seconds is not None and at >= stage.seconds:
            return
        if number % workers == worker:
            yield number, at


def arrival_times(
    stage: LoadStage, worker: int = 0, workers: int = 1
) -> Iterator[tuple[int, float]]:
    """Yield (number, seconds from the stage's start) of an open loop's requests.

    The schedule ends with ``requests`` or ``seconds``, if set. All workers draw the same times from
    the seed and take every ``workers``-th, so that together they are one schedule. Gaps of
    ``gamma`` arrivals have the mean ``1 / rate`` and the shape ``burstiness``, as in vLLM's ``bench
    serve``.
    """
    assert stage.rate is not None
    gaps = _gaps(stage)
    at = next(gaps) / stage.rate if stage.arrival != "constant" else 0.0
    for number in itertools.count():
        if stage.requests is not None and number >= stage.requests:
            return
        if stage.seconds is not None and at >= stage.seconds:
            return
        if number % workers == worker:
            yield number, at
        at += next(gaps) / _rate_at(stage, stage.rate, at)


def _rate_at(stage: LoadStage, rate: float, at: float) -> float:
    """Return the rate ``at`` seconds after the start."""
    if stage.rate_to is None or not stage.seconds:
        return rate
    return rate + (stage.rate_to - rate) * min(1.0, at / stage.seconds)


def _gaps(stage: LoadStage) -> Iterator[float]:
    """Yield gaps between requests at one request per second."""
    if stage.arrival == "constant":
        while True:
            yield 1.0
    rng = random.Random(f"{stage.seed}/arrivals/{stage.load}/{stage.repeat}")
    shape = 1.0 if stage.arrival == "poisson" else stage.burstiness
    while True:
        yield rng.gammavariate(shape, 1 / shape)


MIN_ROUNDS = 2.0
_MIN_FOR_TENTH = 10


def worker_share(count: int, worker: int, workers: int) -> int:
    """Return the share of one of ``workers`` in ``count``; all shares add up to it."""
    return count // workers + (worker < count % workers)


def steady_window(
    stage: LoadStage, began: float, feeding_ended: float, last_done: float, rounds: float = math.inf
) -> tuple[float, float]:
    """Return the steady window of a stage (from, to), on the clock of the arguments.

    It ends when sending ends, since draining is no load. It begins

    - after the first tenth of a stage that is bounded by time;
    - at the start of a closed loop that is bounded by requests, since it is full at once;
    - at the request after the first tenth of an open loop that is bounded by requests.

    The window is the whole stage where sending took less than half of a stage bounded by requests,
    and where a closed loop sent less than two ``rounds``, each of as many requests as it has in
    flight.
    """
    if rounds < MIN_ROUNDS:
        return began, last_done
    feeding_seconds = feeding_ended - began
    if stage.seconds is not None and feeding_seconds >= 0.9 * stage.seconds:
        return began + 0.1 * stage.seconds, feeding_ended
    if feeding_seconds < 0.5 * (last_done - began):
        return began, last_done
    if stage.rate is not None and stage.requests is not None and stage.requests >= _MIN_FOR_TENTH:
        return began + feeding_seconds * (stage.requests // 10) / (
            stage.requests - 1
        ), feeding_ended
    return began, feeding_ended
