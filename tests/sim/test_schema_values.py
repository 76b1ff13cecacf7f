from __future__ import annotations

import random
import re
from typing import Any

import jsonschema_rs
import pytest

from bagent.sim.schema_values import SchemaSampler, UnsatisfiableSchema
from bagent.sim.text import UnsupportedPattern, formatted_text, matching_text

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def record(**properties: Any) -> dict[str, Any]:
    """An object that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
NODE = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
SCHEMAS: dict[str, Any] = {
    "enum": {"enum": ["a", 1, None, {"b": 2}]},
    "all types": record(
        s=TEXT, i=WHOLE, n={"type": "number"}, b={"type": "boolean"}, z={"type": "null"},
        a={"type": "array", "items": WHOLE},
    ),
    "nested": record(people={"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3}),
    "unique items": {
        "type": "array", "items": {"enum": ["a", "b", "c", "d"]}, "minItems": 4,
        "uniqueItems": True,
    },
    "tuple": {
        "type": "array", "prefixItems": [{"const": "x"}, WHOLE], "items": False, "minItems": 2,
    },
    "contains": {"type": "array", "items": WHOLE, "contains": {"minimum": 90}},
    "string lengths": {"type": "string", "minLength": 40, "maxLength": 45},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}\\d{3,6}(-(foo|bar))?$"},
    "pattern with length": {"type": "string", "pattern": "^[a-z_]+$", "minLength": 12},
    "integer range": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    "negative range": {"type": "number", "maximum": -200.5},
    "multiples": {"type": "number", "multipleOf": 0.25, "minimum": 1, "maximum": 2},
    "any of": {"anyOf": [WHOLE, {"type": "null"}, PERSON]},
    "one of": {"oneOf": [WHOLE | {"multipleOf": 3}, WHOLE | {"multipleOf": 5}]},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": WHOLE | {"minimum": 5}}},
            {"properties": {"a": {"maximum": 6}, "b": TEXT}, "required": ["a", "b"]},
        ]
    },
    "type list": {"type": ["string", "null"], "maxLength": 10},
    "references": {
        "$defs": {"p": PERSON, "list": {"type": "array", "items": {"$ref": "#/$defs/p"}}},
        **record(team={"$ref": "#/$defs/list"}, head={"$ref": "#/$defs/p"}),
    },
    "recursion": {
        "$defs": {
            "node": record(
                value=WHOLE, left=NODE, right=NODE,
                kids={"type": "array", "items": {"$ref": "#/$defs/node"}},
            )
        },
        "$ref": "#/$defs/node",
    },
    "anchor and id": {
        "$id": "https://example.org/s", "$defs": {"x": {"$anchor": "here", "type": "integer"}},
        "type": "array", "items": {"$ref": "#here"}, "minItems": 1,
    },
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 3},
    "pattern properties": {
        "type": "object", "patternProperties": {"^x_": WHOLE}, "additionalProperties": False,
        "minProperties": 2,
    },
    "condition": {
        "type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "x": WHOLE},
        "required": ["kind"], "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["x"]}, "else": {"not": {"required": ["x"]}},
    },
    "not": {"not": TEXT},
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3,
        "exclusiveMinimum": True, "maximum": 4,
    },
    "draft 7 tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
        "items": [TEXT, WHOLE], "additionalItems": False, "minItems": 2,
    },
    "anything": {},
    "true": True,
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_instances_are_valid(name: str) -> None:
    import jsonschema

    schema = SCHEMAS[name]
    maker = SchemaSampler(schema)
    kind = jsonschema.validators.validator_for(schema)
    checker = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for seed in range(8):
        checker.validate(maker.make(random.Random(seed)))


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
    with pytest.raises(UnsatisfiableSchema, match=words):
        SchemaSampler(schema)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a", "not": {}},
        {"type": "string", "pattern": "^(?=.*x)y"},
        {"$defs": {"n": record(next={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"},
    ],
)
def test_schemas_without_an_instance_end_in_a_clear_failure(schema: Any) -> None:
    with pytest.raises(UnsatisfiableSchema, match="no valid instance"):
        SchemaSampler(schema).make(random.Random(0))


@pytest.mark.parametrize(
    "pattern",
    [
        "abc", "^a.c$", "[a-f0-9]{8}", "^[^a-z]+$", "(yes|no|may be)", "^(?:GO|HP):\\d{7}$",
        "\\w+@\\w+\\.(com|org)", "^\\s*\\S+\\D\\W$", "a*b+c?d{2}e{1,3}f{2,}",
        "^(?<year>\\d{4})-(?P<month>\\d\\d)$", "[\\]\\-x]", "[]a]", "[a-]", "\\u0041\\x42", "x{,3}",
        "a+?b*?", "^$", "\\bword\\b", "(a(b(c)*)?)+",
    ],
)  # fmt: skip
def test_the_pattern_is_found_in_the_text(pattern: str) -> None:
    python = pattern.replace("(?<year>", "(?P<year>")
    for seed in range(10):
        assert re.search(python, matching_text(random.Random(seed), pattern))


@pytest.mark.parametrize("pattern", ["a(?=b)", "(?<!a)b", "(a)\\1", "(", ")", "[", "a\\", "\\u00"])
def test_what_cannot_be_made_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        matching_text(random.Random(0), pattern)


@pytest.mark.parametrize(
    ("pattern", "least", "most"), [("^[a-z]*$", 30, 40), ("x$", 10, 10), ("^a{2,900}$", 500, 800)]
)
def test_length_bounds_are_met(pattern: str, least: int, most: int) -> None:
    for seed in range(20):
        text = matching_text(random.Random(seed), pattern, least, most)
        assert least <= len(text) <= most
        assert re.search(pattern, text)


@pytest.mark.parametrize(
    "name",
    [
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri",
        "uri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex", "uuid",
        "iri", "idn-email",
    ],
)  # fmt: skip
def test_formats_are_what_they_say(name: str) -> None:
    schema = {"type": "string", "format": name}
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    for seed in range(8):
        validator.validate(formatted_text(random.Random(seed), name))
