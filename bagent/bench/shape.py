"""Load shapes: what a stage is, and when each of its requests is to be sent."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from bagent.bench.records import Routing, Way
from bagent.bench.trace import Recorded

Arrival = Literal["constant", "poisson", "gamma"]
"""How the requests of an open loop come: evenly, at random, or at random with bursts."""


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a load test; with ``rate`` an open loop, with ``concurrency`` a closed one.

    Attributes:
        number: place in the test, from 0.
        load: name of the load, the same for all its repeats.
        concurrency: calls in flight at each endpoint, all the time.
        rate: requests a second over the whole fleet, whatever comes back.
        rate_to: the rate at the end of a ramp: it goes there evenly during ``seconds``.
        speed: how many times as fast as recorded a trace is replayed; ``rate`` is its mean then.
        burstiness: shape of ``gamma`` arrivals: 1 is Poisson, less comes in bursts.
        seconds: how long it feeds; None until ``requests`` are sent.
        requests: how many it sends over the whole fleet; None until ``seconds`` are over.
        drain: seconds that requests in flight get to end afterwards.
        turns: requests of a conversation, each of which holds what was said before.
        think: seconds between an answer and the next turn: a tool that takes so long.
        only: the endpoint that gets all of it; None is all.
        warmup: requests to each endpoint whose rows count nowhere.
    """

    number: int
    load: str
    way: Way = "chat"
    routing: Routing = "balanced"
    repeat: int = 0
    concurrency: int | None = None
    rate: float | None = None
    rate_to: float | None = None
    speed: float | None = None
    turns: int = 1
    think: float = 0.0
    arrival: Arrival = "poisson"
    burstiness: float = 1.0
    seconds: float | None = None
    requests: int | None = None
    drain: float = 30.0
    only: str | None = None
    seed: int = 0
    warmup: bool = False


def replayed(
    stage: StageSpec, trace: Sequence[Recorded], part: int = 0, parts: int = 1
) -> Iterator[tuple[int, float]]:
    """The send times of a trace, as :func:`arrivals` gives them."""
    for number, one in enumerate(trace[: stage.requests]):
        at = one.at / (stage.speed or 1.0)
        if stage.seconds is not None and at >= stage.seconds:
            return
        if number % parts == part:
            yield number, at


def arrivals(stage: StageSpec, part: int = 0, parts: int = 1) -> Iterator[tuple[int, float]]:
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


def _rate_at(stage: StageSpec, rate: float, at: float) -> float:
    """The rate ``at`` seconds after the start."""
    if stage.rate_to is None or not stage.seconds:
        return rate
    return rate + (stage.rate_to - rate) * min(1.0, at / stage.seconds)


def _gaps(stage: StageSpec) -> Iterator[float]:
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
    stage: StageSpec,
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
