"""Settings of a load test, sizes of its prompts and answers, and the stages that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.bench.records import Routing, Way
from bagent.bench.schedule import Arrival, LoadStage, Recorded, TraceInfo

_JSON_ROOM = 32
"""Tokens that JSON may need beyond its length to end."""


class Lengths(msgspec.Struct, frozen=True):
    """Calibrated sizes of one model's prompts, in words."""

    own: int
    """Words of a prompt after its shared prefix."""
    prefix: int = 0
    """Words that a group shares."""
    tokens: int | None = None
    """Measured tokens of a prompt with its chat template; None where nothing was measured."""
    measured: str = "not measured"
    per_word: float = 1.0
    extra: float = 0.0
    """``per_word``, ``extra``: tokens of a word, and tokens added around a prompt."""

    def word_count(self, tokens: int) -> int:
        """Return how many words make a prompt of ``tokens``, at least one."""
        return max(1, round((tokens - self.extra) / self.per_word))


class AnswerPlan(msgspec.Struct, frozen=True):
    """Length and form of the requested answers."""

    tokens: int
    as_json: bool = False

    @property
    def max_tokens(self) -> int:
        """Return the limit to send, with room for JSON to end."""
        return self.tokens + _JSON_ROOM * self.as_json


class Slo(msgspec.Struct, frozen=True):
    """The limits that a good request keeps, in milliseconds; None is no limit.

    A limit on a time that a request does not have (a first token where nothing streams) is skipped.
    """

    ttft: float | None = 2000.0
    tpot: float | None = 100.0
    e2e: float | None = None
    """From when the request was scheduled to its end."""


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a load test."""

    name: str = "custom"
    concurrency: Sequence[int] = ()
    """Closed loops: calls in flight at each endpoint."""
    rates: Sequence[float] = ()
    """Open loops: requests per second over the whole fleet."""
    ramps: Sequence[tuple[float, float]] = ()
    """Open loops whose rate changes linearly from the first number to the second."""
    sweep: bool = False
    """Find the saturation, then measure at rates below and at it."""
    trace: TraceInfo | None = None
    """The recorded load to replay."""
    speeds: Sequence[float] = ()
    """Factors by which the trace is replayed faster than recorded, one load each."""
    turns: int = 1
    think: float = 1.0
    turn_tokens: int = 128
    """``turns``, ``think``, ``turn_tokens``: requests of a conversation, seconds between them,
    and tokens that each later turn adds."""
    arrival: Arrival = "poisson"
    burstiness: float = 1.0
    seconds: float | None = 20.0
    """Duration of each stage; None where only ``requests`` bounds it."""
    requests: int | None = None
    """Requests of each stage over the whole fleet; conversations where there are turns."""
    input_tokens: int = 256
    output_tokens: int = 64
    """``input_tokens``, ``output_tokens``: of each call, chat template and shared prefix
    included."""
    as_json: bool = False
    """Constrain answers by a JSON Schema."""
    prefix_tokens: int = 0
    """Tokens that the prompts of a group share; 0 shares nothing."""
    groups: int = 0
    """Number of shared prefixes; 0 is four per endpoint."""
    skew: float = 0.0
    """Zipf exponent of the frequencies of groups; 0 makes them equal."""
    ways: Sequence[Way] = ("chat",)
    list_size: int = 8
    routings: Sequence[Routing] = ("balanced",)
    warmup: int = 2
    """Requests to each endpoint before the first stage."""
    repeats: int = 1
    seed: int = 0
    workers: int = 1
    drain: float = 30.0
    """Seconds that requests in flight get after a stage."""
    slo: Slo = Slo()
    timeouts: Timeouts = Timeouts(connect=5.0, first_token=60.0, idle=60.0, total=300.0)


PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"concurrency": (1, 8), "seconds": 20.0, "drain": 5.0},
    "saturation": {
        "concurrency": (16, 32, 64, 128, 256),
        "seconds": 60.0,
        "input_tokens": 750,
        "output_tokens": 150,
        "as_json": True,
    },
    "prefix": {
        "concurrency": (16,),
        "seconds": 30.0,
        "input_tokens": 2548,
        "prefix_tokens": 2048,
        "output_tokens": 32,
        "routings": ("balanced", "affinity"),
    },
    "agents": {
        "concurrency": (16,),
        "seconds": 30.0,
        "input_tokens": 2548,
        "prefix_tokens": 2048,
        "groups": 1,
        "output_tokens": 64,
        "turns": 2,
        "think": 1.0,
        "turn_tokens": 128,
        "routings": ("balanced", "affinity"),
    },
}
"""``quick`` takes a minute, ``saturation`` five. ``prefix`` sends prompts with long shared
prefixes, first to any endpoint, then each group to its own. ``agents`` are conversations of
two turns behind one long prompt, with a slow tool in between; the second turn goes first to
any endpoint, then to that of the first turn."""


def make_plan(preset: str | None, settings: dict[str, Any]) -> BenchPlan:
    """Return the preset's settings, overridden by ``settings``.

    A load in ``settings`` (``rates``, ``concurrency``, ``speeds`` or ``sweep``) replaces the
    preset's. A number of requests without a time bounds each stage alone, and so does a trace. The
    lengths of a trace override all others.
    """
    values: dict[str, Any] = {"name": preset, **PRESETS[preset]} if preset else {}
    if any(settings.get(name) for name in ("rates", "ramps", "speeds", "sweep")):
        values.pop("concurrency", None)
    values |= settings
    bounded = settings.get("requests") is not None or settings.get("speeds")
    if bounded and settings.get("seconds") is None:
        values["seconds"] = None
    if values.get("trace") is not None:
        values["input_tokens"] = max(1, round(values["trace"].input_tokens))
        values["output_tokens"] = max(1, round(values["trace"].output_tokens))
    plan = BenchPlan(**values)
    if not (plan.concurrency or plan.rates or plan.ramps or plan.speeds or plan.sweep):
        plan = msgspec.structs.replace(plan, concurrency=(1, 8))
    return plan


def plan_stages(plan: BenchPlan, endpoints: Sequence[str]) -> Iterator[LoadStage]:
    """Yield the stages of all repeats in the order of sending; a sweep makes its own.

    Every second repeat runs backwards, so that a drift over time favours no stage.
    """
    first_pass = list(_first_pass(plan, endpoints))
    number = 0
    for repeat in range(plan.repeats):
        for stage in first_pass if repeat % 2 == 0 else reversed(first_pass):
            yield msgspec.structs.replace(stage, number=number, repeat=repeat)
            number += 1


def load_names(plan: BenchPlan) -> list[str]:
    """Return the names of the loads; empty before a sweep, which finds them itself."""
    first_pass = () if plan.sweep else _first_pass(plan, ("",))
    return list(dict.fromkeys(stage.load for stage in first_pass))


def _first_pass(plan: BenchPlan, endpoints: Sequence[str]) -> Iterator[LoadStage]:
    for routing in plan.routings:
        targets = endpoints if routing == "isolated" else (None,)
        for only in targets:
            for way in plan.ways:
                for calls in plan.concurrency:
                    yield make_stage(plan, f"c={calls}", way, routing, only, concurrency=calls)
                for rate in plan.rates:
                    yield make_stage(plan, f"rate={rate:g}", way, routing, only, rate=rate)
                for start, end in plan.ramps:
                    name = f"rate={start:g}..{end:g}"
                    yield make_stage(plan, name, way, routing, only, rate=start, rate_to=end)
                for speed in plan.speeds if plan.trace else ():
                    name = "replay" if speed == 1 else f"replay x{speed:g}"
                    mean = plan.trace.rate * speed if plan.trace else None
                    yield make_stage(plan, name, way, routing, only, rate=mean, speed=speed)


def make_stage(
    plan: BenchPlan,
    load: str,
    way: Way,
    routing: Routing = "balanced",
    only: str | None = None,
    **options: Any,
) -> LoadStage:
    """Return a stage of the plan; ``load`` is the part of its name that says how much load it
    is."""
    parts = [load]
    if len(plan.ways) > 1:
        parts.append(way)
    if len(plan.routings) > 1:
        parts.append(routing)
    return LoadStage(
        number=options.pop("number", 0),
        load=" ".join(parts),
        way=way,
        routing=routing,
        arrival=plan.arrival,
        burstiness=plan.burstiness,
        seconds=plan.seconds,
        requests=plan.requests,
        drain=plan.drain,
        only=only,
        turns=plan.turns,
        think=plan.think,
        seed=plan.seed,
        **options,
    )


def expected_seconds(plan: BenchPlan, endpoints: int) -> float | None:
    """Return the least duration of the stages without drains; None where nothing bounds it."""
    recorded = [plan.trace.seconds / speed for speed in plan.speeds] if plan.trace else []
    loads = len(plan.concurrency) + len(plan.rates) + len(plan.ramps)
    if plan.sweep or (loads and plan.seconds is None):
        return None
    limit = plan.seconds if plan.seconds is not None else math.inf
    seconds = loads * (plan.seconds or 0.0) + sum(min(limit, duration) for duration in recorded)
    rounds = sum(endpoints if duration == "isolated" else 1 for duration in plan.routings)
    return seconds * rounds * len(plan.ways) * plan.repeats


class BenchTarget(msgspec.Struct, frozen=True):
    """One endpoint under load, with the model to request."""

    endpoint: Endpoint
    model: str | None = None
    engine: str | None = None


class JobBody(msgspec.Struct, frozen=True):
    """One row of a job as the body of its first request, without the fields of streaming."""

    path: str
    body: str


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One load test as its workers need it."""

    targets: list[BenchTarget]
    """Endpoints that passed the health check, in the order of the hostfile."""
    lengths: dict[str, Lengths]
    """Prompt sizes by model name; the name is empty where it is unknown."""
    answer: AnswerPlan
    timeouts: Timeouts
    salt: str
    origin: float
    """Time of the monotonic clock from which the times of rows count."""
    folder: str
    """Folder of the raw rows."""
    list_size: int = 8
    """Calls in one request, for lists and batches."""
    groups: int = 0
    """Number of shared prefixes; 0 shares none."""
    skew: float = 0.0
    turn_tokens: int = 0
    """Tokens that each later turn of a conversation adds."""
    trace: list[Recorded] = []
    """Recorded requests to replay."""
    job: list[JobBody] = []
    """Bodies to send in turn in place of generated prompts."""
    worker: int = 0
    workers: int = 1
    """``worker``, ``workers``: index of this worker and number of workers."""


class Workload(msgspec.Struct, frozen=True):
    """What replaces generated prompts: bodies of a job, or a recorded load."""

    job: list[JobBody] = []
    trace: list[Recorded] = []


def portable(endpoint: Endpoint) -> Endpoint:
    """Return ``endpoint`` with values that can be encoded as JSON."""
    return msgspec.structs.replace(
        endpoint,
        headers=dict(endpoint.headers),
        query=dict(endpoint.query),
        tags=dict(endpoint.tags),
    )
