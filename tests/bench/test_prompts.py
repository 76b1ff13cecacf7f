"""Prompts of a wanted length that no cache knows."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from bagent.answers.schema.schema import OutputSchema
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.bench.client import PromptSizes, calibrate
from bagent.bench.plan import AnswerPlan, BenchTarget, Lengths
from bagent.bench.workload import (
    NONCE,
    PromptGroups,
    PromptMaker,
    fixed_fields,
    json_schema,
    stream_fields,
)
from support.fake_server import FakeServer
from support.replies import ABSENT, ok
from support.simulated_fleets import simulated


def test_no_two_texts_begin_alike_and_the_same_name_gives_the_same() -> None:
    text = PromptMaker("salt")
    beginnings = {tuple(text.unique_text(50, str(n)).split()[:NONCE]) for n in range(500)}
    assert len(beginnings) == 500
    assert text.unique_text(50, "7") == PromptMaker("salt").unique_text(50, "7")
    assert PromptMaker("other").unique_text(50, "7").split()[:NONCE] not in map(list, beginnings)
    for words in (1, 11, 20_000):
        assert len(text.unique_text(words, "a").split()) == words


def test_skewed_groups_come_by_their_rank() -> None:
    groups = PromptGroups(4, 1.0, "seed")
    counts = Counter(groups.next() for _ in range(8000))
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.15)
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.15)
    assert {groups.next([1, 3]) for _ in range(50)} == {1, 3}


def test_the_schema_of_answers_is_one() -> None:
    good = {"findings": [{"kind": "bug", "line": 123}] * 15}
    assert OutputSchema.load(json_schema(150), base=Path()).accepts(good)


def test_only_engines_that_know_it_are_asked_for_exact_lengths() -> None:
    for engine in ("vllm", "sglang", "dynamo"):
        exact = fixed_fields("m", AnswerPlan(20), engine)
        assert exact["ignore_eos"] and exact["min_tokens"] == exact["max_tokens"] == 20
    assert "ignore_eos" not in fixed_fields("m", AnswerPlan(20), "unknown")
    assert "ignore_eos" not in fixed_fields("m", AnswerPlan(20, as_json=True), "vllm")
    assert "continuous_usage_stats" in stream_fields("vllm")["stream_options"]
    assert "continuous_usage_stats" not in stream_fields(None)["stream_options"]


def lengths(url: str, wanted: PromptSizes, model: str = "simulated-8b") -> Lengths:
    async def ask() -> Lengths:
        transport = Transport()
        try:
            target = BenchTarget(Endpoint("e", f"{url}/v1"), model)
            return (await calibrate(transport, [target], wanted, "salt"))[model]
        finally:
            await transport.close()

    return asyncio.run(ask())


def test_lengths_are_measured_by_tokenize() -> None:
    with simulated("") as sim:
        chat, raw = [
            lengths(sim.urls[0], PromptSizes(500, prefix=400, chat=chat)) for chat in (True, False)
        ]
    for found in (chat, raw):
        assert found.measured == "/tokenize"
        assert found.tokens == pytest.approx(500, abs=10)
        assert found.prefix / (found.prefix + found.own) == pytest.approx(0.8, abs=0.03)
    assert chat.own + chat.prefix < raw.own + raw.prefix, "a raw text has no chat template"


def test_without_tokenize_the_usage_of_two_requests_tells() -> None:
    with FakeServer({"*": [ok()]}, allow_faults=True) as fs:
        found = lengths(fs.base, PromptSizes(200), "fake-model")
        assert len(fs.requests) == 2
    # The server counts words.
    assert found.measured == "usage of two requests"
    assert found.own == pytest.approx(200, abs=5)


def test_without_any_count_a_word_is_taken_for_a_token() -> None:
    with FakeServer({"*": [ok(usage=ABSENT)]}, allow_faults=True) as fs:
        found = lengths(fs.base, PromptSizes(200), "fake-model")
    assert (found.own, found.tokens) == (200, None)
    assert "guessed" in found.measured
