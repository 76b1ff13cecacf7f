"""Bedrock's events that come otherwise than they should."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bagent.backends.bedrock_stream import BedrockStream
from bagent.types import Failure, Reply

STOP: dict[str, Any] = {"messageStop": {"stopReason": "tool_use"}}
USED = {"toolUse": {"toolUseId": "a", "name": "f"}}


def start(index: int, block: Any) -> Any:
    return {"contentBlockStart": {"contentBlockIndex": index, "start": block}}


def delta(index: int, piece: Any) -> Any:
    return {"contentBlockDelta": {"contentBlockIndex": index, "delta": piece}}


def read(*events: Any) -> Reply | Failure:
    found = BedrockStream(0.0, lambda: 1.0, "m-1")
    for event in events:
        found.take(event)
    return found.result()


@pytest.mark.parametrize("last", [[], [{"contentBlockStop": {"contentBlockIndex": 0}}]])
def test_a_call_has_its_arguments_whether_its_block_is_told_to_end_or_not(last: list[Any]) -> None:
    pieces = [delta(0, {"toolUse": {"input": piece}}) for piece in ('{"n"', ":1}")]
    found = read(start(0, USED), *pieces, *last, STOP)
    assert isinstance(found, Reply)
    assert [json.loads(call.arguments) for call in found.tool_calls] == [{"n": 1}]


def test_arguments_that_are_cut_stay_visible() -> None:
    found = read(start(0, USED), delta(0, {"toolUse": {"input": '{"n":'}}), STOP)
    assert isinstance(found, Reply)
    assert [call.arguments for call in found.tool_calls] == ['{"n":']


def test_blocks_in_another_order_are_put_in_theirs() -> None:
    found = read(delta(1, {"text": "b"}), delta(0, {"text": "a"}), STOP)
    assert isinstance(found, Reply)
    assert found.text == "ab"


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"messageStart": {"role": "assistant"}}],
        [delta(0, {"text": "a"})],
        [delta(0, {"text": "a"}), {"contentBlockStop": {"contentBlockIndex": 0}}],
        [delta(0, {"text": "a"}), {"metadata": {"usage": {"inputTokens": 1}}}],
        [{"somethingNew": {}}],
    ],
)
def test_a_stream_without_a_stop_reason_is_no_answer(events: list[Any]) -> None:
    found = read(*events)
    assert isinstance(found, Failure)
    assert (found.kind, found.passing) == ("bad_response", True)
