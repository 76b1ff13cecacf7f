"""What an engine's state says of the limit, look by look and against an engine that queues."""

from __future__ import annotations

from random import Random

import pytest

from bagent.backends.engines.metrics import EngineLoad
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.fleet.limits.load_feedback import (
    LoadFeedback,
    LoadVerdict,
    apply_verdict,
)
from support.queueing_engine import Client, Engine


def look(running: int, waiting: int, **fields: float) -> EngineLoad:
    """A look at an engine."""
    told = EngineLoad(at=0.0, running=running, waiting=waiting)
    for name, value in fields.items():
        told = EngineLoad(**{**{f: getattr(told, f) for f in told.__struct_fields__}, name: value})
    return told


def judge(
    signal: LoadFeedback, *loads: EngineLoad | None, in_flight: int = 100
) -> list[LoadVerdict]:
    """What ``signal`` says of each of ``loads``, two seconds apart."""
    return [signal.judge(2.0 * i, load, in_flight) for i, load in enumerate(loads)]


def actions(verdicts: list[LoadVerdict]) -> list[str]:
    return [verdict.action for verdict in verdicts]


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([look(100, 0)] * 2, ["grow", "grow"]),
        ([look(70, 30), look(100, 0)] * 4, ["hold", "grow"] * 4),
        ([look(85, 15)] * 5, ["hold"] * 5),
        ([look(50, 50, deferred=50)] * 3, ["grow"] * 3),
        (
            [look(100, 0, kv_usage=0.9, preemptions=n) for n in range(5)],
            ["grow", *["hold"] * 4],
        ),
        ([look(40, 0, preemptions=n) for n in (1000, 0, 0)], ["grow"] * 3),
        ([look(70, 0), None], ["grow", "grow"]),
        ([look(70, 30), look(70, 30), None, None], ["hold", "cut", "hold", "hold"]),
    ],
    ids=[
        "nothing waits",
        "a queue that comes and goes",
        "a short queue",
        "what waits for a grammar",
        "few preemptions",
        "a counter that a restart set back",
        "an engine that fails to tell for a moment",
        "one that fails to tell after a cut",
    ],
)
def test_a_look_at_the_engine_lets_the_limit_grow_or_holds_or_cuts_it(
    looks: list[EngineLoad | None], expected: list[str]
) -> None:
    assert actions(judge(LoadFeedback(), *looks)) == expected


def test_a_queue_that_lasts_is_a_cut_and_one_of_which_nothing_is_known_holds_nobody() -> None:
    signal = LoadFeedback()
    first, second, *_ = judge(signal, look(70, 30), look(70, 30), None, None)
    assert (first.action, second.action, second.keep) == ("hold", "cut", 0.85)
    assert second.reason == "30 requests wait in the engine, 70 run"
    assert second.least == pytest.approx(78)
    assert signal.judge(20.0, None, 100).action == "grow"


def test_beside_others_a_cut_leaves_half_of_what_runs() -> None:
    verdict = judge(LoadFeedback(), *[look(64, 500)] * 2, in_flight=300)[-1]
    assert verdict.action == "cut"
    assert verdict.least == pytest.approx(1.1 * 300 * 64 / 564 + 1)
    assert judge(LoadFeedback(), *[look(64, 500)] * 2, in_flight=60)[-1].least == 32


def test_the_queue_of_others_cuts_no_small_client() -> None:
    verdicts = judge(LoadFeedback(), *[look(64, 500)] * 5, in_flight=30)
    assert actions(verdicts) == ["hold"] * 5
    assert verdicts[-1].reason == (
        "500 requests wait in the engine, 64 run, 534 of all are others'"
    )


def test_preemptions_in_a_full_cache_hold_and_then_cut() -> None:
    looks = [look(40, 0, kv_usage=0.97, preemptions=n) for n in (10, 13, 16, 16)]
    verdicts = judge(LoadFeedback(), *looks)
    assert actions(verdicts) == ["hold", "hold", "cut", "hold"]
    assert verdicts[2].reason == "KV cache 97% used and 3 preemptions"
    assert verdicts[3].reason == "KV cache 97% used"


def answers(signal: LoadFeedback, sent: float, latency: float, first: float | None) -> None:
    """Enough answers for a judgement."""
    for _ in range(20):
        signal.add_latency(sent, latency, first)


