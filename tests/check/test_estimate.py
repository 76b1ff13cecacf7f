"""From the rows looked at to all rows."""

from __future__ import annotations

from typing import Any

import pytest

from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.check.estimate import (
    Counted,
    cost_report,
    estimate_sizes,
    max_tokens_range,
    read_price,
    token_report,
    too_long_rows,
)
from bagent.check.facts import prompt_report
from bagent.check.sample import Sampled
from bagent.errors import UsageError
from bagent.money.prices import Price
from bagent.types import Row

WORDS = ("tokenize", "a tokenizer")


def one(text: str, number: int = 1, *, asked: int | None = None, sent: int = 100) -> Sampled:
    settings = CallSettings("m", {}, {}, max_tokens=asked)
    messages = [{"role": "user", "content": text}]
    request = Request(settings, encode_payload(messages), messages=messages, max_tokens=sent)
    return Sampled(
        Row(number, number, f"r{number}", {}, "r.jsonl", number), request, name=hash(text)
    )


def body(limits: dict[str, Any]) -> Sampled:
    settings = CallSettings("m", {}, {})
    whole = {"messages": [{"role": "user", "content": "x"}], **limits}
    request = Request(settings, encode_payload(whole), body=whole)
    return Sampled(Row(1, 1, "r1", {}, "b.jsonl", 1), request)


def test_rows_that_were_not_counted_are_estimated_by_those_that_were() -> None:
    sample = [one("a" * 376), one("b" * 776), one("c" * 376)]  # sizes 400, 800, 400
    sizes = estimate_sizes(sample, {0: Counted(200), 2: Counted(200)})
    assert sizes.tokens == (200.0, 400.0, 200.0)


def test_an_image_is_told_and_not_counted_as_text() -> None:
    parts = [
        {"type": "text", "text": "a" * 376},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 90_000}},
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    request = Request(CallSettings("m", {}, {}), encode_payload(messages), messages=messages)
    sample = [Sampled(Row(0, 0, None, {}, "r", 1), request)]
    sizes = estimate_sizes(sample, {})
    assert sizes.tokens == (100.0,)
    assert token_report(sample, sizes, 1, WORDS).images == 1


def test_totals_are_of_all_rows_and_answers() -> None:
    sample = [one("a", 1, sent=10), one("b", 2, sent=30)]
    found = token_report(
        sample, estimate_sizes(sample, {0: Counted(10), 1: Counted(20)}), 1000, WORDS
    )
    assert (found.least, found.median, found.most, found.mean) == (10, 15, 20, 15.0)
    assert found.prompts == 15_000
    assert found.answers_at_most == 20_000


def test_rows_that_cannot_be_sent_take_no_tokens() -> None:
    broken = Sampled(Row(2, 2, "r2", {}, "r.jsonl", 2), None, "bad")
    sample = [one("a", 1, sent=10), broken]
    found = token_report(sample, estimate_sizes(sample, {0: Counted(10)}), 1000, WORDS)
    assert (found.prompts, found.answers_at_most) == (5_000, 5_000)
    nothing = token_report([], estimate_sizes([], {}), 0, WORDS)
    assert (nothing.least, nothing.mean, nothing.prompts, nothing.answers_at_most) == (None,) * 4
    repeated = [one("a"), one("b"), one("a"), one("a")]
    assert token_report(repeated, estimate_sizes(repeated, {}), 4, WORDS).repeats == 2


def test_without_a_tokenizer_a_token_is_four_bytes_and_lengths_are_about() -> None:
    assert estimate_sizes([one("a" * 376)], {}).tokens == (100.0,)
    assert estimate_sizes([one("é" * 188)], {}).tokens == (100.0,)
    long = [one("a" * 8000, asked=10)]
    assert too_long_rows(long, estimate_sizes(long, {}), 1000)[0].error.startswith(
        "about 2,006 prompt tokens"
    )
    assert too_long_rows(long, estimate_sizes(long, {}), None) == []


