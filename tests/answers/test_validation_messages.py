from pathlib import Path

import pytest

from bagent.answers.messages import MAX_WORDS
from bagent.answers.schema.schema import OutputSchema

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
