import copy
from pathlib import Path

import pytest

from bagent.answers.evaluate import evaluate
from bagent.answers.messages import (
    add_schema_instruction,
    retry_messages,
    schema_instruction,
    truncate_middle,
)
from bagent.answers.schema.schema import OutputSchema
from bagent.types import Reply

SCHEMA = OutputSchema.load(
    {"type": "object", "required": ["a"], "properties": {"a": {"enum": ["é", "low"]}}}, base=Path()
)
MESSAGES = [{"role": "system", "content": "You review."}, {"role": "user", "content": "Gene X"}]


def test_reask_carries_the_answer_and_the_validators_words():
    verdict = evaluate(Reply('{"a": "hgih"}', "stop"), SCHEMA)
    asked = retry_messages(MESSAGES, verdict.text, verdict.violations, SCHEMA)
    assert asked[:2] == MESSAGES
    assert asked[2] == {"role": "assistant", "content": '{"a": "hgih"}'}
    assert asked[3]["role"] == "user"
    assert asked[3]["content"] == (
        "Your answer is not valid:\n"
        '- /a: "hgih" is not one of ["é", "low"]\n'
        "Answer again, in full, with only the JSON object that was asked for: "
        "no other text, no code fence."
    )


def test_long_answer_keeps_head_and_tail_within_the_bound():
    text = "HEAD" + "x" * 10_000 + "TAIL"
    for limit in (100, 5000):
        content = retry_messages(MESSAGES, text, ["w"], SCHEMA, limit_chars=limit)[2]["content"]
        assert len(content) == limit
        assert content.startswith("HEAD") and content.endswith("TAIL")
        assert "10008 characters, middle left out" in content
    assert [truncate_middle("abcdef", size) for size in (3, 6, 0)] == ["abc", "abcdef", ""]


@pytest.mark.parametrize("text", [None, " \n"])
def test_empty_answer_is_not_sent_back(text):
    array = OutputSchema.load({"type": "array"}, base=Path())
    asked = retry_messages(MESSAGES, text, [], array)
    assert [message["role"] for message in asked] == ["system", "user", "user"]
    assert asked[-1]["content"].startswith("Your answer is not valid.\n")
    assert "only the JSON that" in asked[-1]["content"]


PARTS = [{"type": "text", "text": "You review."}]
TEXT = schema_instruction(SCHEMA)


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ({"role": "developer", "content": "You review."}, f"You review.\n\n{TEXT}"),
        ({"role": "system", "content": None}, TEXT),
        ({"role": "system", "content": PARTS}, [*PARTS, {"type": "text", "text": TEXT}]),
    ],
)
def test_schema_stands_at_the_end_of_the_system_message(system, content):
    described = add_schema_instruction([system, MESSAGES[1]], SCHEMA)
    assert described == [system | {"content": content}, MESSAGES[1]]
    made = add_schema_instruction(MESSAGES[1:], SCHEMA)
    assert made == [{"role": "system", "content": TEXT}, MESSAGES[1]]


def test_given_messages_are_left_alone():
    messages = [{"role": "system", "content": [{"type": "text", "text": "s"}]}, MESSAGES[1]]
    before = copy.deepcopy(messages)
    add_schema_instruction(messages, SCHEMA)
    retry_messages(messages, "x", ["w"], SCHEMA)
    assert messages == before
