"""Finds by itself what a fleet can take: doubles the calls in flight until that gains nothing,
then measures open loops at shares of the best rate, until one is more than the fleet can serve.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from bagent.bench.plan import BenchPlan, stage_of
from bagent.bench.records import LoadStageRow
from bagent.bench.schedule import LoadStage

LEAST_GAIN = 0.10
"""More calls in flight that bring less than this are past the knee."""

MOST_CONCURRENCY = 1024
SHARES = (0.25, 0.5, 0.7, 0.85, 0.95, 1.05)
"""Open loops, as shares of the best rate of the closed ones."""

_STEADY_T = 3.0
_GROWTH = 0.3
_FEWEST = 20


class RequestSummary(msgspec.Struct, frozen=True):
    """The part of a raw row that decisions are made from; see
    :class:`bagent.bench.records.RequestRow`, whose defaults it shares."""

    stage: int
    scheduled: float
    sent: float = 0.0
    done: float = 0.0
    status: str = "unfinished"
    size: int = 1
    first_token: float | None = None


Send = Callable[[LoadStage], Awaitable[tuple[LoadStageRow, list[RequestSummary]]]]
"""Sends a stage; returns how it went and its rows."""


class Saturation(msgspec.Struct):
    """What a sweep found.

    ``best_rate`` in calls a second is the most that a closed loop reached, with ``concurrency``
    calls in flight at each endpoint. ``sustained_rate`` is the highest open rate at which neither
    waiting nor calls in flight grew; None where none was.
    """

    best_rate: float = 0.0
    concurrency: int = 0
    sustained_rate: float | None = None
    over_rate: float | None = None


def served_rate(stage: LoadStageRow, rows: Sequence[RequestSummary]) -> float:
    """Calls a second that ended well within the steady window."""
    low, high = stage.window_from, stage.window_to
    done = sum(row.size for row in rows if row.status == "ok" and low <= row.done < high)
    return done / (high - low) if high > low else 0.0


def over_saturated(stage: LoadStageRow, rows: Sequence[RequestSummary]) -> bool:
    """Whether an open loop was more than the fleet could serve.

    It was where both the calls in flight and the waiting time (to the first token, else to the
    end) grew all through the stage: a slope above 0 by three standard errors, that makes the
    last request worse than the mean by 30 % or more. One alone grows by chance.
    """
    told = sorted((row for row in rows if row.status != "failed"), key=lambda row: row.scheduled)
    if len(told) < _FEWEST:
        return False
    begun = [(row.scheduled, 1) for row in told] + [(row.done, -1) for row in told]
    in_flight, level = [], 0
    for at, step in sorted(begun):
        level += step
        if step > 0:
            in_flight.append((at, float(level)))
    waits = [
        (row.scheduled, (row.first_token or row.done) - row.scheduled)
        for row in told
        if row.status == "ok" or row.first_token is None
    ]
    return _grows(in_flight) and _grows(waits)


def _grows(points: Sequence[tuple[float, float]]) -> bool:
    """Whether a line through (time, value) rises surely and by much."""
    count = len(points)
    if count < _FEWEST:
        return False
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0 or mean_y <= 0:
        return False
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    error = math.sqrt(rest / (count - 2) / spread)
    sure = slope > _STEADY_T * error
    return sure and slope * (points[-1][0] - mean_x) > _GROWTH * mean_y


async def sweep(
    plan: BenchPlan, endpoints: int, send: Send, first: int = 0
) -> AsyncIterator[tuple[LoadStage, Saturation]]:
    """Run a sweep; yields each stage after it was sent, with what is known by then.

    Args:
        endpoints: how many take the load.
        send: sends a stage.
        first: number of the first stage.
    """
    way, routing = plan.ways[0], plan.routings[0]
    found, number = Saturation(), first
    calls, best = 1, 0.0
    while calls <= MOST_CONCURRENCY:
        spec = stage_of(plan, f"c={calls}", way, routing, number=number, concurrency=calls)
        stage, rows = await send(spec)
        rate = served_rate(stage, rows)
        gained = rate > best * (1 + LEAST_GAIN)
        if rate > best:
            best = rate
            found.best_rate, found.concurrency = rate, calls
        yield spec, found
        number += 1
        if stage.cut or not gained:
            break
        calls *= 2
    for part in SHARES:
        rate = float(f"{found.best_rate * part:.3g}")
        if rate <= 0 or stage.cut:
            return
        spec = stage_of(plan, f"rate={rate:g}", way, routing, number=number, rate=rate)
        stage, rows = await send(spec)
        over = over_saturated(stage, rows)
        if over:
            found.over_rate = rate
        elif found.over_rate is None:
            found.sustained_rate = rate
        yield spec, found
        number += 1
        if over:
            return
