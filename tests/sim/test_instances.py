from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from bagent.sim.instances import InstanceMaker, NoInstance

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, Any] = {
    "flat object": PERSON,
    "enum": {"enum": ["a", 1, None, {"b": 2}]},
    "const": {"type": "object", "properties": {"kind": {"const": "x"}}, "required": ["kind"]},
    "all types": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "n": {"type": "number"},
            "b": {"type": "boolean"},
            "z": {"type": "null"},
            "a": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["s", "i", "n", "b", "z", "a"],
    },
    "nested": {
        "type": "object",
        "properties": {"people": {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3}},
        "required": ["people"],
    },
    "array bounds": {"type": "array", "items": {"type": "string"}, "minItems": 5, "maxItems": 5},
    "unique items": {
        "type": "array",
        "items": {"enum": ["a", "b", "c", "d"]},
        "minItems": 4,
        "uniqueItems": True,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"const": "x"}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    },
    "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 90}},
    "string lengths": {"type": "string", "minLength": 40, "maxLength": 45},
    "short string": {"type": "string", "maxLength": 1},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}\\d{3,6}(-(foo|bar))?$"},
    "pattern with length": {"type": "string", "pattern": "^[a-z_]+$", "minLength": 12},
    "date": {"type": "string", "format": "date"},
    "mail, uuid, uri": {
        "type": "object",
        "properties": {
            "mail": {"type": "string", "format": "email"},
            "id": {"type": "string", "format": "uuid"},
            "link": {"type": "string", "format": "uri"},
            "at": {"type": "string", "format": "date-time"},
            "ip": {"type": "string", "format": "ipv6"},
        },
        "required": ["mail", "id", "link", "at", "ip"],
    },
    "integer range": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    "negative range": {"type": "number", "maximum": -200.5},
    "multiples": {"type": "number", "multipleOf": 0.25, "minimum": 1, "maximum": 2},
    "any of": {"anyOf": [{"type": "integer"}, {"type": "null"}, PERSON]},
    "one of": {
        "oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5}}},
            {"properties": {"a": {"maximum": 6}, "b": {"type": "string"}}, "required": ["a", "b"]},
        ]
    },
    "type list": {"type": ["string", "null"], "maxLength": 10},
    "references": {
        "$defs": {"p": PERSON, "list": {"type": "array", "items": {"$ref": "#/$defs/p"}}},
        "type": "object",
        "properties": {"team": {"$ref": "#/$defs/list"}, "head": {"$ref": "#/$defs/p"}},
        "required": ["team", "head"],
    },
    "recursion": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    "right": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value", "left", "right", "kids"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "anchor and id": {
        "$id": "https://example.org/s",
        "$defs": {"x": {"$anchor": "here", "type": "integer"}},
        "type": "array",
        "items": {"$ref": "#here"},
        "minItems": 1,
    },
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 3},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 2,
    },
    "condition": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "integer"}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["x"]},
        "else": {"not": {"required": ["x"]}},
    },
    "not": {"not": {"type": "string"}},
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 4,
    },
    "draft 7 tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "string"}, {"type": "integer"}],
        "additionalItems": False,
        "minItems": 2,
    },
    "anything": {},
    "true": True,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_instances_are_valid(name: str) -> None:
    schema = SCHEMAS[name]
    maker = InstanceMaker(schema)
    kind = jsonschema.validators.validator_for(schema)
    checker = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for seed in range(30):
        checker.validate(maker.make(random.Random(seed)))


def test_same_seed_same_instance_and_seeds_differ() -> None:
    maker = InstanceMaker(SCHEMAS["nested"])
    made = [maker.make(random.Random(seed)) for seed in range(20)]
    assert made == [maker.make(random.Random(seed)) for seed in range(20)]
    assert len({str(value) for value in made}) > 10


def test_every_branch_is_taken_sometimes() -> None:
    maker = InstanceMaker(SCHEMAS["any of"])
    kinds = {type(maker.make(random.Random(seed))) for seed in range(60)}
    assert kinds == {int, type(None), dict}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strange"}, "not a usable JSON schema"),
        ({"$ref": "#/nowhere"}, "not a usable JSON schema"),
        ({"$ref": "http://127.0.0.1:9/remote.json"}, "not a usable JSON schema"),
        ({"type": "string", "pattern": "("}, "not a usable JSON schema"),
        ("text", "is an object"),
    ],
)
def test_broken_schemas_are_refused(schema: Any, words: str) -> None:
    with pytest.raises(NoInstance, match=words):
        InstanceMaker(schema)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a", "not": {}},
        {"type": "string", "pattern": "^(?=.*x)y"},
        {
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/$defs/n"}},
                    "required": ["next"],
                }
            },
            "$ref": "#/$defs/n",
        },
    ],
)
def test_schemas_without_an_instance_end_in_a_clear_failure(schema: Any) -> None:
    with pytest.raises(NoInstance, match="no valid instance"):
        InstanceMaker(schema).make(random.Random(0))
