"""One request and what is noted of it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import Transport
from bagent.bench.client import send_request
from bagent.bench.records import RequestRow
from bagent.bench.workload import LoadRequest
from support.backend_calls import raw_server
from support.fake_server import FakeServer
from support.replies import (
    ABSENT,
    Reply,
    close,
    delta,
    hang,
    ok,
    ok_reasoning,
    status,
    stream,
    usage_chunk,
)
from support.response_bodies import sse

CHAT = (
    b'{"model":"fake-model","messages":[{"role":"user","content":"id=r"}],"stream":true,'
    b'"stream_options":{"include_usage":true}}'
)
LIMITS = Timeouts(connect=60.0, first_token=60.0, idle=60.0, total=60.0)


async def send(
    url: str, row: RequestRow, limits: Timeouts = LIMITS, request: LoadRequest | None = None
) -> RequestRow:
    """Send one request by a clock that goes on by 1 at each look, and return its row."""
    transport, ticks = Transport(), itertools.count(1)
    load = request or LoadRequest("/chat/completions", CHAT, True)
    try:
        await send_request(
            transport, Endpoint("e", url), load, row, limits, lambda: float(next(ticks))
        )
    finally:
        await transport.close()
    return row


def new_row() -> RequestRow:
    return RequestRow(0, 0, 0, "e", "chat", -1.0)


def sent(reply: Reply, limits: Timeouts = LIMITS, request: LoadRequest | None = None) -> RequestRow:
    """The row of one request that is answered with ``reply``."""
    with FakeServer({"*": [reply]}, allow_faults=True, flavour="vllm") as fs:
        return asyncio.run(send(fs.url, new_row(), limits, request))


def test_a_stream_tells_when_it_began_and_ended_and_its_tokens() -> None:
    row = sent(ok("one two three four"))
    assert (row.status, row.error_kind, row.code) == ("ok", None, 200)
    assert row.scheduled == row.sent == 1.0
    assert row.first_byte and row.first_token and row.last_token
    assert row.sent < row.first_byte and row.first_token < row.done and row.last_token < row.done
    assert row.completion_tokens and not row.estimated
    assert row.opened
    row = sent(ok_reasoning("four words of answer", "some words of thinking"))
    assert row.first_token and row.first_answer
    assert row.first_token < row.first_answer, "thinking is no answer"


async def stream_and_note(chunks: list[Any]) -> RequestRow:
    """The row of a request whose answer's next chunk is sent once the one before was noted."""
    row = new_row()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"id=r")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for number, chunk in enumerate(chunks[:-2], 1):
            writer.write(sse(chunk))
            while len(row.chunk_at) < number:
                await asyncio.sleep(0.001)
        writer.write(b"".join(map(sse, [*chunks[-2:], "data: [DONE]\n\n"])))

    async with raw_server(serve) as port:
        return await send(f"http://127.0.0.1:{port}/v1", row)


async def test_tokens_are_known_piece_by_piece_only_where_each_is_told() -> None:
    chunks = [
        {**delta("a"), "usage": {"prompt_tokens": 5, "completion_tokens": 1}},
        {**delta("b c"), "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
        delta(finish_reason="stop"),
        usage_chunk(5, 3),
    ]
    row = await stream_and_note(chunks)
    assert row.status == "ok", row.error
    assert row.chunk_tokens == [1, 3] and len(row.chunk_at) == 2
    row = await stream_and_note([delta("a"), delta("b"), *chunks[2:]])
    assert len(row.chunk_at) == 2 and row.chunk_tokens == []


@pytest.mark.parametrize("usage", [[usage_chunk(5, 0)], [usage_chunk(5, None)], []])
def test_without_a_usage_to_believe_pieces_are_counted_and_that_is_said(usage: list[Any]) -> None:
    row = sent(stream([delta("a"), delta("b"), delta(finish_reason="stop"), *usage]))
    assert (row.status, row.prompt_tokens) == ("ok", 5 if usage else None)
    assert (row.completion_tokens, row.estimated) == (2, True)
    chunks = [delta(""), delta("yes"), delta(finish_reason="stop"), usage_chunk(5, 3)]
    row = sent(stream(chunks))
    assert (row.completion_tokens, row.estimated, sum(row.chunk_count)) == (3, False, 1)


@pytest.mark.parametrize(
    ("reply", "kind", "code"),
    [
        (status(500), "overloaded", 500),
        (close(), "connect", None),
        (hang(), "timeout", None),
        (stream([delta("a")]), "bad_response", 200),
        (ok(""), "empty", 200),
    ],
)
def test_failures_have_a_kind_and_are_not_sent_again(
    reply: Reply, kind: str, code: int | None
) -> None:
    short = Timeouts(connect=60.0, first_token=0.3, idle=0.3, total=0.3)
    row = sent(reply, short if reply.action == "hang" else LIMITS)
    assert (row.status, row.error_kind, row.code) == ("failed", kind, code), row.error
    assert row.error and row.done > row.sent


def test_a_list_of_prompts_is_one_request_with_the_tokens_of_all() -> None:
    body = b'{"model":"fake-model","prompt":["id=a","id=b","id=c"],"max_tokens":8}'
    prompts = LoadRequest("/completions", body, False, 3)
    row = sent(ok("one two"), request=prompts)
    assert (row.status, row.size, row.first_token) == ("ok", 3, None)
    assert row.completion_tokens == 6
    row = sent(ok("", usage=ABSENT), request=prompts)
    assert (row.status, row.error_kind) == ("failed", "empty")


def test_a_request_that_is_given_up_keeps_what_came() -> None:
    async def main(url: str) -> RequestRow:
        row = new_row()
        work = asyncio.ensure_future(send(url, row))
        while not row.chunk_at:
            await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait([work])
        return row

    chunks = [delta("a"), delta("b"), delta(finish_reason="stop")]
    with FakeServer({"*": [stream(chunks, gap=0.5)]}, allow_faults=True) as fs:
        row = asyncio.run(main(fs.url))
    assert row.status == "unfinished" and row.done > row.sent
    assert row.first_token is not None and row.completion_tokens == 1
