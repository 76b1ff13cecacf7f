"""What a load test is to do: its settings, and the stages they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.bench.prompts import AnswerPlan, Lengths
from bagent.bench.records import Routing, Way
from bagent.bench.schedule import Arrival, LoadStage, Recorded, TraceInfo


class Slo(msgspec.Struct, frozen=True):
    """What a good request keeps, in milliseconds; None is no limit.

    ``e2e`` counts from when the request was scheduled. A limit on what a request does not have
    (a first token where nothing streams) is passed over.
    """

    ttft: float | None = 2000.0
    tpot: float | None = 100.0
    e2e: float | None = None


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a load test."""

    name: str = "custom"
    concurrency: Sequence[int] = ()
    """Closed loops: calls in flight at each endpoint."""
    rates: Sequence[float] = ()
    """Open loops: requests a second over the whole fleet."""
    ramps: Sequence[tuple[float, float]] = ()
    """Open loops whose rate goes evenly from one to another."""
    sweep: bool = False
    """Find the saturation, then measure at rates below and at it."""
    trace: TraceInfo | None = None
    """What is known of the recorded load that is replayed."""
    speeds: Sequence[float] = ()
    """How many times as fast as recorded it is replayed, each a load."""
    turns: int = 1
    think: float = 1.0
    turn_tokens: int = 128
    """``turns``, ``think``, ``turn_tokens``: requests of a conversation, seconds between them,
    and tokens that each turn after the first adds to what was said before."""
    arrival: Arrival = "poisson"
    burstiness: float = 1.0
    seconds: float | None = 20.0
    """Of each stage; None where ``requests`` alone bound it."""
    requests: int | None = None
    """Of each stage, over the whole fleet; conversations where there are turns."""
    input_tokens: int = 256
    output_tokens: int = 64
    """``input_tokens``, ``output_tokens``: of each call, chat template and shared prefix
    included."""
    as_json: bool = False
    """Answers by a JSON Schema."""
    prefix_tokens: int = 0
    """Shared by the prompts of a group; 0 shares nothing."""
    groups: int = 0
    """Number of shared prefixes; 0 is four for each endpoint."""
    skew: float = 0.0
    """How unevenly groups are asked for (Zipf's exponent)."""
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
"""``quick`` is over in a minute. ``saturation`` takes five minutes. ``prefix`` sends prompts that
share long beginnings, first to any endpoint and then each group to its own. ``agents`` are
conversations of two turns behind one long prompt with a slow tool between them, whose second turn
goes first to any endpoint and then to that of the first."""


def make_plan(preset: str | None, given: dict[str, Any]) -> BenchPlan:
    """The preset's settings with those ``given`` in their place.

    A given load (``rates``, ``concurrency``, ``speeds`` or ``sweep``) replaces the preset's; a
    given number of requests without a time bounds each stage alone, and so does a
    trace, whose lengths go before any that are given.
    """
    values: dict[str, Any] = {"name": preset, **PRESETS[preset]} if preset else {}
    if any(given.get(name) for name in ("rates", "ramps", "speeds", "sweep")):
        values.pop("concurrency", None)
    values |= given
    bounded = given.get("requests") is not None or given.get("speeds")
    if bounded and given.get("seconds") is None:
        values["seconds"] = None
    if values.get("trace") is not None:
        values["input_tokens"] = max(1, round(values["trace"].input_tokens))
        values["output_tokens"] = max(1, round(values["trace"].output_tokens))
    plan = BenchPlan(**values)
    if not (plan.concurrency or plan.rates or plan.ramps or plan.speeds or plan.sweep):
        plan = msgspec.structs.replace(plan, concurrency=(1, 8))
    return plan


def stages(plan: BenchPlan, endpoints: Sequence[str]) -> Iterator[LoadStage]:
    """The stages of all repeats, in the order of sending; a sweep makes its own.

    Every second repeat goes backwards, so that what drifts with time favours no stage.
    """
    once = list(_once(plan, endpoints))
    number = 0
    for repeat in range(plan.repeats):
        for stage in once if repeat % 2 == 0 else reversed(once):
            yield msgspec.structs.replace(stage, number=number, repeat=repeat)
            number += 1


