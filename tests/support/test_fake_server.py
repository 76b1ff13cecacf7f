"""The scripted server itself: what would pass unnoticed in the tests that rely on it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from support import replies
from support.fake_server import FakeServer
from support.replies import ok, status

Json = Any


def chat(row: str, **fields: Json) -> dict[str, Json]:
    return {"model": "m", "messages": [{"role": "user", "content": f"id={row} text"}], **fields}


async def post(url: str, *bodies: Json, path: str = "/chat/completions") -> list[tuple[int, Json]]:
    """Send the bodies at once; -1 stands for a connection that was dropped."""
    async with aiohttp.ClientSession() as session:

        async def one(body: Json) -> tuple[int, Json]:
            try:
                async with session.post(url + path, json=body) as answer:
                    return answer.status, await answer.json(content_type=None)
            except aiohttp.ClientError:
                return -1, None

        return await asyncio.gather(*map(one, bodies))


def send(url: str, *bodies: Json, path: str = "/chat/completions") -> list[tuple[int, Json]]:
    return asyncio.run(post(url, *bodies, path=path))


def text_of(answer: tuple[int, Json]) -> str:
    return answer[1]["choices"][0]["message"]["content"]


async def read_stream(url: str, body: Json) -> tuple[bytes, bool]:
    """Return the bytes of a streamed answer, and whether it ended well."""
    got = b""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/chat/completions", json=body | {"stream": True}) as answer,
    ):
        try:
            async for piece in answer.content.iter_any():
                got += piece
        except aiohttp.ClientError:
            return got, False
    return got, True


def test_each_row_walks_through_its_own_replies_and_stays_at_the_last() -> None:
    with FakeServer({"r1": [status(503), ok("yes")], "*": [replies.echo()]}) as fs:
        first = send(fs.url, chat("r1"))
        later = send(fs.url, chat("r1"), chat("r1"), chat("r2"))
        assert first[0][0] == 503
        assert [text_of(answer) for answer in later] == ["yes", "yes", "id=r2 text"]
        assert (fs.count("r1"), fs.count("r2")) == (3, 1)
        assert fs.of("r2")[0].body["messages"][0]["content"] == "id=r2 text"


def test_one_bad_row_fails_a_list_call_and_costs_the_others_no_reply() -> None:
    script = {"r1": [ok("first"), ok("second")], "r2": [status(400), ok("good")]}
    body = {"model": "m", "prompt": ["id=r1", "id=r2"]}
    with FakeServer(script) as fs:
        ((bad, _),) = send(fs.url, body, path="/completions")
        ((good, answer),) = send(fs.url, body, path="/completions")
    assert (bad, good) == (400, 200)
    assert [choice["text"] for choice in answer["choices"]] == ["first", "good"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "not a list with entries"),
        ([{"role": "robot", "content": "id=r1"}], "no known role"),
        ([{"role": "user", "content": None}], "no content"),
        ([{"role": "assistant", "tool_calls": [replies.tool_call("f", {"a": 1})]}], "not a string"),
        ([{"role": "assistant", "tool_calls": [replies.tool_call("f", '"{}"')]}], "to an object"),
        ([{"role": "tool", "tool_call_id": "x", "content": "1"}], "was not made"),
    ],
)
def test_a_malformed_conversation_is_refused_and_remembered(messages: Json, words: str) -> None:
    with FakeServer(allow_faults=True) as fs:
        assert send(fs.url, {"model": "m", "messages": messages})[0][0] == 400
        assert words in fs.faults[0]


def test_a_row_that_the_script_does_not_know_fails_the_test() -> None:
    with (
        pytest.raises(AssertionError, match="no reply is scripted"),
        FakeServer({"r1": [ok()]}) as fs,
    ):
        send(fs.url, chat("r2"))


def test_rate_and_capacity_refuse_what_is_above_them() -> None:
    bodies = [chat(f"r{n}") for n in range(8)]
    with FakeServer(rate=5) as fs:
        assert sorted(code for code, _ in send(fs.url, *bodies)) == [200] * 5 + [429] * 3
    with FakeServer({"*": [replies.gated(ok())]}, capacity=3) as fs:

        async def main() -> list[tuple[int, Json]]:
            task = asyncio.create_task(post(fs.url, *bodies))
            await asyncio.to_thread(fs.wait_for, 5, "finished")
            await asyncio.to_thread(fs.release)
            return await task

        assert sorted(code for code, _ in asyncio.run(main())) == [200] * 3 + [503] * 5


def test_faults_of_the_connection_reach_the_client() -> None:
    script = {
        "closed": [replies.close()],
        "reset": [replies.close(reset=True)],
        "cut": [replies.cut_body(ok("a long enough answer"))],
        "odd": [replies.wire(b"nonsense\r\n\r\n")],
        "hang": [replies.hang(0.05)],
    }
    with FakeServer(script) as fs:
        answers = send(fs.url, *[chat(row) for row in script])
        assert [code for code, _ in answers] == [-1] * 5
        assert {seen.row_id: seen.answered for seen in fs.requests}["closed"] is None


@pytest.mark.parametrize(
    ("end", "well", "tail"),
    [("done", True, b"data: [DONE]\n\n"), ("close", True, b"}\n\n"), ("cut", False, b'{"cho')],
)
def test_a_scripted_stream_ends_as_told(end: Any, well: bool, tail: bytes) -> None:
    chunks = [replies.delta("a"), replies.delta("b")] + (['data: {"cho'] if end == "cut" else [])
    with FakeServer({"*": [replies.stream(chunks, end, split=7)]}) as fs:
        got, ended_well = asyncio.run(read_stream(fs.url, chat("r1")))
    assert ended_well is well
    assert got.endswith(tail)
