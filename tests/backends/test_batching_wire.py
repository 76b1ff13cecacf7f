"""The replies in one answer to several calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bagent.backends.batching.wire import GroupAnswer, read_group, read_prompt_ids
from bagent.types import Failure, Reply, Usage

JSON = {"Content-Type": "application/json"}


def choice(index: Any, text: Any = None, **fields: Any) -> dict[str, Any]:
    """A choice of a text completion."""
    return {
        "index": index,
        "text": text if text is not None else f"answer {index}",
        "finish_reason": "stop",
        **fields,
    }


def body(*choices: Any, **fields: Any) -> bytes:
    """The body of an answer."""
    return msgspec.json.encode({"id": "cmpl-1", "model": "m", "choices": choices, **fields})


def read(raw: bytes, size: int, first_ids: tuple[int, ...] = ()) -> GroupAnswer:
    """The answer, which is good as a whole."""
    found = read_group(raw, JSON, size, first_ids)
    assert isinstance(found, GroupAnswer), found
    return found


def texts(answer: GroupAnswer) -> list[str | None]:
    """The texts by call; None for a failure."""
    return [r.text if isinstance(r, Reply) else None for r in answer.results]


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([choice(0), choice(2)], ["answer 0", None, "answer 2"]),
        ([choice(0), choice(1, "a"), choice(1, "b"), choice(2)], ["answer 0", None, "answer 2"]),
        ([choice(0), choice(7), choice(2)], ["answer 0", None, "answer 2"]),
        ([choice(0), choice(True), choice(2)], ["answer 0", None, "answer 2"]),
    ],
    ids=["missing", "twice", "of no call", "index that is no number"],
)
def test_an_answer_that_is_not_clear_fails_its_own_call_only(
    choices: list[Any], expected: list[str | None]
) -> None:
    found = read(body(*choices), 3)
    assert texts(found) == expected
    failure = found.results[1]
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.passing, failure.status) == ("bad_response", True, 200)


def test_tokens_are_counted_by_the_call_and_the_sum_is_given_to_none() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    found = read(
        body(
            choice(0, token_ids=[1, 2], prompt_token_ids=[5, 6, 7]),
            choice(1, token_ids=[], prompt_token_ids=[5]),
            choice(2, token_ids=None),
            usage=usage,
        ),
        3,
    )
    replies = [r for r in found.results if isinstance(r, Reply)]
    assert [r.usage for r in replies] == [Usage(3, None, 2), Usage(1, None, 0), Usage()]
    assert found.total == Usage(prompt=9, completion=5)


def test_a_batch_of_chats_is_read_with_its_reasoning() -> None:
    raw = body(
        {"index": 1, "message": {"content": "b", "reasoning": "hm"}, "finish_reason": "stop"},
        {"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "token_ids": [1, 2, 3]},
    )
    found = read(raw, 2)
    first, second = found.results
    assert isinstance(first, Reply)
    assert isinstance(second, Reply)
    assert (first.text, first.usage.completion, first.reasoning) == ("a", 3, None)
    assert (second.text, second.reasoning, second.request_id) == ("b", "hm", "cmpl-1")


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b'{"error": {"message": "queue is full", "code": 503}}', "overloaded"),
        (b'{"choices": null}', "bad_response"),
        (b"[]", "bad_response"),
        (b'{"choices": [{"index": 0, "te', "bad_response"),
    ],
)
def test_a_body_that_is_no_answer_is_one_failure_for_all(raw: bytes, kind: str) -> None:
    found = read_group(raw, JSON, 2)
    assert isinstance(found, Failure)
    assert (found.kind, found.passing) == (kind, True)


def test_prompts_that_begin_otherwise_than_they_should_are_noticed() -> None:
    good = choice(0, prompt_token_ids=[1, 2, 3])
    doubled = choice(1, prompt_token_ids=[1, 1, 2, 3])
    assert not read(body(good), 1, (1, 2)).strange_prompt
    assert read(body(good, doubled), 2, (1, 2)).strange_prompt
    assert not read(body(choice(0), choice(1)), 2, (1, 2)).strange_prompt


def test_the_prompt_ids_of_a_chat_answer_are_found_where_they_are_told() -> None:
    assert read_prompt_ids(b'{"choices": [], "prompt_token_ids": [3, 4]}') == [3, 4]
    assert read_prompt_ids(b'{"choices": []}') is None
    assert read_prompt_ids(b'{"prompt_token_ids": "x"}') is None
    assert read_prompt_ids(b"nonsense") is None