def load_names(plan: BenchPlan) -> list[str]:
    """Names of the loads to come; empty before a sweep, which finds them by itself."""
    once = () if plan.sweep else _once(plan, ("",))
    return list(dict.fromkeys(stage.load for stage in once))


def _once(plan: BenchPlan, endpoints: Sequence[str]) -> Iterator[LoadStage]:
    for routing in plan.routings:
        targets = endpoints if routing == "isolated" else (None,)
        for only in targets:
            for way in plan.ways:
                for calls in plan.concurrency:
                    yield stage_of(plan, f"c={calls}", way, routing, only, concurrency=calls)
                for rate in plan.rates:
                    yield stage_of(plan, f"rate={rate:g}", way, routing, only, rate=rate)
                for low, high in plan.ramps:
                    name = f"rate={low:g}..{high:g}"
                    yield stage_of(plan, name, way, routing, only, rate=low, rate_to=high)
                for speed in plan.speeds if plan.trace else ():
                    name = "replay" if speed == 1 else f"replay x{speed:g}"
                    mean = plan.trace.rate * speed if plan.trace else None
                    yield stage_of(plan, name, way, routing, only, rate=mean, speed=speed)


def stage_of(
    plan: BenchPlan,
    shape: str,
    way: Way,
    routing: Routing = "balanced",
    only: str | None = None,
    **more: Any,
) -> LoadStage:
    """A stage of the plan; ``shape`` is the part of its name that says how much load it is."""
    words = [shape]
    if len(plan.ways) > 1:
        words.append(way)
    if len(plan.routings) > 1:
        words.append(routing)
    return LoadStage(
        number=more.pop("number", 0),
        load=" ".join(words),
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
        **more,
    )


def expected_seconds(plan: BenchPlan, endpoints: int) -> float | None:
    """How long the stages take at least, drains left out; None where nothing bounds it."""
    recorded = [plan.trace.seconds / speed for speed in plan.speeds] if plan.trace else []
    loads = len(plan.concurrency) + len(plan.rates) + len(plan.ramps)
    if plan.sweep or (loads and plan.seconds is None):
        return None
    most = plan.seconds if plan.seconds is not None else math.inf
    seconds = loads * (plan.seconds or 0.0) + sum(min(most, one) for one in recorded)
    rounds = sum(endpoints if one == "isolated" else 1 for one in plan.routings)
    return seconds * rounds * len(plan.ways) * plan.repeats


class BenchTarget(msgspec.Struct, frozen=True):
    """One endpoint under load: how it is reached, and what it is asked for."""

    endpoint: Endpoint
    model: str | None = None
    engine: str | None = None


class JobBody(msgspec.Struct, frozen=True):
    """One row of a real job as the body of its first request, less streaming."""

    path: str
    body: str


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One load test as its workers see it."""

    targets: list[BenchTarget]
    """The endpoints that answered before, in the order of the hostfile."""
    lengths: dict[str, Lengths]
    """Sizes of prompts by model name (an empty name where none is known)."""
    answer: AnswerPlan
    timeouts: Timeouts
    salt: str
    origin: float
    """Seconds of the monotonic clock that all times of rows count from."""
    folder: str
    """Where raw rows are written."""
    list_size: int = 8
    """Calls in one request, where calls travel in lists or batches."""
    groups: int = 0
    """Number of shared prefixes; 0 shares none."""
    skew: float = 0.0
    turn_tokens: int = 0
    """What each turn of a conversation after the first adds."""
    trace: list[Recorded] = []
    """Recorded requests to send again."""
    job: list[JobBody] = []
    """Bodies to send in turn in place of made prompts."""
    worker: int = 0
    workers: int = 1
    """``worker``, ``workers``: which of the workers this is."""


class Workload(msgspec.Struct, frozen=True):
    """What is sent in place of made prompts: the bodies of a job, the times and lengths of a
    recorded load; empty where there is none."""

    job: list[JobBody] = []
    trace: list[Recorded] = []


def portable(endpoint: Endpoint) -> Endpoint:
    """``endpoint`` made of values that can be written as JSON."""
    return msgspec.structs.replace(
        endpoint,
        headers=dict(endpoint.headers),
        query=dict(endpoint.query),
        tags=dict(endpoint.tags),
    )
