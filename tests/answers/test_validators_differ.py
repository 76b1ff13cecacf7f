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
