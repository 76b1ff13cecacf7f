"""Counting tokens by the tokenizers that servers have, over real HTTP."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.backends.request import CallSettings, Request, encode_payload
from bagent.check.estimate import Counted, ServerTokenizer, SimTokenizer, choose_rows, count_sample
from bagent.check.sample import Sampled
from bagent.sim import tokens
from bagent.types import Row
from support.http_servers import serve_app

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
