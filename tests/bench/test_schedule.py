"""When requests are sent, which endpoint gets them, and where a sweep finds the saturation."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from typing import Any

import pytest

from bagent.bench.plan import BenchPlan, make_plan, plan_stages
from bagent.bench.records import LoadStageRow
from bagent.bench.routing import REFUSALS, EndpointPicker
from bagent.bench.schedule import LoadStage, arrival_times, steady_window
from bagent.bench.sweep import MOST_CONCURRENCY, RequestSummary, Saturation, over_saturated, sweep


def stage(**fields: Any) -> LoadStage:
    return LoadStage(**{"number": 0, "load": "x", **fields})


@pytest.mark.parametrize(
    ("arrival", "burstiness", "cv"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0)]
)
def test_random_arrivals_have_the_rate_and_the_spread_that_was_asked_for(
    arrival: str, burstiness: float, cv: float
) -> None:
    spec = stage(rate=10.0, arrival=arrival, burstiness=burstiness, requests=10_000, seed=1)
    times = [at for _, at in arrival_times(spec)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_a_ramp_goes_evenly_from_one_rate_to_another() -> None:
    spec = stage(rate=10.0, rate_to=50.0, arrival="constant", seconds=10.0)
    times = [at for _, at in arrival_times(spec)]
    assert len(times) == pytest.approx(300, abs=3)  # a mean of 30 a second
    assert sum(at < 1 for at in times) == pytest.approx(12, abs=1)
    assert sum(at >= 9 for at in times) == pytest.approx(48, abs=1)


def test_a_seed_gives_the_same_schedule_and_repeats_give_others() -> None:
    def times(**fields: Any) -> list[tuple[int, float]]:
        return list(arrival_times(stage(rate=10.0, requests=50, **fields)))

    assert times(seed=7) == times(seed=7)
    assert times(seed=7) != times(seed=8)
    assert times(seed=7) != times(seed=7, repeat=1)


def test_workers_together_are_one_schedule() -> None:
    spec = stage(rate=10.0, seconds=5.0, seed=3)
    parts = [list(arrival_times(spec, part, 3)) for part in range(3)]
    assert sorted(itertools.chain(*parts)) == list(arrival_times(spec))


@pytest.mark.parametrize(
    ("fields", "fed", "ended", "rounds", "expected"),
    [
        ({"seconds": 10.0}, 10.0, 40.0, None, (1.0, 10.0)),  # a slow answer does not lengthen it
        ({"seconds": 10.0}, 10.0, 14.0, 1.9, (0.0, 14.0)),  # fewer than two rounds count whole
        ({"seconds": 10.0}, 10.0, 14.0, 2.0, (1.0, 10.0)),
        ({"requests": 100}, 9.0, 10.0, None, (0.0, 9.0)),
        ({"requests": 4}, 0.1, 10.0, None, (0.0, 10.0)),
        ({"seconds": 10.0}, 4.0, 5.0, None, (0.0, 4.0)),  # stopped early
        # an open loop counts from the request that is a tenth on: the third of 21, at 0.5 s
        ({"rate": 4.0, "arrival": "constant", "requests": 21}, 5.0, 5.5, None, (0.5, 5.0)),
        ({"rate": 4.0, "arrival": "constant", "requests": 9}, 2.0, 2.5, None, (0.0, 2.0)),
    ],
)
def test_the_steady_window(
    fields: dict[str, Any],
    fed: float,
    ended: float,
    rounds: float | None,
    expected: tuple[float, float],
) -> None:
    spec = stage(**(fields if "rate" in fields else {"concurrency": 4, **fields}))
    more = {} if rounds is None else {"rounds": rounds}
    assert steady_window(spec, 0.0, fed, ended, **more) == expected


def test_affinity_keeps_a_group_at_its_endpoint() -> None:
    picker = EndpointPicker("affinity", [4, 7])
    assert {picker.pick(number, 3) for number in range(5)} == {7}
    assert picker.groups_of(4, 5) == [0, 2, 4] and picker.groups_of(7, 5) == [1, 3]


def test_least_inflight_prefers_the_idle_one() -> None:
    picker = EndpointPicker("least-inflight", [0, 1, 2])
    for place in (0, 0, 2):
        picker.started(place)
    assert picker.pick(0, None) == 1
    picker.ended(0, None)
    picker.ended(0, None)
    picker.started(1)
    assert picker.pick(1, None) == 0


def test_an_endpoint_without_connections_is_out_and_others_get_its_requests() -> None:
    picker = EndpointPicker("balanced", [0, 1])
    for kind in ("connect", "connect", None, *["connect"] * REFUSALS):
        assert not picker.is_removed(1)
        picker.started(1)
        picker.ended(1, kind)
    assert picker.is_removed(1)
    assert {picker.pick(number, None) for number in range(4)} == {0}
    picker.started(0)
    for _ in range(REFUSALS):
        picker.ended(0, "connect")
    assert picker.pick(0, None) is None


def test_repeats_alternate_the_order_and_isolated_goes_from_endpoint_to_endpoint() -> None:
    plan = BenchPlan(concurrency=[1, 2], repeats=2)
    loads = [(one.number, one.load, one.repeat) for one in plan_stages(plan, ["a"])]
    assert loads == [(0, "c=1", 0), (1, "c=2", 0), (2, "c=2", 1), (3, "c=1", 1)]
    alone = plan_stages(BenchPlan(concurrency=[4], routings=["isolated"]), ["a", "b"])
    assert [one.only for one in alone] == ["a", "b"]


def test_names_tell_loads_apart() -> None:
    both = {"ways": ["chat", "list"], "routings": ["balanced", "affinity"]}
    names = [one.load for one in plan_stages(BenchPlan(concurrency=[1], rates=[2.5], **both), "a")]
    assert len(set(names)) == len(names) == 8
    assert names[0] == "c=1 chat balanced" and names[-1] == "rate=2.5 list affinity"


def test_options_go_before_the_preset() -> None:
    assert make_plan("saturation", {"rates": (3.0,)}).concurrency == ()
    assert make_plan("quick", {"requests": 9}).seconds is None
    assert make_plan("quick", {"output_tokens": 9}).output_tokens == 9


def test_a_preset_is_over_in_its_time() -> None:
    quick, saturation = make_plan("quick", {}), make_plan("saturation", {})
    assert quick.seconds and saturation.seconds
    assert (quick.seconds + quick.drain) * len(quick.concurrency) <= 60
    assert saturation.seconds * len(saturation.concurrency) <= 330


def stage_row(seconds: float = 60.0, **fields: object) -> LoadStageRow:
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
    assert over_saturated(stage_row(), queue(rate, 10.0)) == over
    assert not over_saturated(stage_row(), queue(rate, 10.0, seconds=0.5)), "few prove nothing"


def test_requests_that_never_began_are_waiting_too() -> None:
    rows = [RequestSummary(0, n / 10, n / 10, n / 5, "unfinished") for n in range(300)]
    assert over_saturated(stage_row(), rows)


def swept(capacity: float, one: float) -> tuple[list[str], Saturation]:
    """A sweep of a fleet that serves ``capacity`` calls a second, ``one`` with one in flight."""

    async def send(spec: LoadStage) -> tuple[LoadStageRow, list[RequestSummary]]:
        row = stage_row(concurrency=spec.concurrency, rate=spec.rate)
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
    names, found = swept(capacity=10.0, one=2.0)
    assert names[:5] == ["c=1", "c=2", "c=4", "c=8", "c=16"]
    assert names[5].startswith("rate=")
    assert found.best_rate == pytest.approx(10, rel=0.02) and found.concurrency == 8
    assert found.sustained_rate is not None and 7 <= found.sustained_rate <= 10.6


def test_it_ends_where_nothing_answers_and_where_nothing_saturates() -> None:
    assert swept(capacity=0.001, one=0.0001)[0] == ["c=1"]
    names, found = swept(capacity=1e4, one=0.5)
    assert f"c={MOST_CONCURRENCY}" in names and found.concurrency == MOST_CONCURRENCY
