"""Streamed messages put together, however they are cut into bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from bagent.backends.anthropic_stream import AnthropicStream
from bagent.types import Failure, Reply
from support.provider_protocols import AnthropicWire, ModelAnswer, sse

SAY = ModelAnswer(text="hällo", calls=(("t1", "f", {"a": 1}), ("t2", "g", {})), thought="hm")


def reader(events: Sequence[bytes]) -> AnthropicStream:
    ticks = iter(range(1, 10_000))
    found = AnthropicStream(0.0, lambda: float(next(ticks)))
    for event in events:
        found.feed(event)
    return found


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 7, 4096])
def test_bytes_may_be_cut_anywhere_and_lines_end_in_every_way(size: int, end: bytes) -> None:
    raw = b"".join(AnthropicWire().events(SAY)).replace(b"\n", end)
    found = reader([raw[at : at + size] for at in range(0, len(raw), size)]).result()
    assert isinstance(found, Reply)
    assert (found.text, found.reasoning) == ("hällo", "hm")
    assert [call.arguments for call in found.tool_calls] == ['{"a":1}', "{}"]
    assert found.blocks is not None
    assert found.blocks[0] == {"type": "thinking", "thinking": "hm", "signature": "s1g=="}


def test_a_tool_call_is_there_as_soon_as_its_block_ends() -> None:
    events = AnthropicWire().events(SAY)
    found = reader([])
    seen = []
    for event in events:
        found.feed(event)
        seen.append(len(found.tool_calls))
    first = seen.index(1)
    assert b"content_block_stop" in events[first]
    assert first < len(events) - 3


def test_counts_are_cumulative_and_the_last_ones_hold() -> None:
    found = reader(AnthropicWire().events(ModelAnswer(completion=41))).result()
    assert isinstance(found, Reply)
    assert (found.usage.prompt, found.usage.completion) == (30, 41)


def test_pings_are_no_sign_of_an_answer() -> None:
    ping = sse({"type": "ping"}, "ping")
    found = reader([ping, ping])
    assert (found.pieces, found.first_token) == (0, None)


@pytest.mark.parametrize("kept", range(1, 8))
def test_a_stream_without_its_stop_reason_is_no_answer(kept: int) -> None:
    events = AnthropicWire().events(ModelAnswer(text="hello world"))
    found = reader(events[:kept]).result()
    assert isinstance(found, Failure)
    assert (found.kind, found.passing) == ("bad_response", True)


def test_a_stream_cut_after_its_stop_reason_is_whole() -> None:
    events = AnthropicWire().events(ModelAnswer())
    found = reader(events[:-1])
    assert found.whole
    assert not found.done
    assert isinstance(found.result(), Reply)


def test_garbage_among_the_events_is_a_failure_that_shows_it() -> None:
    found = reader([*AnthropicWire().events(ModelAnswer())[:3], b"data: {broken\n\n"]).result()
    assert isinstance(found, Failure)
    assert "{broken" in found.message


def test_a_page_in_place_of_a_stream_is_shown() -> None:
    found = reader([b"<h1>bad gateway</h1>\n"]).result()
    assert isinstance(found, Failure)
    assert "bad gateway" in found.message


def test_a_call_whose_block_is_never_told_to_end_has_its_arguments() -> None:
    events = [one for one in AnthropicWire().events(SAY) if b"content_block_stop" not in one]
    found = reader(events).result()
    assert isinstance(found, Reply)
    assert [json.loads(call.arguments) for call in found.tool_calls] == [
        arguments for _, _, arguments in SAY.calls
    ]


def block(index: int, start: object, *deltas: object) -> list[bytes]:
    """Return the events of one block."""
    events = [{"type": "content_block_start", "index": index, "content_block": start}]
    events += [{"type": "content_block_delta", "index": index, "delta": one} for one in deltas]
    return [
        sse(event, event["type"])
        for event in [*events, {"type": "content_block_stop", "index": index}]
    ]


def test_blocks_of_the_server_come_back_whole_and_name_the_model_that_answered() -> None:
    pieces = [{"type": "input_json_delta", "partial_json": part} for part in ('{"q":', '"x"}')]
    summary = {"type": "compaction_delta", "content": "so far", "encrypted_content": "e2"}
    handover = {"type": "fallback", "from": {"model": "first"}, "to": {"model": "second"}}
    whole = AnthropicWire().events(ModelAnswer(text="yes"))
    events = [
        whole[0],
        *block(
            0, {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, *pieces
        ),
        *block(1, {"type": "compaction", "content": None}, summary),
        *block(2, handover),
        *block(3, {"type": "text", "text": ""}, {"type": "text_delta", "text": "yes"}),
        *whole[-2:],
    ]
    reply = reader(events).result()
    assert isinstance(reply, Reply)
    assert (reply.text, reply.model, reply.tool_calls) == ("yes", "second", ())
    assert reply.blocks is not None
    assert reply.blocks[0]["input"] == {"q": "x"}
    assert (reply.blocks[1]["content"], reply.blocks[1]["encrypted_content"]) == ("so far", "e2")
