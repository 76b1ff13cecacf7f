"""Faults of a client that the scripted server finds, which would pass unnoticed otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from support import replies
from support.fake_server import FakeServer
from support.replies import ok

Json = Any


def send(url: str, body: Json) -> int:
    """Return the status of the answer to a chat."""

    async def post() -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/chat/completions", json=body) as answer,
        ):
            return answer.status

    return asyncio.run(post())


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
        assert send(fs.url, {"model": "m", "messages": messages}) == 400
        assert words in fs.faults[0]


def test_a_row_that_the_script_does_not_know_fails_the_test() -> None:
    with (
        pytest.raises(AssertionError, match="no reply is scripted"),
        FakeServer({"r1": [ok()]}) as fs,
    ):
        send(fs.url, {"model": "m", "messages": [{"role": "user", "content": "id=r2"}]})
