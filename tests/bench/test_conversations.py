"""Conversations: each turn holds what was said before, and goes where the routing says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.bench.plan import AnswerPlan, BenchTarget, Lengths, LoadConfig
from bagent.bench.routing import EndpointPicker, RunRouter
from bagent.bench.schedule import LoadStage, Recorded
from bagent.bench.workload import RequestFactory, ScheduleSlot
from support.simulated_fleets import Measure, addresses, simulated

TALK = LoadStage(number=0, load="c=1", turns=2)


def config(**fields: Any) -> LoadConfig:
    target = BenchTarget(Endpoint("e", "http://e/v1"), "m", "vllm")
    lengths = {"m": Lengths(own=12, prefix=30, per_word=1.5, extra=5.0)}
    defaults = {"answer": AnswerPlan(8), "timeouts": Timeouts(), "salt": "s", "origin": 0.0}
    return LoadConfig(targets=[target], lengths=lengths, folder="", **{**defaults, **fields})


def body(maker: RequestFactory, stage: LoadStage, slot: ScheduleSlot) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(maker.make(stage, slot, 0).body)
    return found


def test_a_second_turn_holds_the_first_and_its_answer() -> None:
    maker = RequestFactory(config(turn_tokens=30, groups=1))
    first = body(maker, TALK, ScheduleSlot(4, 0))
    text = maker.user_text(TALK, ScheduleSlot(4, 0), 0)
    assert first["messages"] == [{"role": "user", "content": text}]
    second = body(maker, TALK, ScheduleSlot(4, 0, turn=2, history=[(text, "yes")]))
    *before, last = second["messages"]
    assert before == [*first["messages"], {"role": "assistant", "content": "yes"}]
    assert len(last["content"].split()) == 20  # 30 tokens of 1.5 a word
    assert last["content"] != text


def test_what_is_replayed_has_the_recorded_lengths() -> None:
    maker = RequestFactory(config(trace=[Recorded(0.0, 65, 3), Recorded(1.0, 305, 9)]))
    stage = LoadStage(number=0, load="replay", rate=1.0, speed=1.0)
    for number, words, tokens in ((0, 40, 3), (1, 200, 9)):
        sent = body(maker, stage, ScheduleSlot(number))
        (message,) = sent["messages"]
        assert len(message["content"].split()) == words  # (tokens - 5) / 1.5
        assert sent["max_tokens"] == sent["min_tokens"] == tokens


def test_a_conversation_stays_with_affinity_and_moves_on_when_balanced() -> None:
    assert EndpointPicker("affinity", [3, 5, 7]).pick(0, None, previous=7) == 7
    assert EndpointPicker("balanced", [3, 5, 7]).pick(0, None, previous=7) == 3
    without_previous = EndpointPicker("affinity", [3, 5])
    assert without_previous.pick(1, None, previous=7) == 5


def router(limit: int | None = None) -> RunRouter:
    return RunRouter({n: Endpoint(f"e{n}", f"http://e{n}/v1") for n in range(3)}, limit)


def test_as_run_takes_the_least_busy_and_keeps_a_conversation_where_it_was() -> None:
    picker = EndpointPicker("as-run", range(3), router=router(8))
    for index in (0, 0, 0, 1, 1, 2):
        picker.started(index)
    assert picker.pick(9, None) == 2
    assert picker.pick(9, None, previous=0) == 0  # busier by a quarter of its limit
    for _ in range(3):
        picker.started(0)
    assert picker.pick(9, None, previous=0) != 0  # by more than half


def test_as_run_waits_when_no_endpoint_has_room() -> None:
    picker = EndpointPicker("as-run", range(3), router=router(1))
    for index in range(3):
        picker.started(index)
    assert picker.pick(0, None) is None and picker.full
    picker.ended(1, None)
    assert picker.pick(0, None) == 1


def test_agents_are_measured_turn_by_turn_and_hit_the_cache_where_they_stay(
    measure: Measure,
) -> None:
    with simulated("replicas=2&decode=2000&prefill=100000") as sim:
        summary = measure(
            addresses(sim),
            concurrency=[2],
            requests=6,
            seconds=None,
            input_tokens=400,
            prefix_tokens=200,
            groups=1,
            turns=2,
            think=0.05,
            turn_tokens=40,
            routings=["balanced", "affinity"],
        )
    spread, affinity = summary["loads"]
    assert spread["requests"] == affinity["requests"] == 12
    assert spread["conversations"] == affinity["conversations"] == 6
    assert affinity["conversation_p50_ms"] > affinity["e2e_p50_ms"] + 50
    turns = {(one["load"], one["turn"]): one for one in summary["turns"]}
    assert len(turns) == 4 and all(one["requests"] == 6 for one in turns.values())
    stayed, moved = turns["c=2 affinity", 2], turns["c=2 balanced", 2]
    # All of the first turn is known where it was answered; elsewhere the shared half at most.
    assert stayed["cached_share"] > 0.8 > moved["cached_share"]
    more = stayed["input_tokens"] - turns["c=2 affinity", 1]["input_tokens"]
    assert 40 <= more <= 75  # 40 tokens text, 8 answered, the template's own


def test_a_replay_sends_every_recorded_request_with_its_lengths(measure: Measure) -> None:
    trace = [Recorded(0.01 * n, 60 + 10 * n, 2 + n % 3) for n in range(30)]
    info = {"speeds": (2.0,), "routings": ["as-run"]}
    with simulated("replicas=2&decode=2000&prefill=100000") as sim:
        summary = measure(addresses(sim), trace=trace, seconds=None, **info)
    (load,) = summary["loads"]
    assert load["load"] == "replay x2"
    served = summary["endpoints"]
    assert sum(one["ok"] for one in served) == 30
    assert load["output_tokens"] == pytest.approx(3, abs=0.3)
    assert load["input_tokens"] == pytest.approx(205, rel=0.1)