def test_a_row_does_not_fit_when_prompt_and_answer_exceed_the_context() -> None:
    """An automatic limit of the answer shrinks, so that only the prompt counts."""
    sample = [one("a", n, asked=100) for n in (1, 2, 3)]
    counts = {0: Counted(900), 1: Counted(901), 2: Counted(2000)}
    found = too_long_rows(sample, estimate_sizes(sample, counts), 1000)
    assert [(row.id, row.line) for row in found] == [("r2", 2), ("r3", 3)]
    assert found[0].error == "901 prompt tokens and 100 for the answer are more than 1,000"
    automatic = [one("a", n, sent=400) for n in (1, 2)]
    found = too_long_rows(
        automatic, estimate_sizes(automatic, {0: Counted(984), 1: Counted(985)}), 1000
    )
    assert [row.id for row in found] == ["r2"]


@pytest.mark.parametrize(
    ("text", "price"), [("0.15,0.60", (0.15, 0.6)), (" 0 , 3 ", (0.0, 3.0)), (None, None)]
)
def test_a_price_is_two_numbers(text: str | None, price: Any) -> None:
    assert read_price(text) == price


@pytest.mark.parametrize("text", ["", "1", "1,2,3", "a,b", "-1,2", "nan,1", "1,inf"])
def test_another_price_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a price"):
        read_price(text)


def test_max_tokens_is_the_range_that_is_sent() -> None:
    found = max_tokens_range([one("a", sent=10), one("b", sent=30)], automatic=True)
    assert (found.least, found.most, found.automatic) == (10, 30, True)


def test_limits_of_request_bodies_are_read_by_both_names() -> None:
    bodies = [body({"max_tokens": 5}), body({"max_completion_tokens": 9})]
    found = max_tokens_range(bodies, automatic=False)
    assert (found.least, found.most) == (5, 9)
    assert max_tokens_range([*bodies, body({})], automatic=False).most is None


PRICE = Price("", "", 0.5, 2.0, cached=0.1, batch=0.5)


def test_cost_is_per_million_tokens() -> None:
    sample = [one("a", sent=500)]
    tokens = token_report(sample, estimate_sizes(sample, {0: Counted(1000)}), 2000, WORDS)
    found = cost_report(PRICE, tokens, 2000, 400.0)
    assert found.prompts_usd == pytest.approx(1.0)
    assert found.answers_usd_at_most == pytest.approx(2.0)
    assert found.total_usd_at_most == pytest.approx(3.0)
    modes = {one.mode: one.usd for one in found.modes}
    assert modes["single"] == pytest.approx(3.0)
    assert modes["cached"] == pytest.approx(3.0 - 1999 * 400 * 0.4 / 1e6)
    assert modes["provider batch"] == pytest.approx(1.5)
    assert modes["own fleet"] is None


def test_where_prompts_grow_no_most_is_given_for_the_total() -> None:
    sample = [one("a", sent=500)]
    sizes = estimate_sizes(sample, {0: Counted(1000)})
    tokens = token_report(sample, sizes, 10, WORDS, most=40)
    assert cost_report(PRICE, tokens, 10, 0.0).total_usd_at_most is None


def test_definitions_of_tools_are_tokens_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "x" * 800}}]
    line = body({"tools": tools})
    alone, with_tools = (estimate_sizes([s], {}).tokens[0] for s in (body({}), line))
    assert alone is not None
    assert with_tools == pytest.approx(alone + len(encode_payload(tools)) / 4)
    assert prompt_report(line, estimate_sizes([line], {0: Counted(9)}), 0).counted is False


def test_without_a_price_every_cost_is_unknown() -> None:
    sample = [one("a")]
    found = cost_report(None, token_report(sample, estimate_sizes(sample, {}), 1, WORDS), 1, 0.0)
    assert found.prompts_usd is found.total_usd_at_most is found.price_in is None
    assert found.modes == ()
