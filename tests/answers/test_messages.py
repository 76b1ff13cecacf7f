import copy
from pathlib import Path

import pytest

from bagent.answers.evaluate import evaluate
from bagent.answers.messages import (
    MAX_WORDS,
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


def test_what_goes_back_is_valid_utf8():
    *_, answer, demand = retry_messages(MESSAGES, "a\ud800", ["/x: \udfff"], SCHEMA)
    assert answer["content"] == "a\ufffd"
    assert "/x: \ufffd" in demand["content"]


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


REVIEW = {
    "type": "object",
    "required": ["name", "findings"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "n": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]},
        "when": {"format": "date-time"},
        "p": {"pattern": "^a+$"},
        "findings": {
            "type": "array",
            "items": {
                "required": ["severity"],
                "properties": {"severity": {"enum": ["low", "high", None]}},
            },
        },
    },
}


def explain(spec, value, limit=5):
    return OutputSchema.load(spec, base=Path()).explain(value, limit)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"name": "nn"}, '/: "findings" is a required property'),
        ({"name": "nn", "findings": [], "z": 1}, "/: Additional properties are not allowed"),
        ({"name": 5, "findings": []}, '/name: 5 is not of type "string"'),
        (
            {"name": "nn", "findings": [{"severity": "hgih"}]},
            '/findings/0/severity: "hgih" is not one of ["low", "high", null]',
        ),
        ({"name": "nn", "findings": [], "p": "b"}, '/p: "b" does not match "^a+$"'),
        ({"name": "nn", "findings": [], "n": 1}, "/n: 1 is less than the minimum of 3"),
    ],
)
def test_words_name_place_and_reason(value, words):
    [line] = explain(REVIEW, value)
    assert line.startswith(words)


def test_number_of_lines_is_bounded_and_lines_differ():
    value = {"name": "nn", "findings": [{}] * 50}
    assert len(explain(REVIEW, value)) == 5
    assert len(explain(REVIEW, value, 2)) == 2
    tuples = {"items": {"allOf": [{"type": "string"}, {"type": "string"}]}}
    assert explain(tuples, [1]) == ['/0: 1 is not of type "string"']


def test_every_line_is_short_and_keeps_the_reason():
    value = {"x" * 5000: {"y": "z\n" * 5000}}
    spec = {"additionalProperties": {"additionalProperties": {"maxLength": 3, "type": "integer"}}}
    lines = explain(spec, value)
    assert len(lines) == 2
    for line in lines:
        assert len(line) <= MAX_WORDS and "\n" not in line
    assert any(line.endswith('is not of type "integer"') for line in lines)
    assert any("longer than 3 characters" in line for line in lines)


def shape(name, *sizes):
    """An object of this kind with these numbers."""
    numbers = {size: {"type": "number"} for size in sizes}
    return {"required": ["kind", *sizes], "properties": {"kind": {"const": name}, **numbers}}


SHAPES = {"anyOf": [shape("circle", "r"), shape("box", "w", "h")]}


@pytest.mark.parametrize(
    ("spec", "value", "words"),
    [
        (SHAPES, {"kind": "box", "w": "wide", "h": 1}, '/w: "wide" is not of type "number"'),
        (
            {"anyOf": [{"type": "null"}, {"type": "array", "items": SHAPES}]},
            [{"kind": "circle", "r": None}],
            '/0/r: null is not of type "number"',
        ),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, 3, "/: 3 is not valid under any of the schemas"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 1}]}, 3, "/: 3 is valid under more than one"),
    ],
)
def test_of_several_branches_the_nearest_is_explained(spec, value, words):
    [line] = explain(spec, value)
    assert line.startswith(words)
