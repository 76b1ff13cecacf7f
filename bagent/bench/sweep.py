"""Search for the saturation of a fleet.

A sweep doubles the calls in flight until that gains nothing, then measures open loops at shares of
the best rate until one is more than the fleet can serve.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from bagent.bench.plan import BenchPlan, make_stage
from bagent.bench.records import LoadStageRow
from bagent.bench.schedule import LoadStage

LEAST_GAIN = 0.10
"""Least gain of a doubling; below it the fleet is past the knee."""

MOST_CONCURRENCY = 1024
SHARES = (0.25, 0.5, 0.7, 0.85, 0.95, 1.05)
"""Rates of the open loops, as shares of the best closed-loop rate."""

_STEADY_T = 3.0
_GROWTH = 0.3
_FEWEST = 20


class RequestSummary(msgspec.Struct, frozen=True):
    """The fields of :class:`bagent.bench.records.RequestRow` that a sweep decides by."""

    stage: int
    scheduled: float
    sent: float = 0.0
    done: float = 0.0
    status: str = "unfinished"
    size: int = 1
    first_token: float | None = None


Send = Callable[[LoadStage], Awaitable[tuple[LoadStageRow, list[RequestSummary]]]]
"""Sends a stage; returns its row and the rows of its requests."""


class Saturation(msgspec.Struct):
    """Result of a sweep."""

    best_rate: float = 0.0
    """Highest rate of a closed loop, in calls per second."""
    concurrency: int = 0
    """Calls in flight at each endpoint at that rate."""
    sustained_rate: float | None = None
    """Highest open rate without growing waiting times or calls in flight; None if there was
    none."""
    over_rate: float | None = None
    """Lowest open rate that was more than the fleet could serve."""


def served_rate(stage: LoadStageRow, rows: Sequence[RequestSummary]) -> float:
    """Return the calls per second that ended well within the steady window."""
    low, high = stage.window_from, stage.window_to
    done = sum(row.size for row in rows if row.status == "ok" and low <= row.done < high)
    return done / (high - low) if high > low else 0.0


def over_saturated(stage: LoadStageRow, rows: Sequence[RequestSummary]) -> bool:
    """Return whether an open loop was more than the fleet could serve.

    Both the calls in flight and the waiting time (to the first token, else to the end) must have
    grown through the stage: a slope of more than three standard errors that makes the last request
    worse than the mean by 30 % or more. One alone may grow by chance.
    """
    ordered = sorted((row for row in rows if row.status != "failed"), key=lambda row: row.scheduled)
    if len(ordered) < _FEWEST:
        return False
    changes = [(row.scheduled, 1) for row in ordered] + [(row.done, -1) for row in ordered]
    in_flight, level = [], 0
    for at, step in sorted(changes):
        level += step
        if step > 0:
            in_flight.append((at, float(level)))
    waits = [
        (row.scheduled, (row.first_token or row.done) - row.scheduled)
        for row in ordered
        if row.status == "ok" or row.first_token is None
    ]
    return _grows(in_flight) and _grows(waits)


def _grows(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether a line through (time, value) rises significantly and by a relevant amount."""
    count = len(points)
    if count < _FEWEST:
        return False
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0 or mean_y <= 0:
        return False
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residuals = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    error = math.sqrt(residuals / (count - 2) / spread)
    sure = slope > _STEADY_T * error
    return sure and slope * (points[-1][0] - mean_x) > _GROWTH * mean_y


async def sweep(
    plan: BenchPlan, endpoints: int, send: Send, first: int = 0
) -> AsyncIterator[tuple[LoadStage, Saturation]]:
    """Run a sweep; yield each stage after it was sent, with the result so far.

    Args:
        endpoints: number of endpoints under load.
        send: sends a stage.
        first: number of the first stage.
    """
    way, routing = plan.ways[0], plan.routings[0]
    saturation, number = Saturation(), first
    calls, best = 1, 0.0
    while calls <= MOST_CONCURRENCY:
        spec = make_stage(plan, f"c={calls}", way, routing, number=number, concurrency=calls)
        stage, rows = await send(spec)
        rate = served_rate(stage, rows)
        gained = rate > best * (1 + LEAST_GAIN)
        if rate > best:
            best = rate
            saturation.best_rate, saturation.concurrency = rate, calls
        yield spec, saturation
        number += 1
        if stage.cut or not gained:
            break
        calls *= 2
    for share in SHARES:
        rate = float(f"{saturation.best_rate * share:.3g}")
        if rate <= 0 or stage.cut:
            return
        spec = make_stage(plan, f"rate={rate:g}", way, routing, number=number, rate=rate)
        stage, rows = await send(spec)
        saturated = over_saturated(stage, rows)
        if saturated:
            saturation.over_rate = rate
        elif saturation.over_rate is None:
            saturation.sustained_rate = rate
        yield spec, saturation
        number += 1
        if saturated:
            return
