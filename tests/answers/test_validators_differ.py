"""Corner cases in which ``jsonschema`` and ``jsonschema-rs`` differ; the latter decides.

The list shows what users of the former should expect, and tells when an upgrade changes it.
"""

from pathlib import Path

import pytest

from bagent.answers.schema.schema import OutputSchema
from bagent.errors import SchemaError


def by_jsonschema(spec, value):
    import jsonschema

    validator = jsonschema.Draft202012Validator(
        spec, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    try:
        return validator.is_valid(value)
    except (OverflowError, RecursionError) as error:
        return type(error).__name__


@pytest.mark.parametrize(
    ("spec", "value", "theirs", "ours"),
    [
        # decimal multiples: exact decimals here, binary floats there
        ({"multipleOf": 0.1}, 0.3, False, True),
        ({"multipleOf": 0.01}, 4.35, False, True),
        ({"multipleOf": 0.1}, 1e308, False, True),
        # patterns: ECMA-262 here, Python's re there
        ({"pattern": "^a$"}, "a\n", True, False),
        ({"pattern": r"^\d$"}, "٣", True, False),
        ({"pattern": r"^\w$"}, "é", True, False),
        # numbers
        ({"type": "integer"}, 1.0, True, True),
        ({"type": "integer"}, 2**70, True, True),
        ({"const": 1}, 1.0, True, True),
        ({"enum": [1]}, True, False, False),
        ({"maximum": 10**400}, 10**400 + 1, False, False),
        ({"uniqueItems": True}, [1, 1.0], False, False),
        ({"uniqueItems": True}, [1, True], True, True),
        # lengths count characters, not bytes or UTF-16 units
        ({"maxLength": 1}, "\U0001f600", True, True),
        # formats
        ({"format": "date"}, "2024-02-30", False, False),
        ({"format": "time"}, "10:00:00", False, False),
        ({"format": "email"}, "a@", True, False),
        ({"format": "email"}, "a b@example.org", True, False),
        ({"format": "ipv6"}, "fe80::1%eth0", False, False),
        ({"format": "regex"}, "(?P<x>a)", True, False),
        ({"format": "banana"}, "x", True, True),
    ],
)
def test_accepts_follows_the_deciding_validator(spec, value, theirs, ours):
    schema = OutputSchema.load(spec, base=Path())
    assert by_jsonschema(spec, value) == theirs
    assert schema.accepts(value) is ours
    assert bool(schema.explain(value)) is not ours


@pytest.mark.parametrize("pattern", [r"a\Z", r"(?a:x)"])
def test_patterns_of_python_only_are_refused_at_load(pattern):
    import jsonschema

    jsonschema.Draft202012Validator({"pattern": pattern}).is_valid("a")
    with pytest.raises(SchemaError, match="regex"):
        OutputSchema.load({"pattern": pattern}, base=Path())


def test_ecma_property_classes_work():
    schema = OutputSchema.load({"pattern": r"^\p{L}+$"}, base=Path())
    assert schema.accepts("éa") and not schema.accepts("1")


SPECS = [
    {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 2}}},
    {"type": "array", "items": {"enum": ["x", None, 3]}, "maxItems": 2, "uniqueItems": True},
    {"anyOf": [{"type": "string", "minLength": 2}, {"type": "boolean"}]},
    {"additionalProperties": {"type": ["string", "null"]}, "minProperties": 1},
    {"oneOf": [{"type": "number"}, {"multipleOf": 2}], "not": {"const": 5}},
    {"prefixItems": [{"type": "string"}], "items": False},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
    {"contains": {"const": "x"}, "minContains": 2, "type": "array"},
    {"propertyNames": {"pattern": "^[a-z]$"}, "dependentRequired": {"a": ["b"]}},
]
VALUES = [
    *(None, True, False, 0, 1, 2, 3, 4, 5, -1, 0.5, 1e3, "", "x", "xx", [], ["x"], ["x", "x"]),
    *([None, 3], [1, 2, 3], {}, {"a": 1}, {"a": 2}, {"a": "s"}, {"b": None}, {"a": 2, "b": "t"}),
    *({"c": 1}, {"C": None}, {"a": None, "b": None}, [[]], [{}], ["x", 1], "true", "1"),
]


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_elsewhere_both_agree(spec):
    schema = OutputSchema.load(spec, base=Path())
    verdicts = {schema.accepts(value) for value in VALUES}
    assert verdicts == {True, False}
    for value in VALUES:
        assert schema.accepts(value) == by_jsonschema(spec, value), value
        assert bool(schema.explain(value)) is not schema.accepts(value), value
