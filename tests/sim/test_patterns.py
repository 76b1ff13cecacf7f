from __future__ import annotations

import random
import re

import jsonschema
import pytest

from bagent.sim.patterns import UnsupportedPattern, formatted_text, matching_text


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
    for seed in range(25):
        assert re.search(python, matching_text(random.Random(seed), pattern))


@pytest.mark.parametrize("pattern", ["a(?=b)", "(?<!a)b", "(a)\\1", "(", ")", "[", "a\\", "\\u00"])
def test_what_cannot_be_made_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        matching_text(random.Random(0), pattern)


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("^[a-z]*$", 30, 40), ("^x", 10, 10), ("x$", 10, 10), ("[0-9]+", 0, 2),
        ("^a{2,900}$", 500, 800),
    ],
)  # fmt: skip
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
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for seed in range(25):
        text = formatted_text(random.Random(seed), name)
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(text)


def test_unknown_formats_are_none() -> None:
    assert formatted_text(random.Random(0), "colour") is None
