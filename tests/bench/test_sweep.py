"""Finding the saturation without a person."""

from __future__ import annotations

import asyncio
import random

import pytest

from bagent.bench.plan import BenchPlan
from bagent.bench.records import LoadStageRow
from bagent.bench.schedule import LoadStage
from bagent.bench.sweep import MOST_CONCURRENCY, RequestSummary, Saturation, over_saturated, sweep


def stage(seconds: float = 60.0, **fields: object) -> LoadStageRow:
    times = {"began": 0.0, "feeding_ended": seconds, "ended": seconds}
    known = {"load": "x", "repeat": 0, "way": "chat", "routing": "balanced", "endpoints": 1}
    return LoadStageRow(
        stage=0,
        window_from=0.0,
        window_to=seconds,
        **{**known, **times, **fields},  # type: ignore[arg-type]
    )


def queue(
    rate: float, capacity: float, seconds: float = 60.0, seed: int = 1
) -> list[RequestSummary]:
    """One server that needs ``1 / capacity`` seconds for a request, under Poisson arrivals."""
    rng = random.Random(seed)
    rows: list[RequestSummary] = []
    at = free = 0.0
    while True:
        at += rng.expovariate(rate)
        if at > seconds:
            return rows
        free = max(free, at) + 1 / capacity
        rows.append(RequestSummary(0, at, at, free, "ok", first_token=free))


@pytest.mark.parametrize(("rate", "over"), [(3.0, False), (7.0, False), (13.0, True), (20.0, True)])
def test_over_saturation_is_waiting_that_grows(rate: float, over: bool) -> None:
    assert over_saturated(stage(), queue(rate, 10.0)) == over
    assert not over_saturated(stage(), queue(rate, 10.0, seconds=0.5)), "few prove nothing"


def test_requests_that_never_began_are_waiting_too() -> None:
    rows = [RequestSummary(0, n / 10, n / 10, n / 5, "unfinished") for n in range(300)]
    assert over_saturated(stage(), rows)


def run(capacity: float, one: float) -> tuple[list[str], Saturation]:
    """A sweep of a fleet that serves ``capacity`` calls a second, ``one`` with one in flight."""

    async def send(spec: LoadStage) -> tuple[LoadStageRow, list[RequestSummary]]:
        row = stage(concurrency=spec.concurrency, rate=spec.rate)
        if spec.rate is not None:
            return row, queue(spec.rate, capacity)
        rate = min(capacity, one * (spec.concurrency or 0))
        count = round(60 * rate)
        return row, [
            RequestSummary(0, n / rate, n / rate, (n + 0.5) / rate, "ok") for n in range(count)
        ]

    async def main() -> tuple[list[str], Saturation]:
        steps = [step async for step in sweep(BenchPlan(sweep=True), 1, send)]
        return [spec.load for spec, _ in steps], steps[-1][1]

    return asyncio.run(main())


def test_calls_in_flight_are_doubled_until_nothing_is_gained() -> None:
    names, found = run(capacity=10.0, one=2.0)
    assert names[:5] == ["c=1", "c=2", "c=4", "c=8", "c=16"]
    assert names[5].startswith("rate=")
    assert found.best_rate == pytest.approx(10, rel=0.02) and found.concurrency == 8
    assert found.sustained_rate is not None and 7 <= found.sustained_rate <= 10.6


def test_it_ends_where_nothing_answers_and_where_nothing_saturates() -> None:
    assert run(capacity=0.001, one=0.0001)[0] == ["c=1"]
    names, found = run(capacity=1e4, one=0.5)
    assert f"c={MOST_CONCURRENCY}" in names and found.concurrency == MOST_CONCURRENCY
