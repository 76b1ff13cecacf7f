"""What a row takes of memory goes when it ends, without the garbage collector."""

from __future__ import annotations

import gc
import weakref

import pytest

from bagent.agents.conversation import Conversation
from bagent.agents.plan import StagePlan
from bagent.agents.token_budget import TokenBudget
from bagent.backends.request import CallSettings
from bagent.fleet.call import Delivery
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


class Host:
    """Keeps the status of what ended."""

    def __init__(self):
        self.ended: list[tuple[str, int | None]] = []

    def now(self):
        return 0.0

    def ask(self, conversation, call):
        raise AssertionError("nothing is asked again")

    def finish(self, conversation, outcome: Outcome):
        self.ended.append((outcome.status, outcome.prompt_tokens))


@pytest.mark.parametrize("good", [True, False])
def test_a_row_that_ended_is_freed_at_once(good):
    host = Host()
    plan = StagePlan("map", Prompt(), CallSettings("m", {}, {}), None, TokenBudget(None))
    data = Data(text="hello")
    gone = weakref.ref(data)
    row = Row(0, 1, "r", data, "rows.jsonl", 1)
    gc.disable()
    try:
        conversation = Conversation(plan, row, 0, host)
        call = conversation.open()
        assert call is not None
        delivery = Delivery("here", "here/1", 1.0, 2.0, 0.0)
        if good:
            call.handler.replied(call, Reply("hi", "stop", usage=Usage(prompt=7)), delivery)
        else:
            call.handler.failed(call, Failure("rejected", "no"), delivery)
        del data, row, conversation, call
        assert gone() is None
    finally:
        gc.enable()
    assert host.ended == [("ok", 7) if good else ("failed", None)]
