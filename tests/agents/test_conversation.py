"""The steps of a conversation: a state machine that needs neither a server nor an event loop."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from bagent.agents.conversation import Conversation, ConversationState
from bagent.agents.plan import StagePlan, TokenBudget
from bagent.answers.schema.schema import OutputSchema
from bagent.backends.request import CallSettings
from bagent.fleet.call import Call, CallResult, Delivery
from bagent.types import Failure, Outcome, Reply, Row, Usage

HERE = Delivery("here", "here/1", 10.0, 12.5)


class Prompt:
    """A chat of one message."""

    raw = False

    def render(self, data, extra=None):
        return [{"role": "user", "content": data["text"]}]

    def render_raw(self, data, extra=None):
        raise AssertionError("it is a chat")


def conversation(
    *, error: str | None = None, context: int | None = None, data=None, **rules
) -> Conversation:
    schema = OutputSchema.load({"type": "integer"}, base=Path())
    plan = StagePlan("main", Prompt(), CallSettings("m", {}, {}), schema, TokenBudget(context))
    for name, value in rules.items():
        setattr(plan, name, value)
    fields = {"text": "How many?"} if data is None else data
    return Conversation(plan, Row(0, 1, "r", fields, "rows", 1, error=error), 0)


def opened(talk: Conversation) -> Call:
    """The first call, as the fleet would send it once."""
    call = talk.open()
    assert isinstance(call, Call)
    call.attempts = 1
    return call


def answer(talk: Conversation, call: Call, text: str, finish: str = "stop"):
    """The step after a reply of 10 tokens to a prompt of 7."""
    reply = Reply(text, finish, usage=Usage(prompt=7, completion=10))
    assert call.evaluate(call, reply, HERE) is None
    call.attempts = 1
    return talk.handle(call, CallResult(reply, HERE))


def test_a_good_answer_is_the_outcome():
    talk = conversation()
    outcome = answer(talk, opened(talk), "3")
    assert isinstance(outcome, Outcome)
    assert (outcome.status, bytes(outcome.output), outcome.turns) == ("ok", b"3", 1)
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.attempts) == (7, 10, 1)
    assert (outcome.started_at, outcome.finished_at, outcome.latency_ms) == (10.0, 12.5, 2500.0)
    assert outcome.first_try_valid is True


def test_an_answer_that_does_not_fit_is_asked_again_until_no_retry_is_left():
    talk = conversation(reasks=2)
    call, texts = opened(talk), []
    while isinstance(call, Call):
        texts.append([message["content"] for message in call.request.messages or ()])
        call = answer(talk, call, "three")
    assert [len(each) for each in texts] == [1, 3, 3]
    assert texts[1][:2] == ["How many?", "three"] and "JSON" in texts[1][2]
    assert (call.status, call.turns, call.attempts, call.completion_tokens) == ("invalid", 3, 3, 30)
    assert call.first_try_valid is False


def test_a_truncated_answer_gets_more_tokens_once():
    talk = conversation(grow=2.0)
    first = opened(talk)
    limit = first.request.max_tokens
    second = answer(talk, first, "1", "length")
    assert isinstance(second, Call) and limit is not None
    assert second.request.max_tokens == 2 * limit
    outcome = answer(talk, second, "1", "length")
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.turns) == ("truncated", 2)


def test_a_prompt_that_leaves_too_little_context_is_sent_again_for_fewer_tokens_once():
    talk = conversation()
    call = opened(talk)
    message = "maximum context length is 2048 tokens, your prompt contains 1000 input tokens"
    failure = Failure("context_overflow", message, status=400)
    smaller = talk.handle(call, CallResult(failure, HERE))
    assert isinstance(smaller, Call)
    assert (smaller.request.max_tokens, smaller.turn) == (1048, 1)
    outcome = talk.handle(smaller, CallResult(failure, HERE))
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.error_kind) == ("failed", "context_overflow")


def test_a_conversation_goes_on_in_another_process_as_it_would_have_in_this_one():
    talk = conversation(reasks=1)
    again = answer(talk, opened(talk), "three")
    assert isinstance(again, Call)
    state = talk.to_state(again)
    assert isinstance(state, ConversationState)
    other = conversation(reasks=1)
    call = other.restore(state)
    assert isinstance(call, Call)
    assert call.request.messages == again.request.messages
    outcome = answer(other, call, "four")
    assert (outcome.status, outcome.turns, outcome.prompt_tokens) == ("invalid", 2, 14)


class Data(dict):
    """A row's fields, which can be watched."""


@pytest.mark.parametrize("good", [True, False])
def test_a_row_that_ended_is_freed_without_the_garbage_collector(good):
    data = Data(text="hello")
    gone = weakref.ref(data)
    gc.disable()
    try:
        talk = conversation(data=data)
        call = opened(talk)
        failure = Failure("rejected", "no")
        outcome = answer(talk, call, "3") if good else talk.handle(call, CallResult(failure, HERE))
        del data, talk, call
        assert gone() is None
    finally:
        gc.enable()
    assert outcome.status == ("ok" if good else "failed")
