"""Conversations that began elsewhere, on all six backends."""

from __future__ import annotations

import json

import pytest

from bagent.types import Json, Message
from support.provider_calls import ENGINES, PROVIDERS, WEATHER, Provider, ask, call
from support.provider_protocols import ModelAnswer


@pytest.mark.parametrize("provider", [*PROVIDERS, *ENGINES], ids=lambda one: one.kind)
def test_a_conversation_that_another_server_held_goes_on(provider: Provider) -> None:
    """Ids that come again, a result that is missing, blocks of a provider that is another."""
    call_0 = {"id": "call_0", "function": {"name": "weather", "arguments": "{}"}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call_0, {**call_0, "id": "f.x:1"}]}
    foreign: list[Json] = [{"type": "thinking", "thinking": "Hm.", "signature": "else"}]
    if provider.kind == "anthropic":
        foreign = [{"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "else"}}}]
    messages: list[Message] = [
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "The weather?"},
        asked,
        {"role": "tool", "tool_call_id": "call_0", "content": "rain"},
        {"role": "tool", "tool_call_id": "f.x:1", "content": "sun"},
        {**asked, "provider_blocks": foreign},
        {"role": "user", "content": "Well?"},
        {"role": "tool", "tool_call_id": "call_0", "content": "snow"},
    ]
    talk = ask(provider, ModelAnswer(text="wet"), calls=[call(*messages, tools=(WEATHER,))])
    assert talk.reply.text == "wet"
    sent = json.dumps(talk.server.body)
    assert "provider_blocks" not in sent
    assert "else" not in sent
    assert [sent.count(word) for word in ("rain", "sun", "snow")] == [1, 1, 1]
