"""Bodies and streams of servers with any other values in their places."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagent.backends.anthropic import AnthropicStream, read_message
from bagent.backends.failures import failure_from_status
from bagent.backends.openai.chat import read_reply
from bagent.backends.openai.embeddings import read_vectors
from bagent.backends.openai.models import read_models
from bagent.backends.openai.responses import ResponsesStream, read_response
from bagent.backends.openai.stream import StreamReader
from bagent.types import Failure, Json, Reply
from support.edited_bodies import (
    CHAT,
    CHUNKS,
    EDITS,
    ERROR,
    MESSAGE,
    MESSAGE_EVENTS,
    MODELS,
    RESPONSE,
    RESPONSE_EVENTS,
    VECTORS,
    edited,
)

BODIES = {
    "chat": (CHAT, lambda raw: read_reply(raw, "application/json", {})),
    "message": (MESSAGE, lambda raw: read_message(raw, "application/json", {})),
    "response": (RESPONSE, lambda raw: read_response(raw, {})),
    "vectors": (VECTORS, lambda raw: read_vectors(raw, ["a"], {})),
}
STREAMS = {
    "chat": (CHUNKS, StreamReader),
    "message": (MESSAGE_EVENTS, AnthropicStream),
    "response": (RESPONSE_EVENTS, ResponsesStream),
}


@pytest.mark.parametrize("kind", BODIES)
def test_any_body_is_a_reply_or_a_failure(kind):
    good, read = BODIES[kind]
    assert isinstance(read(json.dumps(good).encode()), Reply)

    @given(EDITS)
    def check(edits: list[tuple[int, Json, bool]]) -> None:
        assert isinstance(read(json.dumps(edited(good, edits)).encode()), Reply | Failure)

    check()


@pytest.mark.parametrize("kind", STREAMS)
def test_any_stream_is_a_reply_or_a_failure(kind):
    good, reader = STREAMS[kind]

    def read(events: list[Json]) -> Reply | Failure:
        stream = reader(0.0, lambda: 1.0)
        for event in events:
            name = event.get("type") if isinstance(event, dict) else None
            line = f"event: {name}\n" if isinstance(name, str) and name.isascii() else ""
            stream.feed(f"{line}data: {json.dumps(event)}\n\n".encode())
        return stream.result()

    assert isinstance(read(good), Reply)

    @given(EDITS)
    def check(edits: list[tuple[int, Json, bool]]) -> None:
        assert isinstance(read(edited(good, edits)), Reply | Failure)

    check()


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("message", {"type": "content_block_start", "index": {}, "content_block": {}}),
        ("message", {"type": "content_block_delta", "index": "a", "delta": "text"}),
        ("message", {"type": "message_delta", "delta": "text"}),
        ("response", {"type": "response.completed", "response": {"output": 5}}),
    ],
)
def test_an_event_of_another_form_ends_no_run(kind, event):
    events, reader = STREAMS[kind]
    stream = reader(0.0, lambda: 1.0)
    for each in (events[0], event):
        stream.feed(f"data: {json.dumps(each)}\n\n".encode())
    assert isinstance(stream.result(), Reply | Failure)


@given(EDITS, st.sampled_from([400, 429, 503]))
def test_any_error_body_is_a_failure(edits, status):
    text = json.dumps(edited(ERROR, edits))
    assert isinstance(failure_from_status(status, text, {}), Failure)


@given(EDITS)
def test_any_list_of_models_is_read(edits):
    read_models(edited(MODELS, edits))
