"""Which turns of agents are streamed."""

from __future__ import annotations

from bagent.agents.plan import FIRST, SAMPLE_EVERY, FirstToolCallTimer, StreamPolicy
from bagent.types import ToolCall


def of_later(choice: StreamPolicy, turn: int = 1) -> int:
    """How many of the turns after the first ones are streamed."""
    return sum(choice.next(turn) for _ in range(2 * SAMPLE_EVERY))


def test_the_first_turns_are_streamed_and_the_rest_where_calls_come_early() -> None:
    choice = StreamPolicy()
    assert all(choice.next(1) for _ in range(FIRST))
    for _ in range(8):
        choice.note(1, 10.0, 2.0)
        choice.note(1, 10.0, 0.0)  # an answer, without a call
    assert of_later(choice) == 2 * SAMPLE_EVERY


def test_turns_whose_calls_come_at_their_end_are_no_longer_streamed_but_for_a_sample() -> None:
    choice = StreamPolicy()
    assert all(choice.next(1) for _ in range(FIRST))
    assert of_later(choice) == 2  # nothing is known yet
    choice.note(1, 10.0, 0.5)
    assert of_later(choice) == 2
    for _ in range(64):
        choice.note(1, 10.0, 3.0)  # the model has changed its ways
    assert of_later(choice) == 2 * SAMPLE_EVERY


def test_turns_that_are_answers_are_not_streamed_for_the_calls_of_earlier_ones() -> None:
    choice = StreamPolicy()
    for turn, saved in ((1, 3.0), (2, 0.0), (9, 3.0)):
        assert all(choice.next(turn) for _ in range(FIRST))
        choice.note(turn, 10.0, saved)
    assert of_later(choice, 1) == of_later(choice, 12) == 2 * SAMPLE_EVERY
    assert of_later(choice, 2) == 2


def test_the_first_whole_call_of_the_last_stream_is_the_one_that_counts() -> None:
    taken: list[ToolCall] = []
    times = iter([7.0, 9.0])
    first = FirstToolCallTimer(lambda: next(times))
    call = ToolCall("c", "look", "{}")
    on_call = first.watched(lambda: taken.append)
    assert first.at is None
    on_call(call)
    on_call(call)
    assert first.at == 7.0 and taken == [call, call]
    on_call = first.watched(lambda: taken.append)  # streamed again: no call of it came yet
    assert first.at is None
    on_call(call)
    assert first.at == 9.0
