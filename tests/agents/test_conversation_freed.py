"""What a row takes of memory goes when it ends, without the garbage collector."""

from __future__ import annotations

import gc
import weakref

import pytest

from bagent.agents.conversation import Conversation
from bagent.agents.plan import StagePlan
from bagent.agents.token_budget import TokenBudget
from bagent.backends.request import CallSettings
from bagent.fleet.call import Call, CallResult, Delivery
from bagent.types import Failure, Outcome, Reply, Row, Usage


class Data(dict):
    """A row's fields, which can be watched."""


class Prompt:
    """A prompt of one message."""

    raw = False

    def render(self, data, extra=None):
        return [{"role": "user", "content": data["text"]}]

    def render_raw(self, data, extra=None):
        return data["text"]


@pytest.mark.parametrize("good", [True, False])
def test_a_row_that_ended_is_freed_at_once(good):
    plan = StagePlan("map", Prompt(), CallSettings("m", {}, {}), None, TokenBudget(None))
    data = Data(text="hello")
    gone = weakref.ref(data)
    row = Row(0, 1, "r", data, "rows.jsonl", 1)
    gc.disable()
    try:
        conversation = Conversation(plan, row, 0)
        call = conversation.open()
        assert isinstance(call, Call)
        delivery = Delivery("here", "here/1", 1.0, 2.0, 0.0)
        result = Reply("hi", "stop", usage=Usage(prompt=7)) if good else Failure("rejected", "no")
        if isinstance(result, Reply):
            assert conversation.evaluate(call, result, delivery) is None
        outcome = conversation.handle(call, CallResult(result, delivery))
        del data, row, conversation, call
        assert gone() is None
    finally:
        gc.enable()
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.prompt_tokens) == (("ok", 7) if good else ("failed", None))
