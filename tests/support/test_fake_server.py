"""Faults of a client that the scripted server finds, which would pass unnoticed otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_server import FakeServer
from support.proxy_calls import post_chat
from support.replies import ok, tool_call
from support.server_requests import complaint


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "not a list with entries"),
        ([{"role": "robot", "content": "id=r1"}], "no known role"),
        ([{"role": "user", "content": None}], "no content"),
        ([{"role": "assistant", "tool_calls": [tool_call("f", {"a": 1})]}], "not an object"),
        ([{"role": "assistant", "tool_calls": [tool_call("f", '"{}"')]}], "not an object"),
        ([{"role": "tool", "tool_call_id": "x", "content": "1"}], "was not made"),
    ],
)
def test_what_a_malformed_conversation_lacks_is_named(messages: Any, words: str) -> None:
    assert words in (complaint("chat", {"model": "m", "messages": messages}) or "")


def test_a_malformed_request_is_refused_and_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="no known role"), FakeServer() as fs:
        assert post_chat(fs.url, messages=[{"role": "robot", "content": "id=r1"}]) == 400


def test_a_row_that_the_script_does_not_know_fails_the_test() -> None:
    with (
        pytest.raises(AssertionError, match="no reply is scripted"),
        FakeServer({"r1": [ok()]}) as fs,
    ):
        post_chat(fs.url, "r2")
