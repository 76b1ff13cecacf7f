import copy
from pathlib import Path

import pytest

from bagent.answers.schema.schema import OutputSchema

GOOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Review",
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "findings", "note"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z]+$", "description": "the gene"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "findings": {"type": "array", "maxItems": 5, "items": {"$ref": "#/$defs/finding"}},
    },
    "$defs": {
        "finding": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "required": ["severity", "score", "when"],
            "properties": {
                "severity": {"enum": ["low", "high"]},
                "score": {"type": "number", "minimum": 0, "maximum": 1},
                "when": {"type": "string", "format": "date"},
            },
        }
    },
}


def strict(spec):
    return OutputSchema.load(spec, base=Path()).strict


def test_schema_within_the_rules_is_strict():
    assert strict(GOOD)
    assert strict({"type": "object", "properties": {}, "additionalProperties": False})


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {
            "type": "object",
            "additionalProperties": False,
            "required": ["a"],
            "properties": {"a": schema},
        }
    return schema


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ((), {"additionalProperties": None}),
        ((), {"additionalProperties": True}),
        ((), {"required": ["name"]}),
        ((), {"required": None}),
        ((), {"type": ["object", "null"]}),
        ((), {"type": None, "anyOf": [{"$ref": "#/$defs/finding"}]}),
        ((), {"anyOf": [{"$ref": "#/$defs/finding"}]}),
        ((), {"allOf": [{"$ref": "#/$defs/finding"}]}),
        ((), {"patternProperties": {}}),
        (("$defs", "finding"), {"additionalProperties": None}),
        (("$defs", "finding"), {"required": ["severity"]}),
        (("$defs", "finding"), {"not": {"const": 1}}),
        (("$defs", "finding"), {"if": {}, "then": {}}),
        (("$defs", "finding"), {"dependentRequired": {"a": ["b"]}}),
        (("properties", "name"), {"format": "uri"}),
        (("properties", "name"), {"minLength": 1}),
        (("properties", "name"), {"default": "X"}),
        (("properties", "name"), {"type": None, "pattern": None}),
        (("properties", "findings"), {"items": None}),
        (("properties", "findings"), {"items": True}),
        (("properties", "findings"), {"uniqueItems": True}),
        (("properties", "findings", "items"), {"description": "beside a reference"}),
        (("properties", "note"), {"anyOf": None, "oneOf": [{"type": "string"}]}),
        (("properties",), {"name": True}),
        (("properties", "name"), {"type": "integer", "enum": list(range(1001)), "pattern": None}),
    ],
)
def test_each_broken_rule_is_seen(place, change):
    spec = copy.deepcopy(GOOD)
    part = spec
    for key in place:
        part = part[key]
    for key, value in change.items():
        if value is None:
            part.pop(key)
        else:
            part[key] = value
    assert not strict(spec)


@pytest.mark.parametrize("spec", [True, {}, {"type": "array", "items": {}}, deep(11)])
def test_root_is_an_object_of_at_most_ten_levels(spec):
    assert strict(deep(10))
    assert not strict(spec)
