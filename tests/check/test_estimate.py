"""Tokens by the tokenizers of servers, and from the rows looked at to all rows."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.check.estimate import (
    Counted,
    ServerTokenizer,
    SimTokenizer,
    choose_rows,
    cost_report,
    count_sample,
    estimate_sizes,
    read_price,
    token_report,
    too_long_rows,
)
from bagent.check.sample import Sampled
from bagent.errors import UsageError
from bagent.money.prices import Price
from bagent.sim import tokens
from bagent.types import Row
from support.http_servers import serve_app

WORDS = ("tokenize", "a tokenizer")


def one(text: str, number: int = 1, *, asked: int | None = None, sent: int = 100) -> Sampled:
    settings = CallSettings("m", {}, {}, max_tokens=asked)
    messages = [{"role": "user", "content": text}]
    request = Request(settings, encode_payload(messages), messages=messages, max_tokens=sent)
    return Sampled(
        Row(number, number, f"r{number}", {}, "r.jsonl", number), request, name=hash(text)
    )


def test_definitions_of_tools_are_tokens_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "x" * 800}}]
    plain = {"messages": [{"role": "user", "content": "x"}]}
    requests = [
        Request(CallSettings("m", {}, {}), encode_payload(body), body=body)
        for body in (plain, {**plain, "tools": tools})
    ]
    row = Row(1, 1, "r1", {}, "b.jsonl", 1)
    alone, with_tools = estimate_sizes([Sampled(row, request) for request in requests], {}).tokens
    assert alone is not None
    assert with_tools == pytest.approx(alone + len(encode_payload(tools)) / 4)


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


def test_totals_are_of_all_rows_and_rows_that_cannot_be_sent_take_no_tokens() -> None:
    broken = Sampled(Row(2, 2, "r2", {}, "r.jsonl", 2), None, "bad")
    sample = [one("a", 1, sent=10), one("b", 2, sent=30), broken, broken]
    sizes = estimate_sizes(sample, {0: Counted(10), 1: Counted(20)})
    report = token_report(sample, sizes, 1000, WORDS)
    assert (report.least, report.median, report.most, report.mean) == (10, 15, 20, 15.0)
    assert (report.prompts, report.answers_at_most) == (7_500, 10_000)
    nothing = token_report([], estimate_sizes([], {}), 0, WORDS)
    assert (nothing.least, nothing.mean, nothing.prompts, nothing.answers_at_most) == (None,) * 4
    repeated = [one("a"), one("b"), one("a"), one("a")]
    assert token_report(repeated, estimate_sizes(repeated, {}), 4, WORDS).repeats == 2


def test_without_a_tokenizer_a_token_is_four_bytes_and_lengths_are_about() -> None:
    assert estimate_sizes([one("é" * 188)], {}).tokens == (100.0,)
    long = [one("a" * 8000, asked=10)]
    (row,) = too_long_rows(long, estimate_sizes(long, {}), 1000)
    assert row.error.startswith("about 2,006 prompt tokens")
    assert too_long_rows(long, estimate_sizes(long, {}), None) == []


def test_a_row_does_not_fit_when_prompt_and_answer_exceed_the_context() -> None:
    """An automatic limit of the answer shrinks, so that only the prompt counts."""
    sample = [one("a", n, asked=100) for n in (1, 2, 3)]
    counts = {0: Counted(900), 1: Counted(901), 2: Counted(2000)}
    found = too_long_rows(sample, estimate_sizes(sample, counts), 1000)
    assert [(row.id, row.line) for row in found] == [("r2", 2), ("r3", 3)]
    assert found[0].error == "901 prompt tokens and 100 for the answer are more than 1,000"
    automatic = [one("a", n, sent=400) for n in (1, 2)]
    sizes = estimate_sizes(automatic, {0: Counted(984), 1: Counted(985)})
    found = too_long_rows(automatic, sizes, 1000)
    assert [row.id for row in found] == ["r2"]


@pytest.mark.parametrize("text", ["", "1,2,3", "a,b", "-1,2", "nan,1"])
def test_a_price_is_two_numbers(text: str) -> None:
    assert read_price(" 0.15 , 3 ") == (0.15, 3.0)
    with pytest.raises(UsageError, match="not a price"):
        read_price(text)


PRICE = Price("", "", 0.5, 2.0, cached=0.1, batch=0.5)


def test_cost_is_per_million_tokens() -> None:
    sample = [one("a", sent=500)]
    sizes = estimate_sizes(sample, {0: Counted(1000)})
    found = cost_report(PRICE, token_report(sample, sizes, 2000, WORDS), 2000, 400.0)
    costs = (found.prompts_usd, found.answers_usd_at_most, found.total_usd_at_most)
    assert costs == pytest.approx((1.0, 2.0, 3.0))
    modes = {one.mode: one.usd for one in found.modes}
    assert modes["single"] == pytest.approx(3.0)
    assert modes["cached"] == pytest.approx(3.0 - 1999 * 400 * 0.4 / 1e6)
    assert modes["provider batch"] == pytest.approx(1.5)
    assert modes["own fleet"] is None
    growing = token_report(sample, sizes, 10, WORDS, most=40)
    assert cost_report(PRICE, growing, 10, 0.0).total_usd_at_most is None


Json = Any
Answer = Callable[[str, Json], tuple[int, Json]]
SETTINGS = CallSettings("m", {}, {})


def chat(text: str, place: int = 0) -> Sampled:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": text}]
    request = Request(SETTINGS, encode_payload(messages), messages=messages)
    return Sampled(Row(place, place, None, {}, "r.jsonl", place + 1), request)


def raw(text: str) -> Sampled:
    request = Request(SETTINGS, encode_payload(text), prompt=text, path="/completions")
    return Sampled(Row(0, 0, None, {}, "r.jsonl", 1), request)


def ask(answer: Answer, sample: list[Sampled]) -> tuple[dict[int, Counted], list[tuple[str, Json]]]:
    """Return the counts by a server that gives ``answer``, and what it was asked."""
    asked: list[tuple[str, Json]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append((request.path, msgspec.json.decode(await request.read())))
        status, body = answer(*asked[-1])
        return web.json_response(body, status=status)

    async def run() -> dict[int, Counted]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        async with serve_app(app) as url:
            transport = Transport()
            endpoint = Endpoint("e", f"{url}/v1")
            try:
                return await count_sample(sample, ServerTokenizer(transport, endpoint, "m"))
            finally:
                await transport.close()

    return asyncio.run(run()), asked


def test_vllm_counts_messages_with_its_chat_template() -> None:
    def vllm(path: str, body: Json) -> tuple[int, Json]:
        assert path == "/tokenize"
        return 200, {"count": 9, "max_model_len": 99, "tokens": [7] * 9, "token_strs": None}

    sample = chat("hello")
    counted, asked = ask(vllm, [sample])
    assert counted == {0: Counted(9, struct.pack("<9I", *[7] * 9))}
    assert asked[0][1] == {"model": "m", "messages": sample.request.messages}


def test_llama_cpp_counts_the_text_that_its_template_makes() -> None:
    def llama(path: str, body: Json) -> tuple[int, Json]:
        if path == "/apply-template":
            return 200, {"prompt": "|".join(one["content"] for one in body["messages"])}
        return 200, {"tokens": list(body.get("content", "").encode())}

    counted, asked = ask(llama, [chat("abc"), chat("abcd"), raw("xy")])
    assert [counted[place].tokens for place in range(3)] == [5, 6, 2]
    assert counted[0].packed == struct.pack("<5I", *b"S|abc")
    questions = [body for path, body in asked if path == "/tokenize" and "content" in body]
    assert {"content": "S|abc", "add_special": True, "parse_special": True} in questions


def test_a_prompt_that_the_server_refuses_leaves_the_others_counted() -> None:
    def strict(path: str, body: Json) -> tuple[int, Json]:
        if path != "/tokenize" or body["messages"][1]["content"] == "bad":
            return 400, {"error": {"message": "no"}}
        return 200, {"count": 3, "tokens": [1, 2, 3]}

    broken = Sampled(Row(0, 0, None, {}, "r.jsonl", 1), None, "bad")
    counted, asked = ask(strict, [chat("a"), chat("bad"), chat("b"), broken])
    assert counted.keys() == {0, 2}
    assert len([path for path, _ in asked if path == "/tokenize"]) == 3


def test_an_answer_of_another_shape_counts_nothing() -> None:
    for answer in ([1, 2], {"count": True}, {"count": "9"}, {"tokens": "x"}, None):
        assert ask(lambda path, body, a=answer: (200, a), [chat("a")])[0] == {}  # type: ignore[misc]
    rows = [chat("a", n) for n in range(9)]
    counted, asked = ask(lambda path, body: (404, {"error": "no"}), rows)
    assert (counted, len(asked)) == ({}, 1), "a route that is missing is asked for once"


def test_the_simulated_tokenizer_counts_what_the_engine_would() -> None:
    one = chat("four score and seven years ago")
    counted = asyncio.run(SimTokenizer().count(one))
    assert one.messages is not None
    packed = tokens.pack(tokens.render(one.messages))
    assert counted == Counted(len(packed) // 4, packed)


def test_few_rows_are_all_counted_and_of_many_the_longest_and_a_spread() -> None:
    assert choose_rows([5, 1, 9], limit=4, longest=1) == [0, 1, 2]
    sizes = [1] * 100
    sizes[57] = sizes[31] = 50
    indexes = choose_rows(sizes, limit=10, longest=2)
    assert len(indexes) == 10
    assert {31, 57} <= set(indexes)
    assert indexes[0] < 10 and indexes[-1] > 80