def test_where_no_queue_is_told_a_late_first_token_holds_and_then_cuts() -> None:
    signal = LoadFeedback()
    answers(signal, 0.0, 4.0, 0.2)
    assert signal.judge(10.0, None, 20).action == "grow"
    answers(signal, 10.0, 5.2, 1.4)
    assert signal.judge(12.0, None, 20).action == "hold"
    answers(signal, 12.0, 8.0, 4.2)
    assert signal.judge(14.0, None, 40).action == "hold"
    answers(signal, 14.0, 8.0, 4.2)
    verdict = signal.judge(16.0, None, 40)
    assert (verdict.action, verdict.keep) == ("cut", 0.5)
    assert verdict.reason == "the first token takes 4.2 s instead of 0.2 s"
    assert verdict.least == pytest.approx(22)


def test_longer_answers_further_on_are_held_against_an_engine_for_ten_minutes_only() -> None:
    signal = LoadFeedback()
    answers(signal, 0.0, 1.0, None)
    signal.judge(0.0, None, 40)
    answers(signal, 5.0, 10.0, None)
    assert signal.judge(5.0, None, 40).action == "hold"
    answers(signal, 606.0, 10.0, None)
    assert signal.judge(606.0, None, 40).action == "grow"


@pytest.mark.parametrize("capacity", [8, 64])
def test_the_limit_follows_an_engine_that_loses_half_its_capacity_and_regains_it(
    capacity: int,
) -> None:
    changes: list[int] = []
    limit = InFlightLimit(16, 1024, changes=lambda value, why: changes.append(value))
    engine = Engine(capacity, Random(4))
    client = Client(engine, limit)
    for places, until in ((capacity, 160.0), (capacity // 2, 280.0), (capacity, 400.0)):
        engine.capacity = places
        client.run(until - 60)
        made = engine.made
        client.run(until)
        settled = client.between(until - 60, until)
        assert 0.9 * places <= min(settled) <= max(settled) <= 1.6 * places
        assert max(settled) <= 1.3 * min(settled) or places < 8, "it stays where it is"
        assert (engine.made - made) / 60 >= 0.95 * engine.best
    assert changes[-1] == limit.value


@pytest.mark.parametrize("capacity", [8, 64])
def test_first_tokens_alone_keep_the_limit_near_what_the_engine_runs(capacity: int) -> None:
    engine = Engine(capacity, Random(1))
    client = Client(engine, InFlightLimit(4, 1024), told=False)
    client.run(90.0)
    made = engine.made
    client.run(210.0)
    settled = client.between(90.0, 210.0)
    assert 0.9 * capacity <= min(settled) <= max(settled) <= 1.8 * capacity
    assert (engine.made - made) / 120 >= 0.95 * engine.best


def test_a_list_that_has_just_come_is_no_queue():
    load = EngineLoad(at=0.0, running=64, waiting=24)
    assert LoadFeedback().judge(0.0, load, 150).action == "hold"
    assert LoadFeedback().judge(0.0, load, 150, largest_batch=24).action == "grow"
    two = EngineLoad(at=0.0, running=64, waiting=50)
    assert LoadFeedback().judge(0.0, two, 150, largest_batch=24).action == "hold"


@pytest.mark.parametrize(
    ("load", "in_flight", "largest_batch", "most"),
    [
        (look(300, 0, kv_usage=0.5), 100, 0, 0.75 * 600 - 200),
        (look(100, 0, kv_usage=0.25), 430, 0, 4 * 0.75 * 400),
        (look(100, 0, kv_usage=0.25), 190, 0, 0.75 * 400),
        (look(100, 0, kv_usage=0.25), 430, 64, 0.75 * 400),
    ],
    ids=[
        "shared with other clients",
        "a poll meets one of four engines behind the address",
        "some rows in transit",
        "some ended in their batch",
    ],
)
def test_the_kv_cache_has_room_for_so_many_rows(load, in_flight, largest_batch, most):
    verdict = LoadFeedback().judge(0.0, load, in_flight, largest_batch)
    assert verdict.most == pytest.approx(most)


def test_the_limit_grows_no_further_than_the_kv_cache_has_room_for():
    """256 rows fill 0.4 of the cache: 480 fill 0.75 of it, and the limit is not 512."""
    limit = InFlightLimit(256, 1024)
    feedback = LoadFeedback()
    for at, running, usage in (
        (0.0, 256, 0.4),
        (2.0, 256, 0.4),
        (4.0, 480, 0.75),
        (6.0, 480, 0.75),
    ):
        verdict = feedback.judge(at, look(running, 0, kv_usage=usage), running)
        apply_verdict(limit, verdict, at)
    assert limit.value == 480
    for _ in range(2000):
        limit.on_success(1, limit.value)
    assert limit.value == 480
